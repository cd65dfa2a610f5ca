"""What must hold after a disturbance and at the end of a disturbed run, counted from its public files alone."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from run_attempt import GROUPS, SAMPLES, STEPS, Subject
from strikes import Struck
from victims import FORK_SERVER

from whet.data.files import read_rows
from whet_testing.journal import check

NAMED = re.compile(r"Error: (?P<role>[a-z]+) rank (?P<rank>\d+) failed in (?P<phase>\w+): (?P<cause>.+)")
ENDS = {"kill": -9, "stop": -9, "terminate": 143, "terminate all": 143, "interrupt": 130, "pause": 0}
"""What is done to a driver, and the exit code that it ends with."""
BARE, BARE_PHASES = (-15, -2), ("starting", "after.closed")
"""Codes of a Python that does not handle signals yet or any more, and the phases where nothing is lost by that."""
STARTING = ("starting", "backend.start", "generator.start", "after.opened", "first.weight_sync")
"""Phases in which a lost worker is told at once: the parts have not all been there yet."""
RESTARTS = 3
BATCHED = ("logprob_gap/mean", "logprob_gap/max")
"""Metrics whose last bits depend on which requests are batched together."""
NOISE = re.compile(r"Traceback|Exception ignored|never retrieved|was never awaited|Fatal Python|resource_tracker")
"""What a user must never have to read."""


def judge(struck: Struck, subject: Subject) -> None:
    """Judge how a run attempt ended: set `outcome`, and add faults."""
    if noise := NOISE.search(struck.said):
        line = next(line for line in struck.said.splitlines() if noise[0] in line)
        struck.faults.append(f"noise on the terminal: {line[:200]}")
    struck.faults += folder_faults(subject.run)
    if struck.code is None:
        struck.outcome = "hangs"
        struck.faults.append(f"still running after {struck.seconds:.0f} s")
        return
    to_driver = struck.hit in ("driver", "all")
    act = struck.strike.act
    if struck.code == 0 and not (to_driver and act in ("kill", "stop")):
        struck.outcome = "goes on" if struck.hit else "missed"
    elif to_driver and (struck.code == ENDS.get(act, -9) or (struck.code in BARE and struck.phase in BARE_PHASES)):
        struck.outcome = "ended by it"
    elif struck.code == 1 and struck.workers:
        struck.outcome = "fails"
        struck.faults += _error_faults(struck, subject)
    else:
        struck.outcome = "fails"
        struck.faults.append(f"ended with {struck.code}, wanted it to go on or end cleanly: {_error(struck.said)}")
    if struck.outcome in ("fails", "ended by it") and struck.seconds > struck.strike.bound:
        struck.faults.append(f"took {struck.seconds:.0f} s to end, wanted {struck.strike.bound:.0f}")


def _error_faults(struck: Struck, subject: Subject) -> list[str]:
    """Check that a failure names one of those who were hit, and was not to be helped."""
    named = NAMED.search(struck.said)
    if named is None:
        return [f"the error names nobody: {_error(struck.said)}"]
    hit = [subject.roles_beside(name) for name, _ in struck.workers if name[-1].isdigit()]
    faults = []
    forked = any(name == FORK_SERVER for name, _ in struck.workers)  # which takes workers of every name along
    known = forked or any(named["role"] in (*roles, "run") and int(named["rank"]) == rank for roles, rank in hit)
    if hit and not known:
        who = ", ".join(name for name, _ in struck.workers)
        faults.append(f"the error names {named['role']} rank {named['rank']}, it was {who}: {named['cause']}")
    if {name for name, _ in struck.workers} == {"gcs_server"} and "gcs_server" not in named["cause"]:
        faults.append(f"the error does not name gcs_server: {named['cause']}")
    rows = list(read_rows(subject.run / "journal.jsonl"))
    if rows and rows[-1]["event"] not in ("failed", "closed"):
        faults.append(f"the journal ends with {rows[-1]['event']!r}, not with the failure")
    if not any(phase in STARTING for _, phase in struck.workers) and len(struck.workers) <= RESTARTS:
        faults.append(f"it did not go on by itself after {struck.workers}: {_error(struck.said)}")
    return faults


def _error(said: str) -> str:
    *_, error = said.partition("Error: ")
    return (error or said[-300:]).strip().splitlines()[0][:300] if said.strip() else "(nothing said)"


def folder_faults(run: Path) -> list[str]:
    """Check what must hold of a run folder at any time: rows in order, steps once, whole checkpoints."""
    faults = []
    if (run / "metrics.jsonl").exists():
        steps = [row["step"] for row in read_rows(run / "metrics.jsonl")]
        if steps != list(range(1, len(steps) + 1)):
            faults.append(f"metrics.jsonl holds the steps {steps}")
    if (run / "journal.jsonl").exists():
        faults += journal_faults(list(read_rows(run / "journal.jsonl")))
        faults += check(run) if (run / "config.yaml").exists() else []
    return faults


def journal_faults(rows: list[dict[str, Any]]) -> list[str]:
    """Follow the journal: each run attempt goes on after a checkpoint, and takes its steps one by one."""
    faults, saved, at = [], {0}, 0
    for row in rows:
        match row["event"]:
            case "opened":
                # A kill between a checkpoint's last rename and its line leaves a checkpoint without a line, of a step
                # that may be earlier than the last one: checkpoints are written while training goes on.
                if not max(saved) <= row["after_step"] <= max(at, *saved):
                    faults.append(f"resumed after step {row['after_step']}, saved were {sorted(saved)}, taken {at}")
                at = row["after_step"]
                saved.add(at)
            case "step":
                if row["step"] != at + 1:
                    faults.append(f"step {row['step']} follows step {at}")
                at = row["step"]
            case "saved":
                if not max(saved) <= row["step"] <= at:
                    faults.append(f"saved step {row['step']} after step {at}, saved were {sorted(saved)}")
                saved.add(row["step"])
            case "watcher failed":
                faults.append(f"a watcher failed: {row}")
    return faults


def ended_faults(subject: Subject, undisturbed: Path | None) -> list[str]:
    """Check a run that has ended: every group once, and where nothing may differ, the same bits."""
    run = subject.run
    faults = [*folder_faults(run), *group_faults(run, subject)]
    replayed = ("episodes/retried", "episodes/infrastructure")  # with fresh randomness
    rows = list(read_rows(run / "metrics.jsonl"))
    if undisturbed is not None and not any(row.get(name) for row in rows for name in replayed):
        faults += different_bits(run, undisturbed)
    if left := [str(path.relative_to(subject.folder)) for path in _left_over(subject)]:
        faults.append(f"left over: {', '.join(left)}")
    return faults


def _left_over(subject: Subject) -> list[Path]:
    run = subject.run
    partial = [*run.rglob("*.partial"), *(path for path in [run / "scratch"] if path.exists())]
    return [*partial, *subject.temporary.iterdir()]


def group_faults(run: Path, subject: Subject) -> list[str]:
    """Count the groups that were trained on: as many as the steps need, none twice, each with all its episodes."""
    faults, seen = [], Counter[int]()
    for step in range(1, STEPS + 1):
        file = run / "rollouts" / f"step-{step:06d}.jsonl"
        rows = list(read_rows(file)) if file.exists() else []
        groups = Counter(row["group"] for row in rows)
        if len(groups) != GROUPS or set(groups.values()) != {SAMPLES}:
            faults.append(f"step {step} was trained on {len(groups)} groups with {sorted(groups.values())} episodes")
        if any({r["sample"] for r in rows if r["group"] == g} != set(range(SAMPLES)) for g in groups):
            faults.append(f"step {step} has a sample twice")
        seen.update(groups.keys())
    metrics = list(read_rows(run / "metrics.jsonl"))
    if len(metrics) != STEPS:
        faults.append(f"metrics.jsonl has {len(metrics)} steps, wanted {STEPS}")
    if twice := sorted(group for group, count in seen.items() if count > 1):
        faults.append(f"groups {twice} were trained on twice")
    # Where groups may overtake each other, some before the last one may have been under way at the end.
    overtaken = GROUPS * subject.staleness if subject.rollout.get("order") == "as_completed" else 0
    gone = overtaken + sum(row.get("groups/dropped", 0) + row.get("groups/filtered", 0) for row in metrics)
    missing = sorted(set(range(max(seen, default=0))) - seen.keys())
    if len(missing) > gone:
        faults.append(f"groups {missing} were lost; {gone:g} may have been dropped, filtered or overtaken")
    if not gone and len(seen) != STEPS * GROUPS:
        faults.append(f"{len(seen)} groups were trained on, wanted {STEPS * GROUPS}")
    return faults


def different_bits(run: Path, other: Path) -> list[str]:
    """Compare a disturbed run with an undisturbed one: numbers, rollouts and weights."""
    faults = []
    # Requests were batched with others than before; those that met two losses were asked apart.
    replaced = any(row["event"] in ("replica restarted", "run restarted") for row in read_rows(run / "journal.jsonl"))
    for mine, theirs in zip(numbers(run), numbers(other), strict=False):
        for name in BATCHED if replaced else ():
            if abs(mine.pop(name) - theirs.pop(name)) > 1e-6:
                faults.append(f"step {mine['step']}: {name} differs")
        if mine != theirs:
            keys = [key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key)]
            faults.append(f"step {mine['step']} differs from the undisturbed run in {sorted(keys)}")
            break
    for name in ("model/model.safetensors", *(f"rollouts/step-{step:06d}.jsonl" for step in range(1, STEPS + 1))):
        if not (run / name).exists():
            faults.append(f"there is no {name}")
        elif name.startswith("rollouts") and replaced and _rollouts(run / name) == _rollouts(other / name):
            continue
        elif (run / name).read_bytes() != (other / name).read_bytes():
            faults.append(f"{name} differs from the undisturbed run's")
    return faults


def _rollouts(file: Path) -> list[dict[str, Any]]:
    """Read the rollouts of a step, but for the sampler's logprobs."""
    rows = list(read_rows(file))
    for sequence in (sequence for row in rows for sequence in row.get("sequences", ())):
        sequence.pop("sampler_logprobs", None)
    return rows


def numbers(run: Path) -> list[dict[str, Any]]:
    """Read the metrics of a run, but for times, and for probes, of which every run attempt begins with two."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k != "time" and not k.startswith(("seconds/", "memory/", "probe/"))}
        for row in rows
    ]
