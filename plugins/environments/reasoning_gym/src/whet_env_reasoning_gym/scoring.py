"""Scores answers with reasoning-gym's own scorers. Only grader processes import this module.

Each answer is scored in a process of its own, forked from the grader: whatever an answer does to the interpreter that
scores it ends with it, and the next answer meets a clean one.

    {"score": 0.5}              what the scorer returned
    {"refused": "..."}          the scorer did not get the answer: `answers.why_refused`
    {"raised": "..."}           the scorer raised: the answer is wrong
    {"undecided": "..."}        it needs more than its limits, or ended its process: the answer is wrong
    {"broken": "..."}           the machine is at fault: a file or a module is missing, or the process was killed
"""

import ctypes
import json
import math
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from whet_env_reasoning_gym.answers import why_refused
from whet_env_reasoning_gym.entries import unpacked
from whet_env_reasoning_gym.library import create

_PATIENCE = 5
"""The wall-clock limit of an answer as a multiple of its limit of processor time."""
_LONGEST = 1 << 16
_PR_SET_PDEATHSIG = 1


def scorer(
    dataset: str, config: Mapping[str, Any], seed: int, size: int, timeout_seconds: float
) -> Callable[[str, Any], dict[str, Any]]:
    """Return the function that scores (answer, packed entry). One answer is scored before, which loads what is lazy."""
    data = create(dataset, config, seed, size)
    entry = data[0]
    with suppress(Exception):  # some scorers cannot score their own answer
        data.score_answer(answer=entry["answer"], entry=entry)

    def score(answer: str, packed_entry: Any) -> dict[str, Any]:
        return apart(lambda: scored(data, dataset, answer, unpacked(packed_entry)), timeout_seconds)

    return score


def scored(data: Any, dataset: str, answer: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what comes of an answer, in this process."""
    source = entry.get("metadata", {}).get("source_dataset", dataset) if dataset == "composite" else dataset
    if reason := why_refused(str(source), answer, entry):
        return {"refused": reason}
    try:
        score = float(data.score_answer(answer=answer, entry=entry))
    except (MemoryError, RecursionError) as error:
        return {"undecided": f"{type(error).__name__}: {error!s:.200}"}
    except (OSError, ImportError) as error:  # nothing that a text can cause
        return {"broken": f"{type(error).__name__}: {error!s:.500}"}
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error!s:.200}"}
    return {"score": score} if math.isfinite(score) else {"raised": f"the score is {score}"}


def apart(function: Callable[[], dict[str, Any]], cpu_seconds: float) -> dict[str, Any]:
    """Call a function in a forked process, and return what it returned, or how its process ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _inside(function, writing, cpu_seconds)
    os.close(writing)
    try:
        text = _read(reading, time.monotonic() + cpu_seconds * _PATIENCE)
    except TimeoutError:
        return {"undecided": f"no score within {cpu_seconds * _PATIENCE:g} s"}
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if text:
        with suppress(ValueError):
            found = json.loads(text)
            if isinstance(found, dict):
                return found
    code = os.waitstatus_to_exitcode(status)
    if code in (-signal.SIGPROF, -signal.SIGXCPU):
        return {"undecided": f"it needs more than {cpu_seconds:g} s of processor time"}
    return {"undecided": f"its process ended with {code}"}


def _inside(function: Callable[[], dict[str, Any]], writing: int, cpu_seconds: float) -> None:
    """Write what a function returns, and end this process."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.closerange(3, writing)
        os.closerange(writing + 1, 256)  # the connection to the driver among them
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        os.write(writing, json.dumps(function()).encode())
    finally:
        os._exit(0)


def _read(reading: int, deadline: float) -> bytes:
    text = b""
    while len(text) < _LONGEST:
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        more = os.read(reading, _LONGEST)
        if not more:
            break
        text += more
    return text
