"""Checks that each group of a run ended exactly once, from the files of its run folder.

Each row `step` of `journal.jsonl` lists the groups that ended with this step; see `whet.rollout.journal`. The journal
of a killed run has rows of steps that were repeated later. Only the *lineage* counts: a row `rewound` cancels the rows
of all steps after the checkpoint from which the run resumed.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from attrs import field, frozen

from whet.data.files import read_rows
from whet.rollout.journal import ranges

OUTCOMES = ("trained", "filtered", "dropped")


def indices(text: str) -> list[int]:
    """Return the numbers that `whet.rollout.journal.ranges` wrote."""
    runs = [part.partition("-") for part in text.split(",") if part]
    return [index for first, _, last in runs for index in range(int(first), int(last or first) + 1)]


@frozen(eq=False)
class Lineage:
    """The steps of a run that count, according to its journal."""

    steps: dict[int, dict[str, list[int]]] = field(factory=dict)
    """By step: outcome -> groups."""
    resumed_after: int = 0
    """The step after which the last attempt resumed."""

    @property
    def last(self) -> int:
        """Return the last step."""
        return max(self.steps, default=0)

    def consumed(self, step: int) -> list[int]:
        """Return all groups that ended with steps up to this one."""
        return [i for n, entry in self.steps.items() if n <= step for found in entry.values() for i in found]


def read_lineage(folder: Path) -> Lineage:
    """Return the lineage of a run folder, from its journal."""
    steps: dict[int, dict[str, list[int]]] = {}
    resumed_after = 0
    for row in read_rows(folder / "journal.jsonl"):
        if row.get("event") == "rewound":
            resumed_after = int(row["after_step"])
            steps = {number: entry for number, entry in steps.items() if number <= resumed_after}
        elif row.get("event") == "step":
            steps[int(row["step"])] = {outcome: indices(row.get(outcome, "")) for outcome in OUTCOMES}
    return Lineage(steps, resumed_after)


def check(folder: str | Path) -> list[str]:
    """Return what is wrong with the groups of a run that trains on rollouts. Empty: each group ended exactly once.

    Compares the journal with a count over `rollouts/`, with the states of the kept checkpoints, and with the bound of
    staleness. A run that is running, or was killed, may lack the unwritten part of its last step.
    """
    folder = Path(folder)
    lineage = read_lineage(folder)
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    staleness = int(config["rollout"]["max_staleness"])
    states = {file.parent.name[5:]: file for file in folder.glob("checkpoints/step-*/state.json")}
    saved = {int(step): file for step, file in states.items() if step.isdigit()}
    return [
        *_steps(lineage),
        *_ends(lineage),
        *_rollouts(folder, lineage, staleness, max(saved, default=0)),
        *(problem for step, file in sorted(saved.items()) for problem in _state(lineage, step, file)),
        *_lost(lineage, staleness),
    ]


def _steps(lineage: Lineage) -> Iterator[str]:
    missing = set(range(1, lineage.last + 1)) - set(lineage.steps)
    if missing:
        yield f"the journal lacks the steps {ranges(missing)}"


def _ends(lineage: Lineage) -> Iterator[str]:
    ends: dict[int, list[str]] = {}
    for step, entry in sorted(lineage.steps.items()):
        if not entry["trained"]:
            yield f"step {step} trained no group"
        for outcome, found in entry.items():
            for index in found:
                ends.setdefault(index, []).append(f"{outcome} at step {step}")
    for index, how in sorted(ends.items()):
        if len(how) > 1:
            yield f"group {index} ended more than once: {', '.join(how)}"


def _rollouts(folder: Path, lineage: Lineage, staleness: int, saved: int) -> Iterator[str]:
    sizes: dict[str, set[int]] = {}  # by environment
    for step, entry in sorted(lineage.steps.items()):
        file = folder / f"rollouts/step-{step:06d}.jsonl"
        rows = list(read_rows(file)) if file.exists() else []
        found = Counter(int(row["group"]) for row in rows)
        unwritten = step == lineage.last and step > saved and set(found) <= set(entry["trained"])
        if set(found) != set(entry["trained"]) and not unwritten:
            yield (
                f"{file.name} has the groups {ranges(found) or 'none'}, the journal says that step {step} trained "
                f"{ranges(entry['trained']) or 'none'}"
            )
        yield from _episodes(file.name, rows, step, staleness)
        for row in rows if not unwritten else ():
            sizes.setdefault(row.get("environment", ""), set()).add(found[row["group"]])
    for environment, different in sizes.items():
        if len(different) > 1:
            numbers = ", ".join(map(str, sorted(different)))
            yield f"groups have different numbers of episodes: {numbers}; their environment is {environment!r}"


def _episodes(name: str, rows: list[dict[str, Any]], step: int, staleness: int) -> Iterator[str]:
    for (group, sample), count in Counter((row["group"], row["sample"]) for row in rows).items():
        if count > 1:
            yield f"{name} has sample {sample} of group {group} {count} times"
    for row in rows:
        oldest, newest = row["versions"]
        if step - 1 - oldest > staleness or newest > step - 1:
            yield (
                f"{name}, group {row['group']}, sample {row['sample']}: made by versions {oldest} to {newest}, trained "
                f"on by version {step - 1}; rollout.max_staleness is {staleness}"
            )


def _state(lineage: Lineage, step: int, file: Path) -> Iterator[str]:
    state: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))["rollouts"]
    kept = {*range(sum(state["groups"].values())), *state["beyond"]}
    consumed = set(lineage.consumed(step))
    if kept != consumed:
        yield (
            f"the checkpoint of step {step} and the journal differ: only the first counts as ended "
            f"{ranges(kept - consumed) or 'none'}, only the second {ranges(consumed - kept) or 'none'}"
        )


def _lost(lineage: Lineage, staleness: int) -> Iterator[str]:
    """Yield groups that should have ended: they were admitted by a known step, and had to end within the bound."""
    ended = {index: step for step, entry in lineage.steps.items() for found in entry.values() for index in found}
    admitted_by = lineage.last + 1
    for index in range(max(ended, default=-1), -1, -1):
        if index in ended:
            admitted_by = min(admitted_by, ended[index])
        # A later attempt first admits again the groups that were running when the one before ended.
        elif max(admitted_by, lineage.resumed_after + 1) + staleness <= lineage.last:
            yield f"group {index} was lost: one after it ended with step {admitted_by}, and it never did"
