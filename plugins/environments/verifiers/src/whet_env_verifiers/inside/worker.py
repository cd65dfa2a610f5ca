"""The program that runs verifiers, in an interpreter that has it. Requests and answers are lines of JSON.

    {"id": 1, "do": "open", ...}              {"id": 1, "ok": {"splits": {"train": 100}, "digest": ..., ...}}
    {"id": 2, "do": "tasks", ...}             {"id": 2, "ok": [[key, [[role, text], ...]], ...]}
    {"id": 3, "do": "play", "url": ...}       {"id": 3, "ok": {"good": true, "rewards": {name: [score, weight]}, ...}}
    {"id": 4, "do": "ping"}                   {"id": 4, "ok": null}
    {"cancel": 3}                             {"id": 2, "error": "..."} where a request raised

Answers are written to the descriptor that was stdout; what verifiers prints goes to stderr. The process ends with its
stdin. It imports nothing of whet.
"""

import asyncio
import hashlib
import itertools
import json
import os
import resource
import sys
import threading
from contextlib import AsyncExitStack
from typing import Any

AGENT_KEYS = ("harness", "runtime", "max_turns")
HARNESS = "whet_verifiers_harness"
_MOST_NAMES = 64
_LONGEST_NAME = 100


class Player:
    """One taskset, opened once for each split that has options of its own."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._gateway: Any = None
        self._splits: dict[str, tuple[Any, list[Any]]] = {}

    async def open(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Load the tasks, and serve what episodes need."""
        from whet_verifiers_gateway import Gateway  # type: ignore[import-not-found]  # it stands beside this file

        self._gateway = await self._stack.enter_async_context(Gateway().serving())
        train, tasks = await self._opened(asked, asked["options"], asked["tasks"])
        if asked["test_options"] is not None:
            most = asked["test_tasks"] or asked["tasks"]
            self._splits = {"train": (train, tasks), "test": await self._opened(asked, asked["test_options"], most)}
        elif asked["test_tasks"]:
            first = len(tasks) - asked["test_tasks"]
            if first < 1:
                raise ValueError(f"the taskset has {len(tasks)} tasks, so {asked['test_tasks']} cannot be held out")
            self._splits = {"train": (train, tasks[:first]), "test": (train, tasks[first:])}
        else:
            self._splits = {"train": (train, tasks)}
        digest = hashlib.sha256()
        for _, held in self._splits.values():
            for task in held:
                digest.update(f"{task.key}\n".encode())
        return {
            "splits": {name: len(held) for name, (_, held) in self._splits.items()},
            "digest": digest.hexdigest(),
            "rewards": self._names(tasks[0]),
        }

    async def tasks(self, asked: dict[str, Any]) -> list[Any]:
        """Return some tasks of a split: their key, and the messages that an episode begins with."""
        held = self._splits[asked["split"]][1]
        return [[task.key, _opening(task.data)] for task in held[asked["first"] : asked["first"] + asked["count"]]]

    async def play(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Play an episode, and return its outcome."""
        import verifiers.v1 as vf
        from whet_verifiers_gateway import KEY

        env, tasks = self._splits[asked["split"]]
        client = vf.EvalClientConfig(base_url=self._gateway.url, api_key_var=KEY)
        context = vf.ModelContext(model=asked["model"], client=client, sampling=vf.SamplingConfig())
        rollouts: list[str] = []

        def begun(trace: Any) -> None:
            rollouts.append(trace.id)
            self._gateway.targets[trace.id] = (asked["url"], asked["key"])

        try:
            episode = await env.run_episode(tasks[asked["index"]], context, on_trace=begun)
        finally:
            for rollout in rollouts:
                self._gateway.targets.pop(rollout, None)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        trace = episode.traces[0] if len(episode.traces) == 1 else None
        return {
            "good": bool(episode.ok),
            "traces": len(episode.traces),
            "errors": [[error.type, error.message[:2000]] for error in errors[-8:]],
            "rewards": {name: one and [one.score, one.weight] for name, one in _few(trace.rewards)} if trace else {},
            "metrics": dict(_few(trace.metrics)) if trace else {},
            "stop": str(trace.stop_condition or "")[:_LONGEST_NAME] if trace else "",
        }

    async def _opened(self, asked: dict[str, Any], options: dict[str, Any], most: int) -> tuple[Any, list[Any]]:
        """Return the environment of a taskset, serving, and its first tasks."""
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.runtimes import SubprocessConfig
        from verifiers.v1.utils.loaders import default_harness_id, harness_class, load_environment, resolve_env_config

        taskset = {"id": asked["taskset"], **options}
        agents = sorted(agent_config_fields(resolve_env_config({"taskset": taskset})))
        if len(agents) != 1:
            raise ValueError(f"the taskset is played by the agents {', '.join(agents)}; only one agent can be trained")
        chosen = {"runtime": {"type": "subprocess"}, "max_turns": asked["max_turns"], **asked["agent"]}
        if "harness" not in chosen and default_harness_id(asked["taskset"]) == "bash":
            chosen["harness"] = {"id": HARNESS}
        config = resolve_env_config({"taskset": taskset, agents[0]: chosen})
        agent = agent_config_fields(config)[agents[0]]
        harness = config.agent_harnesses()[agents[0]].id
        if harness_class(harness).EXECUTES_CODE and isinstance(agent.runtime, SubprocessConfig):
            raise ValueError(
                f"the harness {harness} executes what the model writes, and the runtime subprocess is this machine; "
                "set agent.runtime, e.g. {type: docker}"
            )
        env = load_environment(config)
        tasks = list(itertools.islice(env.taskset, most))
        if not tasks:
            raise ValueError("the taskset has no tasks")
        await self._stack.enter_async_context(env.serving())
        return env, tasks

    def _names(self, task: Any) -> list[str]:
        judges = [judge.reward_name for judge in task.plugged_judges()]
        return [name[:_LONGEST_NAME] for name in [*(one.__name__ for one in task.hooks("reward")), *judges]]


def _few(values: Any) -> list[tuple[str, Any]]:
    return [(str(name)[:_LONGEST_NAME], value) for name, value in itertools.islice(values.items(), _MOST_NAMES)]


def _opening(data: Any) -> list[list[str]]:
    """Return the messages of a task, as far as they are known before the episode."""
    from verifiers.v1.types import content_text

    opening = [["system", data.system_prompt]] if data.system_prompt else []
    if isinstance(data.prompt, str):
        opening.append(["user", data.prompt])
    for message in data.prompt or [] if not isinstance(data.prompt, str) else []:
        opening.append([message.role, content_text(message.content)])
    if not any(role == "user" for role, _ in opening):
        opening.append(["user", data.description or data.name or "(The environment begins.)"])
    return opening


class Worker:
    """Reads requests and writes answers."""

    def __init__(self, answers: int) -> None:
        self._answers, self._player = answers, Player()
        self._running: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Answer requests until stdin ends. Then the process ends, also if foreign code still runs in it."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=_read, args=(loop, self._asked), daemon=True).start()
        await asyncio.Event().wait()

    def _asked(self, line: bytes) -> None:
        asked = json.loads(line)
        if "cancel" in asked:
            if task := self._running.get(asked["cancel"]):
                task.cancel()
            return
        task = asyncio.create_task(self._done(asked))
        self._running[asked["id"]] = task
        task.add_done_callback(lambda _: self._running.pop(asked["id"], None))

    async def _done(self, asked: dict[str, Any]) -> None:
        try:
            found = None if asked["do"] == "ping" else await getattr(self._player, asked["do"])(asked)
            answer = json.dumps({"id": asked["id"], "ok": found})
        except Exception as error:  # the answer is the error, also of foreign code
            answer = json.dumps({"id": asked["id"], "error": f"{type(error).__name__}: {error}"[:4000]})
        _write(self._answers, answer.encode() + b"\n")


def _read(loop: asyncio.AbstractEventLoop, asked: Any) -> None:
    for line in sys.stdin.buffer:
        loop.call_soon_threadsafe(asked, line)
    os._exit(0)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def main() -> None:
    """Serve, with the folders of imports and the limit of memory from the arguments."""
    folders, limit = json.loads(sys.argv[1]), int(sys.argv[2])
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    sys.path += [folder for folder in folders if folder not in sys.path]
    there = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *([there] if there else [])])  # for servers of tools
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    answers = os.dup(1)
    os.dup2(2, 1)
    asyncio.run(Worker(answers).serve())


if __name__ == "__main__":
    main()
