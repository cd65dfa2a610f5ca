"""Inside a sandbox: make tasks of one or two data sets of reasoning-gym, and score answers.

Some scorers evaluate the answer as Python. Therefore each answer is scored in a process that is forked for it: effects
of an answer end with its process, and cannot reach later answers. `guards` finds answers that are programs.
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import MISSING, fields
from typing import Any, NoReturn

from whet_env_reasoning_gym.inside import guards

sys.path[:] = [path for path in sys.path if path and not path.startswith("/box")]  # an answer may write files there

import reasoning_gym  # noqa: E402 - not from the folder that answers can write
from reasoning_gym.composite import DatasetSpec  # noqa: E402
from reasoning_gym.factory import DATASETS  # noqa: E402
from reasoning_gym.utils import SYSTEM_PROMPTS  # noqa: E402

KEPT = 512
MOST_BYTES = 1 << 16
PR_SET_DUMPABLE = 4


class Refused(Exception):  # noqa: N818 - it says what happened
    """A data set cannot be made as the config wants it."""


def main() -> None:
    """Answer questions, one per line, until there are no more."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # an answer cannot open this process's memory or descriptors
    with open(3) as questions, open(4, "w") as answers:
        library = None
        for line in questions:
            question = json.loads(line)
            try:
                if library is None:
                    library = Library(question)
                    answer: Any = {"systems": SYSTEM_PROMPTS}
                elif "score" in question:
                    answer = library.score(question, (questions.fileno(), answers.fileno()))
                else:
                    answer = library.task(question["split"], question["index"])
            except Refused as error:
                answer = {"refused": str(error)}
            except Exception as error:
                answer = {"raised": f"{type(error).__name__}: {error!s:.500}"}
            print(json.dumps(answer), file=answers, flush=True)


class Library:
    """The data sets of all splits."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._sets = {split: made(setup["dataset"], setup["config"], **one) for split, one in setup["splits"].items()}
        self._name, self._limits = setup["dataset"], setup["limits"]
        self._entries = OrderedDict[tuple[str, int], dict[str, Any]]()

    def task(self, split: str, index: int) -> dict[str, Any]:
        """Return the data of a task that the driver keeps."""
        entry = self._entry(split, index)
        answer = entry.get("answer")
        answer = None if answer is None else str(answer)
        return {"question": entry["question"], "answer": answer, "source": self._source(entry)}

    def score(self, question: dict[str, Any], shut: tuple[int, ...]) -> dict[str, Any]:
        """Score an answer in a process of its own, and return the score or the failure."""
        data, entry = self._sets[question["split"]], self._entry(question["split"], question["index"])
        if entry["question"] != question["question"]:
            return {"differs": True}
        answer = question["score"]
        refused = answer is not None and guards.is_program(self._source(entry), answer)
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reads)
            for descriptor in (0, *shut):
                os.close(descriptor)
            become_scorer(data, None if refused else answer, entry, writes, self._limits)
        os.close(writes)
        try:
            told = wait(reads, time.monotonic() + self._limits["wall_seconds"])
        finally:
            os.close(reads)
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            _, status, used = os.wait4(child, 0)
        if told is None:
            return {
                "stopped": f"no score within {self._limits['wall_seconds']:g} s, {used.ru_utime:.1f} of them at work"
            }
        try:
            outcome = json.loads(told)
            found: dict[str, Any] = (
                {"score": float(outcome["score"])} if "score" in outcome else {"raised": str(outcome["raised"])}
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            return {"stopped": f"the scorer ended without a score: {os.waitstatus_to_exitcode(status)}"}
        return {**found, "refused": refused}

    def _source(self, entry: dict[str, Any]) -> str:
        return str(entry.get("metadata", {}).get("source_dataset") or self._name)

    def _entry(self, split: str, index: int) -> dict[str, Any]:
        key = (split, index)
        if key not in self._entries:
            self._entries[key] = self._sets[split][index]
            if len(self._entries) > KEPT:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        return self._entries[key]


def become_scorer(
    data: Any, answer: str | None, entry: dict[str, Any], writes: int, limits: dict[str, float]
) -> NoReturn:
    """Score in this process, write the outcome, and end."""
    nowhere = os.open("/dev/null", os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    seconds = limits["cpu_seconds"]
    memory = int(limits["memory_bytes"] * 3 / 4)  # the rest is for the process that forks
    for name, limit in (("CPU", int(seconds) + 2), ("AS", memory), ("NPROC", 0), ("FSIZE", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        outcome: dict[str, Any] = {"score": float(data.score_answer(answer=answer, entry=entry))}
    except BaseException as error:
        outcome = {"raised": f"{type(error).__name__}: {error!s:.300}"}
    os.write(writes, json.dumps(outcome).encode()[:MOST_BYTES])
    os._exit(0)


def wait(reads: int, deadline: float) -> bytes | None:
    """Return what a process wrote before it closed its end. None: it did not close its end in time."""
    told = bytearray()
    while len(told) < MOST_BYTES:
        if not select.select([reads], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        part = os.read(reads, MOST_BYTES)
        if not part:
            break
        told += part
    return bytes(told)


def made(name: str, config: dict[str, Any], seed: int, size: int) -> Any:
    """Return a data set. Raises `Refused`."""
    if name not in DATASETS:
        raise Refused(f"reasoning-gym has no data set {name!r}; it has {', '.join(sorted(DATASETS))}")
    given = {**config, "seed": seed, "size": size}
    if name == "composite":
        given["datasets"] = [spec(one) for one in config.get("datasets", ())]
    try:
        return reasoning_gym.create_dataset(name, **fitted(name, given))
    except (AssertionError, TypeError, ValueError) as error:
        raise Refused(f"the data set {name!r} refuses its config: {error}") from error


def spec(given: Any) -> DatasetSpec:
    """Return an entry of `composite`. Raises `Refused`."""
    try:
        name, config = given["name"], given.get("config", {})
        if name not in DATASETS:
            raise Refused(f"reasoning-gym has no data set {name!r}, which composite names")
        return DatasetSpec(name, given.get("weight", 1.0), fitted(name, config))
    except (KeyError, TypeError, AttributeError) as error:
        raise Refused(f"an entry of composite is {{name, weight, config}}, and not {given!r:.200}") from error


def fitted(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return options with tuples in place of lists where the data set has tuples. YAML has only lists."""
    tuples = set()
    for field in fields(DATASETS[name][1]):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if isinstance(default, tuple):
            tuples.add(field.name)
    return {key: tuple(value) if key in tuples and isinstance(value, list) else value for key, value in config.items()}


main()
