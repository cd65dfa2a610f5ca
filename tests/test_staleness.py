"""Rollouts that run ahead of training: they overlap with it, and no kill makes a group be lost or trained on twice."""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from whet.data.files import read_rows
from whet.run import compose
from whet_testing.journal import check

INSTANT = Path(__file__).parent / "instant.py"
GROUPS, STEPS = 3, 16


def write_config(folder: Path, model: Path, *, steps: int = STEPS, **sections: dict) -> Path:
    config = {
        "run": {"folder": str(folder / "run"), "steps": steps, "save_every": 1, "seed": 5, "export": False},
        "model": {"path": str(model)},
        "algorithm": {"use": "grpo", "prompts_per_step": GROUPS, "group_size": 2, "filters": ["unequal-rewards"]},
        "backend": {"use": "instant"},
        "generator": {"use": "instant"},
        "rollout": {"max_tokens": 8, "retries": 0, "max_failed_groups": 1000, "max_filtered_groups": 1000},
        "environments": [{"use": "letters", "failing": 6}, {"use": "letters", "name": "more", "weight": 0.5}],
        "cluster": {"workers": "inline"},
        "weight_sync": {"probe": {"every": 0}},  # nothing is computed that could be compared
        "plugins": [str(INSTANT)],
        "loggers": [],
    }
    for name, section in sections.items():
        config[name] = {**config[name], **section}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


