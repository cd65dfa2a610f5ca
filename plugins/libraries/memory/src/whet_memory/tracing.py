"""The process that traces: `python -m whet_memory.tracing` reads jobs from stdin and answers each with a line.

job      {"trace": "package.module:function", "case": {...}}
answer   {"peaks": {phase: bytes}}   or   {"failed": "why"}
"""

import contextlib
import gc
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from whet.component import resolve
from whet.errors import in_words
from whet_memory.case import Case
from whet_memory.timelines import Timeline, depths, extrapolate, peak, shortened


def traced(trace: Callable[[Case], Mapping[str, Timeline]], case: Case) -> dict[str, int]:
    """Return the bytes of each phase, from traces of the model with few layers."""
    few, more, layers = depths(case.model.config)
    first = trace(_with_layers(case, few))
    if few == layers:
        return {phase: peak(line) for phase, line in first.items()}
    second = trace(_with_layers(case, more))
    return {phase: extrapolate(first[phase], second[phase], (layers - more) / (more - few)) for phase in first}


def _with_layers(case: Case, layers: int) -> Case:
    model = attrs.evolve(case.model, config=shortened(case.model.config, layers))
    return attrs.evolve(case, model=model)


def main() -> None:
    """Answer jobs until stdin ends."""
    gc.set_threshold(10_000)  # otherwise a quarter of the time of the imports goes to the collector
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a model's code prints must not end up among the answers
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        found: dict[str, Any]
        try:
            with contextlib.redirect_stdout(sys.stderr):
                found = {"peaks": traced(resolve(job["trace"]), Case.from_json(job["case"]))}
        except Exception as error:  # the edge: a model's code may raise anything
            found = {"failed": in_words(error)}
        gc.collect()
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
