"""The small run that is disturbed, and one run attempt of it: a `whet run` in a process of its own."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from attrs import field, frozen

from whet_testing.processes import descendants, end

HERE = Path(__file__).parent
RAY_AGENTS = re.compile(r"ray::(DashboardAgent|RuntimeEnvAgent)|/dashboard/agent\.py|/runtime_env/agent/main\.py")
"""Of Ray's own processes those that outlive it for a minute, where nobody ends them."""
STEPS, SAVE_EVERY, GROUPS, SAMPLES = 8, 2, 3, 3
"""Of a run: steps, steps between checkpoints, groups of a step, episodes of a group."""
SLOWNESS = float(os.environ.get("CHAOS_SLOWNESS", "1"))
"""How many times as long as on a machine with nothing else to do everything may take."""
DEADLINE = 8.0 * SLOWNESS
"""Seconds of every deadline but that of starting; graders have less."""
START_DEADLINE = 120.0 * SLOWNESS
"""Beside other tests, imports alone can take more than half a minute."""

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "shared": {},
    "apart": {"colocate": []},
    "two": {"colocate": [], "ranks": {"backend": 2, "generator": 2}},
}
"""Sections `cluster` of the runs: roles in one process, apart, and with two ranks each."""


@frozen
class Subject:
    """A run that is disturbed: its folder, and all that decides what it computes."""

    folder: Path
    model: Path
    layout: str
    staleness: int
    launcher: str = "local"
    backend: Mapping[str, Any] = field(factory=lambda: {"use": "fsdp2"})
    """The section `backend`, but for its optimizer."""
    rollout: Mapping[str, Any] = field(factory=dict)
    """Further keys of the section `rollout`."""
    filters: Sequence[str] = ()

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.folder / "run"

    @property
    def temporary(self) -> Path:
        """The folder for temporary files of its processes."""
        return self.folder / "tmp"

    def tidy(self) -> None:
        """Remove what nobody is left to remove, where both the watchdog and the driver were killed."""
        for folder in self.temporary.glob("whet-*"):
            shutil.rmtree(folder, ignore_errors=True)  # a grader that has noticed the end removes its own meanwhile
        end(frozenset(process for process in descendants() if RAY_AGENTS.search(process.command)))

    def write(self) -> Path:
        """Write the config and give its path."""
        self.temporary.mkdir(parents=True, exist_ok=True)
        phases = ("train", "generate", "weight_sync", "save", "episode")
        deadlines = {"start": START_DEADLINE, **dict.fromkeys(phases, DEADLINE)}
        threads = {"backend": 1, "generator": 1}
        config = {
            "run": {"folder": str(self.run), "steps": STEPS, "save_every": SAVE_EVERY, "seed": 3},
            "model": {"path": str(self.model)},
            "algorithm": {"use": "grpo", "prompts_per_step": GROUPS, "group_size": SAMPLES, "filters": [*self.filters]},
            "backend": {**self.backend, "optimizer": {"lr": 1e-3}},
            "generator": {"use": "hf"},
            "rollout": {"max_tokens": 8, "max_staleness": self.staleness, **self.rollout},
            "environments": [{"use": "graded"}],
            "cluster": {
                "launcher": self.launcher, "threads": threads, "deadlines": deadlines, **LAYOUTS[self.layout]
            },
            "loggers": [{"use": "console"}],
            "plugins": [str(HERE / "graded.py")],
        }  # fmt: skip
        path = self.folder / "run.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return path

    def roles_beside(self, process: str) -> tuple[tuple[str, ...], int]:
        """Return the roles that live in a worker process, which is named ROLE-RANK, and its rank."""
        role, _, rank = process.rpartition("-")
        together = self.layout == "shared" and self.staleness == 0
        return (("backend", "generator") if together else (role,)), int(rank)


class RunAttempt:
    """A `whet run` under way."""

    def __init__(
        self, subject: Subject, number: int = 0, *overrides: str, prefix: Sequence[str] = (), through: str = "",
        deaf_to: Collection[signal.Signals] = (),
    ) -> None:  # fmt: skip
        """Start it. `prefix` is a command that runs it, `through` one that its output goes through.

        It ignores the signals `deaf_to` and no others, whatever who started this ignores.
        """
        config = subject.write()
        self.moments = subject.folder / f"moments-{number}.txt"
        self.output = subject.folder / f"output-{number}.txt"
        self.moments.write_text("")
        told = {"CHAOS_MOMENTS": str(self.moments), "TMPDIR": str(subject.temporary), "COLUMNS": "200"}
        command = [*prefix, sys.executable, "-m", "whet", "run", str(config), *overrides]
        if through:
            command = ["bash", "-c", f'"$0" "$@" 2>&1 | {through}; exit ${{PIPESTATUS[0]}}', *command]
        with self.output.open("wb") as stream:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, cwd=subject.folder,
                env={**os.environ, **told}, start_new_session=True, preexec_fn=partial(_ignore, deaf_to),
            )  # fmt: skip
        self.began = time.monotonic()

    def wait(self, seconds: float) -> int | None:
        """Wait for its end and give the exit code; None where it is not over in time."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def said(self) -> str:
        """What it wrote to the terminal."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def lines(self) -> list[list[str]]:
        """What it did: lines of time, `begin` or `end`, and phase."""
        return [line.split() for line in self.moments.read_text().splitlines()]

    def phase(self) -> str:
        """Return the phase that began last and has not ended. The first weight sync is `first.weight_sync`."""
        doing, rolled_out = ["starting"], False
        for _, what, phase in self.lines():
            rolled_out = rolled_out or phase == "rollout.take"
            if what == "begin":
                doing = [p for p in doing if not p.startswith("after.")] if phase.startswith("after.") else doing
                doing.append(phase)
            elif phase in doing:
                doing.remove(phase)
        return "first.weight_sync" if doing[-1] == "backend.weight_sync" and not rolled_out else doing[-1]


def _ignore(numbers: Collection[signal.Signals]) -> None:
    """Ignore these of the signals that shells let their children ignore."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if number in numbers else signal.SIG_DFL)
