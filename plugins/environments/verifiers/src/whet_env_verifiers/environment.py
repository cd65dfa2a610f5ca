"""The environment `verifiers`: processes that run verifiers play each episode at the endpoint of that episode.

The driver opens the endpoint of an episode and asks a process to play a task there. In the process, harness, tools,
rewards and judges are the taskset's. Its requests for the model come to the endpoint, which records what is sampled,
and the scores of its trace come back as rewards.
"""

import asyncio
import math
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.data.messages import Message
from whet.data.records import Task
from whet.errors import ConfigError, DataError, EpisodeError, InfrastructureError, WhetError
from whet.interfaces.environment import Model
from whet.runtime.interpreters import find
from whet_env_verifiers.config import VerifiersConfig
from whet_env_verifiers.process import Process, Refused

_PAGE = 500
_OF_THE_TASKSET = frozenset({"TaskError", "EnvError"})
"""Errors of verifiers whose cause is code of the taskset. All others are errors of the infrastructure."""


class Verifiers:
    """The environment `verifiers`."""

    def __init__(self, config: VerifiersConfig) -> None:
        self._config = config
        self._python = _interpreter(config)
        self._starting = threading.Lock()
        self._processes: list[Process] = []
        self._closed = False
        self._found: dict[str, Any] = {}
        try:
            process = self._start()
            self._weights = {**dict.fromkeys(self._found["rewards"], 0.0), "reward": 1.0}
            self._splits = {name: self._loaded(process, name, count) for name, count in self._found["splits"].items()}
        except (Refused, InfrastructureError, KeyError, TypeError, ValueError, AttributeError) as error:
            self.close()
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, Refused | WhetError) else error
            raise ConfigError(
                f"verifiers.taskset: {config.taskset!r} cannot be opened in {self._python}: {reason}. Install "
                "verifiers 0.4 or later and the taskset there, or name another interpreter by `python`"
            ) from error

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Weight 1 for `reward`, which is verifiers' weighted sum. Its parts and the metrics are only recorded."""
        return self._weights

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split."""
        if split not in self._splits:
            raise DataError(f"there is no split {split!r}; there are {', '.join(self._splits)}")
        return self._splits[split]

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Play one episode in a process of verifiers. Returns its rewards."""
        process = self._chosen()
        if process is None:
            process = await asyncio.to_thread(self._another)
        process.playing += 1
        try:
            async with model.endpoint() as address:
                place = {"url": address.base_url, "key": address.api_key, "model": address.model}
                found = await process.result("play", {**task.data, **place}, self._config.seconds)
        except Refused as error:
            raise EpisodeError(f"taskset {self._config.taskset}: {error}") from error
        finally:
            process.playing -= 1
        return self._rewards(found, model)

    def close(self) -> None:
        """End the processes."""
        self._closed = True
        processes, self._processes = self._processes, []
        for process in processes:
            process.close()

    def _chosen(self) -> Process | None:
        """Return the process with the fewest episodes. None: another one is to be started first."""
        alive = [one for one in self._processes if one.alive]
        least = min(alive, key=lambda one: one.playing, default=None)
        enough = len(alive) >= self._config.processes or self._starting.locked()
        return least if least and (enough or not least.playing) else None

    def _another(self) -> Process:
        """Start a process, if there is still none to choose. Raises `InfrastructureError`."""
        with self._starting:
            self._processes = [one for one in self._processes if one.alive]
            least = min(self._processes, key=lambda one: one.playing, default=None)
            if least and (not least.playing or len(self._processes) >= self._config.processes):
                return least
            try:
                return self._start()
            except Refused as error:
                raise InfrastructureError(f"taskset {self._config.taskset} cannot be opened again: {error}") from error

    def _start(self) -> Process:
        """Start a process and open the taskset in it. Raises `Refused` and `InfrastructureError`."""
        config = self._config
        folders = [str(Path(folder).expanduser().absolute()) for folder in config.folders]
        process = Process(self._python, folders, int(config.memory_gib * (1 << 30)), config.message_bytes)
        names = ("taskset", "options", "test_options", "test_tasks", "tasks", "agent", "max_turns")
        try:
            found = process.answered("open", {name: getattr(config, name) for name in names}, config.start_seconds)
            if self._found and found["digest"] != self._found["digest"]:
                raise InfrastructureError(
                    f"taskset {config.taskset} has other tasks each time that it is loaded; set its seed in `options`"
                )
        except BaseException:
            process.close()
            raise
        self._found = self._found or found
        self._processes = [*self._processes, process]
        if self._closed:
            process.close()
        return process

    def _loaded(self, process: Process, split: str, count: int) -> tuple[Task, ...]:
        tasks: list[Task] = []
        for first in range(0, count, _PAGE):
            asked = {"split": split, "first": first, "count": _PAGE}
            for key, opening in process.answered("tasks", asked, self._config.start_seconds):
                prompt = tuple(Message(str(role), str(text)) for role, text in opening)
                tasks.append(Task(prompt, {"split": split, "index": len(tasks)}, id=str(key)))
        if len(tasks) != count:
            raise ValueError(f"{len(tasks)} of {count} tasks of the split {split} were sent")
        return tuple(tasks)

    def _rewards(self, found: Any, model: Model) -> Mapping[str, float]:
        """Return the rewards of an episode. Raises `EpisodeError` and `InfrastructureError`."""
        named = f"taskset {self._config.taskset}"
        try:
            errors = "; ".join(f"{kind}: {text}" for kind, text in found["errors"])
            if not found["good"]:
                if any(kind in _OF_THE_TASKSET for kind, _ in found["errors"]):
                    raise EpisodeError(f"{named}: {errors}")
                raise InfrastructureError(f"{named}: {errors or 'the episode failed without an error'}")
            if found["traces"] != 1:
                raise EpisodeError(f"{named} was played by {found['traces']} agents, wanted one")
            if missing := [name for name, one in found["rewards"].items() if one is None]:
                raise InfrastructureError(f"{named} did not compute {', '.join(missing)} ({found['stop'] or errors})")
            parts = {name: (float(score), float(weight)) for name, (score, weight) in found["rewards"].items()}
            metrics = {name: float(value) for name, value in found["metrics"].items() if value is not None}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InfrastructureError(f"{named}: its process answered with {found!r:.200}") from error
        total = math.fsum(score * weight for score, weight in parts.values()) if parts else 0.0
        model.record("stop", found["stop"])
        rewards = {**metrics, **{name: score for name, (score, _) in parts.items()}, "reward": total}
        for name in rewards:
            self._weights.setdefault(name, 0.0)
        return rewards


def _interpreter(config: VerifiersConfig) -> str:
    if not config.python:
        return sys.executable
    try:
        return str(find(config.python))
    except ConfigError as error:
        raise ConfigError(f"verifiers.python: {error}") from error
