"""Disturb small runs at random moments, and check that none ends in a wrong or a silent state.

    python tests/chaos --kills 50                          over all layouts, staleness 0 and 1
    python tests/chaos --seed 7 --run 3 --staleness 0,1    the third run of that seed again
    CHAOS_SLOWNESS=3 python tests/chaos                    on a busy machine: deadlines three times as long
    python tests/chaos --layouts two --backend '{use: megatron, parallel: {tensor: 2}}'
                                                           another backend, with the ranks of that layout

A run is disturbed again and again, by signals to its driver, its workers and what they were forked from, its graders
and its watchdog, and resumed by the same command until it ends. Exit code 1: something was wrong, and what repeats it
is printed.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import yaml
from judge import ended_faults, judge
from run_attempt import LAYOUTS, SLOWNESS, RunAttempt, Subject
from scenarios import SCENARIOS
from strikes import Struck, carry_out, draw
from victims import FORK_SERVER

from whet_start.small_models import make_model, make_tokenizer
from whet_testing.processes import adopting_orphans, end, survivors

MOST_OF_A_RUN, MOST_OF_AN_ATTEMPT = 8, 3
"""Strikes at one run, and at one run attempt that goes on all the same; then it is left alone."""
NAMES = {
    "shared": ["driver", "backend-0", "driver", "backend-0", "grader", "backend-0", "watchdog"],
    "apart": ["driver", "backend-0", "generator-0", "driver", "backend-0", "generator-0", "grader", "watchdog"],
    "two": ["driver", "backend-0", "backend-1", "generator-0", "generator-1", "grader", "watchdog"],
}
FORKED = {"apart": [FORK_SERVER], "two": [FORK_SERVER]}
"""Where several processes of a machine are alike; under Ray one is enough."""
STALE = {"order": ("fifo", "as_completed"), "on_weight_update": ("drain", "continue", "abort")}
"""Keys of `rollout` that are drawn for runs with staleness."""
RAY_NAMES = ["raylet", "gcs_server", "node agent"]


class Chaos:
    """Runs, strikes and what was found."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.model = make_model(folder / "model", make_tokenizer(["Say 1, 2 and 12."] * 20))
        self.undisturbed: dict[tuple[str, int], tuple[Path, dict[str, float]]] = {}
        self.strikes = 0
        self.faults: list[str] = []
        self.before = survivors(frozenset())

    def subject(self, name: str, layout: str, staleness: int) -> Subject:
        """Return a run that has not begun."""
        return Subject(self.folder / name, self.model, layout, staleness, self.args.launcher, self.args.backend)

    def kinds(self) -> list[tuple[str, int]]:
        """List layouts and stalenesses that are asked for."""
        chosen = [(layout, staleness) for staleness in self.args.staleness for layout in self.args.layouts]
        return [(layout, staleness) for layout, staleness in chosen if layout != "shared" or not staleness]

    def reference(self, layout: str, staleness: int) -> tuple[Path, dict[str, float]]:
        """Return the folder of an undisturbed run, and the usual seconds of its phases."""
        if (layout, staleness) not in self.undisturbed:
            subject = self.subject(f"undisturbed-{layout}-{staleness}", layout, staleness)
            attempt = RunAttempt(subject)
            if attempt.wait(300.0 * SLOWNESS) != 0:
                raise SystemExit(f"the undisturbed run of layout {layout} failed:\n{attempt.said()}")
            begun: dict[str, float] = {}
            seconds: dict[str, list[float]] = {}
            for at, what, phase in attempt.lines():
                if what == "begin":
                    begun[phase] = float(at)
                elif phase in begun:
                    seconds.setdefault(phase, []).append(float(at) - begun.pop(phase))
            self.report(subject.folder.name, self._orphans(subject) + ended_faults(subject, None))
            usual = {phase: statistics.median(values) for phase, values in seconds.items()}
            self.undisturbed[layout, staleness] = subject.run, usual
        return self.undisturbed[layout, staleness]

    def disturb(self, number: int) -> None:
        """Disturb one run until it has ended."""
        layout, staleness = self.kinds()[number % len(self.kinds())]
        whole, durations = self.reference(layout, staleness)
        random_ = random.Random(f"{self.args.seed} {number}")
        subject = self.subject(f"run-{number}", layout, staleness)
        if staleness:  # what is drawn here changes the bits, so it is left alone where they are compared
            drawn = {key: random_.choice(values) for key, values in STALE.items()}
            subject = attrs.evolve(subject, rollout=drawn, filters=random_.choice(([], ["unequal-rewards"])))
        names = NAMES[layout] + (RAY_NAMES if self.args.launcher == "ray" else FORKED.get(layout, []))
        faults: list[str] = []
        finished, attempt, guarded, blows = False, None, True, 0
        workers: list[tuple[str, str]] = []
        for strike_number in range(MOST_OF_A_RUN):
            attempt = attempt or RunAttempt(subject, strike_number)
            struck = carry_out(draw(random_, names, durations), attempt, again=blows < MOST_OF_AN_ATTEMPT)
            blows += 1
            if struck.hit[-1:].isdigit() or struck.hit in (*RAY_NAMES, FORK_SERVER):
                workers.append((struck.hit, struck.phase))
            struck.workers = workers
            self.strikes += bool(struck.hit)
            guarded = guarded and struck.hit != "watchdog"
            if not guarded and struck.hit == "driver":
                subject.tidy()
            if struck.outcome != "under way":
                judge(struck, subject)
                attempt, guarded, blows, workers = None, True, 0, []
                struck.faults += self._orphans(subject)
                faults += struck.faults
            self._print(number, layout, staleness, struck)
            finished = struck.code == 0
            if finished or faults:
                break
        if not finished:
            last = attempt or RunAttempt(subject, MOST_OF_A_RUN)
            code = last.wait(200.0 * SLOWNESS)
            if code != 0:
                faults.append(f"left alone, it ended with {code}:\n{last.said()[-2000:]}")
            faults += self._orphans(subject)
            finished = code == 0
        if finished:
            faults += ended_faults(subject, whole if staleness == 0 else None)
        self.report(f"run {number} ({layout}, staleness {staleness})", faults, f"--run {number}")
        if not faults:
            shutil.rmtree(subject.folder)

    def report(self, name: str, faults: list[str], repeat: str = "") -> None:
        """Print what was wrong, and what repeats it."""
        for fault in faults:
            self.faults.append(fault)
            print(f"  WRONG  {name}: {fault}", flush=True)
        if faults and repeat:
            stalenesses = ",".join(map(str, self.args.staleness))
            print(
                f"  again: python tests/chaos --seed {self.args.seed} --staleness {stalenesses} --layouts "
                f"{','.join(self.args.layouts)} --launcher {self.args.launcher} "
                f"--backend '{json.dumps(self.args.backend)}' {repeat}",
                flush=True,
            )

    def _print(self, number: int, layout: str, staleness: int, struck: Struck) -> None:
        strike = struck.strike
        whom = strike.victim if struck.hit in (strike.victim, "") else f"{struck.hit} (for {strike.victim})"
        print(
            f"{number:3d}  {layout:6s} {staleness}  {strike.act:13s} {whom:24s} "
            f"{strike.moment:>18s} #{strike.count} +{strike.delay:5.3f}  {struck.phase or '-':18s} "
            f"{struck.outcome:11s} {struck.seconds:5.1f}",
            flush=True,
        )

    def _orphans(self, subject: Subject) -> list[str]:
        """Check that no process outlived a run attempt, nor a temporary file; end what did."""
        left = survivors(self.before, patience_seconds=8.0)
        end(left)
        faults = [f"outlived the run: {', '.join(map(str, sorted(left)))}"] if left else []
        deadline = time.monotonic() + 2.0
        while (files := list(subject.temporary.glob("*"))) and time.monotonic() < deadline:
            time.sleep(0.02)
        return faults + ([f"temporary files are left: {[f.name for f in files]}"] if files else [])

    def all(self) -> Iterator[None]:
        """Disturb runs until there were enough strikes; then the other troubles."""
        if self.args.run is not None:
            self.disturb(self.args.run)
            return
        number = 0
        while self.strikes < self.args.kills:
            self.disturb(number)
            number += 1
            yield
        for name in self.args.scenarios:
            began = time.monotonic()
            subject = self.subject(f"scenario-{name}", "shared", 0)
            faults = SCENARIOS[name](subject, self.reference("shared", 0)[0]) + self._orphans(subject)
            print(f"     {name:40s} {'wrong' if faults else 'right':6s} {time.monotonic() - began:5.1f}", flush=True)
            self.report(name, faults, f"--kills 0 --scenarios {name}")
            yield


def main() -> int:
    """Parse, disturb, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=50, help="strikes in all")
    parser.add_argument("--launcher", choices=("local", "ray"), default="local")
    parser.add_argument("--backend", type=yaml.safe_load, default={"use": "fsdp2"}, help="the section `backend`, YAML")
    parser.add_argument("--staleness", type=lambda text: [int(n) for n in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--layouts", type=lambda text: text.split(","), default=list(LAYOUTS))
    parser.add_argument("--run", type=int, help="only this run of the seed")
    parser.add_argument("--scenarios", type=lambda text: text.split(",") if text else [], default=list(SCENARIOS))
    parser.add_argument("--folder", type=Path, help="keep everything here")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    with adopting_orphans():
        chaos = Chaos(args, folder)
        try:
            for _ in chaos.all():
                pass
        finally:
            end(survivors(chaos.before))
    print(f"{chaos.strikes} strikes, {len(chaos.faults)} faults" + (f"; see {folder}" if chaos.faults else ""))
    if not chaos.faults and args.folder is None:
        shutil.rmtree(folder)
    return bool(chaos.faults)


if __name__ == "__main__":
    sys.exit(main())