class Runs:
    """Starts runs in a process each, forked from one that has imported everything."""

    def __init__(self, log: Path) -> None:
        self.log = log
        with log.open("w") as errors:
            self._server = subprocess.Popen(
                [sys.executable, str(INSTANT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def start(self, config: Path, *overrides: str) -> int:
        assert self._server.stdin
        self._server.stdin.write(json.dumps([str(config), *overrides]) + "\n")
        self._server.stdin.flush()
        return self._answer()

    def ended(self) -> int:
        return self._answer()

    def _answer(self) -> int:
        assert self._server.stdout
        line = self._server.stdout.readline()
        assert line, self.log.read_text()
        return int(line)

    def close(self) -> None:
        assert self._server.stdin
        self._server.stdin.close()
        self._server.wait(20)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    made = Runs(tmp_path_factory.mktemp("runs") / "errors.log")
    yield made
    made.close()


Trained = dict[int, tuple[int, str, int]]
"""Group -> step, environment and task."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path, runs: Runs) -> Trained:
    folder = tmp_path_factory.mktemp("whole")
    runs.start(write_config(folder, tiny_model_folder))
    assert runs.ended() == 0, runs.log.read_text()
    assert check(folder / "run") == []
    return trained(folder / "run")


def trained(run: Path) -> Trained:
    """Count by hand over `rollouts/`; each group is there once."""
    found: Trained = {}
    for step in range(1, STEPS + 1):
        rows = list(read_rows(run / f"rollouts/step-{step:06d}.jsonl"))
        groups = {row["group"]: (step, row["environment"], row["task"]) for row in rows}
        assert len(groups) == GROUPS
        assert len(rows) == 2 * GROUPS
        assert not groups.keys() & found.keys()
        found |= groups
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("staleness", "order"),
    [(0, "fifo"), (0, "as_completed"), (1, "fifo"), (1, "as_completed"), (3, "fifo"), (3, "as_completed")],
)
def test_kills_at_any_moment_lose_no_group_and_train_none_twice(
    tmp_path: Path, tiny_model_folder: Path, runs: Runs, uninterrupted: Trained, staleness: int, order: str
) -> None:
    draw, run = random.Random(f"{staleness} {order}"), tmp_path / "run"
    config = write_config(
        tmp_path,
        tiny_model_folder,
        rollout={"max_staleness": staleness, "order": order},
        generator={"jitter": 0.02},
        backend={"jitter": 0.02},
        run={"save_every": draw.choice([1, 2]), "keep": 0},
    )
    kills = 0
    while kills < 8:
        code = ended_by(runs, config, draw)
        if code == 0:
            break
        assert code in (-signal.SIGKILL, -signal.SIGTERM, 2), runs.log.read_text()
        kills += 1
        if (run / "journal.jsonl").exists():
            assert check(run) == []
    runs.start(config)
    assert runs.ended() == 0, runs.log.read_text()
    assert attempts(run / "journal.jsonl") > 3
    assert check(run) == []
    found = trained(run)
    states = [json.loads(f.read_text())["rollouts"] for f in run.glob("checkpoints/*/state.json")]
    assert any(state["beyond"] for state in states) == (staleness > 0), "some groups end before others ahead of them"
    shared = found.keys() & uninterrupted.keys()
    assert len(shared) > GROUPS * STEPS / 2
    assert all(found[g][1:] == uninterrupted[g][1:] for g in shared), "a group's task depends on its number alone"


def ended_by(runs: Runs, config: Path, draw: random.Random) -> int:
    """Start a run, kill or end it at a random moment, and give how it ended."""
    journal = config.parent / "run/journal.jsonl"
    before = attempts(journal)
    process, over = runs.start(config), threading.Event()
    number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
    starting, seconds = draw.random() < 0.2, draw.uniform(0.0, 0.4)

    def send() -> None:
        while not starting and attempts(journal) == before and not over.wait(0.002):
            pass
        if not over.wait(seconds):
            with suppress(ProcessLookupError):
                os.kill(process, number)

    killer = threading.Thread(target=send)
    killer.start()
    code = runs.ended()
    over.set()
    killer.join()
    return code


def attempts(journal: Path) -> int:
    return journal.read_text().count('"opened"') if journal.exists() else 0


def overlap(run: Path, one: str, other: str) -> tuple[float, float]:
    """Seconds that two phases went on at one time, and seconds of the second."""
    spans = [
        (f"{r['role']}.{r['phase']}", r["begin"], r["begin"] + r["seconds"]) for r in read_rows(run / "spans.jsonl")
    ]
    ones, others = ([(b, e) for name, b, e in spans if name == wanted] for wanted in (one, other))
    both = sum(max(0.0, min(e, f) - max(b, c)) for b, e in ones for c, f in others)
    return both, sum(f - c for c, f in others)


@pytest.mark.parametrize("order", ["fifo", "as_completed"])
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_answers_are_made_while_the_trainer_trains(
    tmp_path: Path, tiny_model_folder: Path, staleness: int, order: str
) -> None:
    config = write_config(
        tmp_path,
        tiny_model_folder,
        steps=6,
        algorithm={"filters": []},
        generator={"seconds": 0.2},
        backend={"seconds": 0.2},
        rollout={"max_staleness": staleness, "order": order},
    )
    compose.run(config, ["environments=[{use: letters}]"])
    both, training = overlap(tmp_path / "run", "generator.generate", "backend.train")
    if staleness == 0:
        assert both == 0
    else:
        assert both > 0.6 * training, "a step takes the longer of the two, not their sum"
    rows = list(read_rows(tmp_path / "run/metrics.jsonl"))[1:]
    waits = [row["seconds/rollout.take"] + row["seconds/backend.train"] for row in rows]
    assert all(row["seconds/generator.generate"] > 0 for row in rows)
    gaps = [row["seconds/step"] - wait for wait, row in zip(waits, rows, strict=True)]
    assert min(gaps) >= 0
    assert statistics.median(gaps) < 0.15, "a step waits for answers and for training, and for little else"


def test_evaluation_has_the_generator_for_itself_and_gives_what_it_gives_without_staleness(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    found = []
    for staleness in (0, 2):
        folder = tmp_path / str(staleness)
        folder.mkdir()
        config = write_config(
            folder,
            tiny_model_folder,
            steps=4,
            rollout={"max_staleness": staleness},
            generator={"jitter": 0.01},
        )
        compose.run(config, ["evaluation={every: 2, environments: [{use: letters, limit: 20}]}"])
        files = sorted((folder / "run/evaluations").glob("*.jsonl"))
        assert len(files) == 3
        found.append([[row["messages"] for row in read_rows(file)] for file in files])
        begins = [r["begin"] for r in read_rows(folder / "run/spans.jsonl") if r["phase"] == "evaluate"]
        assert len(begins) == 3
    assert found[0] == found[1]
