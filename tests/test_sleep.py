"""Backend and generator that give their memory back in turns change no number of a run, whatever happens meanwhile."""

import json
from pathlib import Path

import pytest

from whet import compose
from whet.errors import ConfigError
from whet.prepare import prepare

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_orphans")]

HERE = Path(__file__).parent
STEPS = 10
SLEEPING = "cluster.sleep=always"


@pytest.fixture(scope="module")
def sleeping_run(small_run):
    """Write the config of a run that evaluates, saves and probes again and again."""

    def write(folder: Path, **sections: object) -> Path:
        return small_run(
            folder,
            **{
                "run": {"folder": str(folder / "run"), "steps": STEPS, "save_every": 4},
                "algorithm": {
                    "use": "grpo",
                    "prompts_per_step": 4,
                    "group_size": 4,
                    "minibatches": 2,
                    "loss": {"use": "clipped-pg", "kl": {"weight": 0.01}},
                },
                "backend": {"use": "fsdp2", "optimizer": {"lr": 1.0e-3}, "reference": True},
                "evaluation": {"every": 3, "environments": [{"use": "even", "split": "train", "limit": 8}]},
                "refit": {"probe": {"every": 1}},
                **sections,
            },
        )

    return write


@pytest.fixture(scope="module")
def awake(tmp_path_factory, sleeping_run) -> Path:
    """Run it in this process, with nobody asleep."""
    config = sleeping_run(tmp_path_factory.mktemp("awake"))
    compose.run(config, ["cluster.workers=inline"])
    return config.parent / "run"


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def numbers(run: Path) -> list[dict]:
    """Metrics of each step, but for times, for what was given back, and for probes, with which a sitting begins."""
    apart = ("seconds/", "probe/", "given_back_mib/")
    return [
        {k: v for k, v in row.items() if k != "time" and not k.startswith(apart)} for row in rows(run / "metrics.jsonl")
    ]


def same(run: Path, whole: Path) -> None:
    assert numbers(run) == numbers(whole)
    assert (run / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()
    for step in range(1, STEPS + 1):
        name = f"rollouts/step-{step:06d}.jsonl"
        assert (run / name).read_text() == (whole / name).read_text()


APART = ["cluster.share=[]"]
RAY = ["cluster.launcher=ray"]


@pytest.mark.parametrize(
    "where", [["cluster.workers=inline"], [], APART, RAY], ids=["inline", "shared", "apart", "ray"]
)
def test_ten_steps_with_turns_are_those_without_bit_for_bit(tmp_path, sleeping_run, awake, where):
    config = sleeping_run(tmp_path)
    compose.run(config, [SLEEPING, *where])
    same(tmp_path / "run", awake)
    found = [row for row in rows(tmp_path / "run/metrics.jsonl") if row["step"]]
    assert all(row["given_back_mib/generator"] > 0.2 for row in found)
    held = found[-1]["given_back_mib/generator"]
    assert found[-1]["given_back_mib/backend"] > 2 * held, "policy, reference and two moments"
    for role in ("backend", "generator"):
        assert all({f"seconds/{role}.sleep", f"seconds/{role}.wake"} <= row.keys() for row in found)
    assert json.loads((tmp_path / "run/plan.json").read_text())["turns"] == [["backend"], ["generator"]]
    assert not list((tmp_path / "run").rglob("asleep/*")), "what was given back is left behind"


def test_a_run_that_is_gone_on_with_sleeps_as_before(tmp_path, sleeping_run, awake):
    config = sleeping_run(tmp_path)
    compose.run(config, [SLEEPING, "cluster.workers=inline", "run.steps=6", "run.export=false"])
    compose.run(config, [SLEEPING, "cluster.workers=inline"])
    same(tmp_path / "run", awake)


@pytest.mark.parametrize(("victim", "step"), [("generator-0", 2), ("backend-0", 3)])
def test_a_worker_that_dies_in_its_sleep_is_replaced_and_no_number_changes(
    tmp_path, sleeping_run, whet, awake, victim, step
):
    """After step 2 the generator has taken weights and not woken; after step 3 it has evaluated."""
    struck = {"use": "striking-in-sleep", "victim": victim, "step": step}
    config = sleeping_run(tmp_path, plugins=[str(HERE / name) for name in ("even_digits.py", "striking_in_sleep.py")])
    config.write_text(config.read_text() + f"loggers: [{json.dumps(struck)}]\n")
    done = whet("run", config, SLEEPING, *APART, seconds=400)
    assert done.code == 0, done.errors
    events = [row["event"] for row in rows(tmp_path / "run/journal.jsonl")]
    assert ("replica restarted" if victim == "generator-0" else "run restarted") in events
    same(tmp_path / "run", awake)


def test_what_cannot_sleep_is_refused_before_anything_starts(tmp_path, sleeping_run):
    config = sleeping_run(tmp_path, generator={"use": "vllm"})
    with pytest.raises(ConfigError, match="vllm of the generator can give memory back on cuda alone, and runs on cpu"):
        prepare(config, [SLEEPING])
    assert "take turns, asleep meanwhile: backend | generator" in prepare(
        config, ["generator.use=hf", SLEEPING]
    ).plan.describe()  # fmt: skip
