"""The environment `reasoning-gym`: one question, one response, and the library's own score.

    driver                                          sandbox
    task 7 of `train`                           ->  data[7] of reasoning-gym
    question, answer                            <-
    response -> text between the answer's tags  ->  score_answer(answer, data[7]), in a process forked for it
    score                                       <-

The driver does not import reasoning-gym. Its scorers are foreign code, and nine of them evaluate the answer as Python.
"""

import functools
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

from attrs import evolve

from whet.data.messages import Conversation, Message
from whet.data.records import Task
from whet.errors import DataError, InfrastructureError, WhetError
from whet.interfaces.environment import Model
from whet.interfaces.undecided import note
from whet_data.generated import GeneratedTasks
from whet_data.quoting import filled
from whet_env_reasoning_gym.answers import extracted
from whet_env_reasoning_gym.config import HALF, ReasoningGymConfig
from whet_sandbox.open import open_sandbox, why_not
from whet_sandbox.sandbox import ProgramEnded
from whet_sandbox.served import Served, ended, is_installed, with_installed

_LONGEST: Final = 100_000
"""A longer answer counts as no answer."""
_FOLDER: Final = "whet_env_reasoning_gym/inside"
_KEPT: Final = 4096
_UNLIMITED_CPU: Final = 1.0e6
"""A process serves the whole run, so it has no such limit. Each scoring has its own."""


class ReasoningGym:
    """The environment `reasoning-gym`: rewards `score` and `correct`; one of them is trained on."""

    def __init__(self, config: ReasoningGymConfig) -> None:
        self._config = config
        self._served = _served(config)
        self._system: str | None = None
        self._made = functools.lru_cache(maxsize=_KEPT)(self._task)

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Weight 1 for `score`, or with a threshold for `correct`. `failed` is recorded only."""
        correct = float(self._config.threshold > 0)
        return {"score": 1.0 - correct, "correct": correct, "failed": 0.0}

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of `train` or `test`. Raises `DataError` where the library refuses the data set."""
        counts = {"train": self._config.train_tasks, "test": self._config.test_tasks}
        if split not in counts:
            raise DataError(f"there is no split {split!r}; there are {', '.join(counts)}")
        if self._system is None:
            self._system = self._system_message(_greeted(self._served))
        return GeneratedTasks(counts[split], lambda index: self._made(split, index))

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Play one episode: one response, and the library's score of the text between its answer tags.

        Raises `InfrastructureError` if the library cannot be asked. If the scorer fails at an answer, the score is 0.
        """
        reply = await model.reply(task.prompt)
        answer = extracted(reply.text)
        if answer is not None and len(answer) > _LONGEST:
            answer = None
        score, failure = await self._score(task, answer)
        if failure:
            note(failure)
        model.record("verdict", failure or f"score {score:g}")
        bar = self._config.threshold or 1.0
        return {"score": score, "correct": float(score >= bar), "failed": float(bool(failure))}

    def final_answer(self, messages: Conversation) -> str | None:
        """Return the answer for majority voting: the text between the answer tags."""
        return extracted(messages[-1].text) or None

    def close(self) -> None:
        """End all processes."""
        self._served.close()

    async def _score(self, task: Task, answer: str | None) -> tuple[float, str]:
        """Return the score of an answer, and, if the scorer failed, why the score is 0."""
        data = task.data
        question = {"score": answer, "question": data["question"], "split": data["split"], "index": data["index"]}
        seconds = self._config.task_seconds + 2 * self._config.limits.wall_seconds
        told, reason = None, ""
        for _ in range(2):  # an answer may end the process that scores it: the second one is a new process
            try:
                told = await self._served.ask(question, seconds)
                break
            except ProgramEnded as error:
                reason = ended(error)
        name = f"the scorer of {data['source']!r}"
        if told is None:
            return 0.0, f"{name} ended twice with this answer: {reason}"
        if "score" in told:
            if not 0 <= told["score"] <= 1:
                return 0.0, f"{name} gave {told['score']!r}, wanted a number from 0 to 1"
            return told["score"], ""
        if told.get("differs"):
            raise InfrastructureError(
                f"reasoning-gym made another question for task {data['index']} of {data['split']!r} of "
                f"{data['source']!r} than before: its answer cannot be scored"
            )
        return 0.0, f"{name} failed: {told.get('raised') or told.get('stopped')}"

    def _task(self, split: str, index: int) -> Task:
        try:
            told = self._served.ask_now({"split": split, "index": index}, self._config.task_seconds)
        except ProgramEnded as error:
            told = {"raised": ended(error)}
        if "question" not in told:
            raise DataError(
                f"reasoning-gym cannot make task {index} of {split!r} of {self._config.dataset!r}: "
                f"{told.get('raised') or told.get('refused')}"
            )
        asked = Message("user", filled(self._config.prompt, {"question": told["question"]}))
        system = (Message("system", self._system),) if self._system else ()
        source = told["source"]
        return Task((*system, asked), {**told, "split": split, "index": index}, id=f"{source}-{split}-{index}")

    def _system_message(self, systems: Mapping[str, str]) -> str:
        wanted = self._config.system
        if wanted in systems or not wanted:
            return systems.get(wanted, "")
        if not any(character.isspace() for character in wanted):
            raise DataError(f"reasoning-gym has no system message {wanted!r}; it has {', '.join(systems)}")
        return wanted


def problem(config: ReasoningGymConfig) -> tuple[str, str] | None:
    """Return the wrong field and the reason, if the data set cannot be made on this machine."""
    chosen = config.sandbox
    if reason := why_not(chosen):
        return "sandbox", f"no answer can be scored in the sandbox {chosen.component.name!r} on this machine: {reason}"
    if not is_installed(chosen, "reasoning_gym"):
        return "use", "reasoning-gym is not installed where the sandbox looks; run `pip install reasoning-gym`"
    return _refusal(repr((config.dataset, config.config, config.system, chosen)), config)


_REFUSALS: dict[str, tuple[str, str] | None] = {}


def _refusal(key: str, config: ReasoningGymConfig) -> tuple[str, str] | None:
    if key not in _REFUSALS:
        environment = ReasoningGym(evolve(config, scorers=1))
        try:
            environment.tasks("train")[0]
            _REFUSALS[key] = None
        except WhetError as error:
            _REFUSALS[key] = ("config" if config.config else "dataset", str(error))
        finally:
            environment.close()
    return _REFUSALS[key]


def _served(config: ReasoningGymConfig) -> Served:
    limits = config.limits
    setup = {
        "dataset": config.dataset, "config": config.config, "limits": limits.as_order(),
        "splits": {
            "train": {"seed": config.seed, "size": config.train_tasks},
            "test": {"seed": config.seed + HALF, "size": config.test_tasks},
        },
    }  # fmt: skip
    sandbox = open_sandbox(
        with_installed(config.sandbox), evolve(limits, cpu_seconds=_UNLIMITED_CPU), at_once=config.scorers
    )
    inside = files("whet_env_reasoning_gym.inside")
    helper = {f"{_FOLDER}/guards.py": inside.joinpath("guards.py").read_text()}
    return Served(sandbox, inside.joinpath("library.py").read_text(), setup, helper, processes=config.scorers)


def _greeted(served: Served) -> Mapping[str, str]:
    greeting: Any = served.greeting()
    if "systems" not in greeting:
        raise DataError(greeting.get("refused") or f"reasoning-gym cannot be used: {greeting.get('raised')}")
    systems: Mapping[str, str] = greeting["systems"]
    return systems
