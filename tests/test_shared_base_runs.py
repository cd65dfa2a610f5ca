"""Runs whose generator computes with the trainer's weights: the numbers of a run with two copies, and its plan."""

import re

import pytest

from whet.errors import ConfigError, WeightSyncError
from whet.plan.placement import Machine
from whet.plan.prepare import prepare
from whet.run import compose
from whet_hf.shared import Adapter
from whet_memory.forecasts import known_peaks
from whet_testing.runs import numbers

STEPS = 4
ADAPTER = {"use": "fsdp2", "optimizer": {"lr": 5.0e-3}, "lora": {"rank": 4}}
SHARED = "generator.weights=shared"
INLINE = "cluster.workers=inline"


@pytest.fixture(scope="module")
def write(small_run):
    def write(folder, backend=ADAPTER, **sections):
        return small_run(
            folder,
            backend=backend,
            **{
                "run": {"folder": str(folder / "run"), "steps": STEPS, "save_every": 2},
                "algorithm": {"use": "grpo", "prompts_per_step": 4, "group_size": 4, "minibatches": 2,
                              "loss": {"use": "clipped-pg"}},
                "evaluation": {"every": 2, "environments": [{"use": "even", "split": "train", "limit": 8}]},
                "weight_sync": {"probe": {"every": 1}},
                "generator": {"use": "hf", "decoder": "plain"},
                **sections,
            },
        )  # fmt: skip

    return write


def close(run, other):
    rows, others = numbers(run, "probe/", "given_back_mib/"), numbers(other, "probe/", "given_back_mib/")
    assert len(rows) == len(others) == STEPS + 1  # before the first step it evaluates
    for row, expected in zip(rows, others, strict=True):
        assert row.keys() == expected.keys()
        for name, value in row.items():
            if isinstance(value, int | float) and not name.startswith("logprob_gap"):
                assert value == pytest.approx(expected[name], abs=2e-5, rel=1e-4), name
    assert all(row["grad_norm"] > 0 for row in rows[1:])


@pytest.fixture(scope="module")
def two_copies(tmp_path_factory, write):
    config = write(tmp_path_factory.mktemp("own"))
    compose.run(config, [INLINE])
    return config.parent / "run"


@pytest.mark.parametrize("where", [INLINE, "cluster.offload=always"], ids=["in the driver", "asleep by turns"])
def test_one_copy_gives_the_numbers_of_two(tmp_path, write, two_copies, where):
    config = write(tmp_path)
    compose.run(config, [SHARED, where])
    close(tmp_path / "run", two_copies)
    gaps = [row["logprob_gap/max"] for row in numbers(tmp_path / "run")[1:]]
    assert max(gaps) < 1e-4


def test_full_training_with_one_copy_gives_the_numbers_of_two(tmp_path, write):
    backend = {"use": "fsdp2", "optimizer": {"lr": 1.0e-3}}
    for name, more in ("own", []), ("shared", [SHARED]):
        (tmp_path / name).mkdir()
        compose.run(write(tmp_path / name, backend=backend), [INLINE, *more])
    close(tmp_path / "shared/run", tmp_path / "own/run")


def test_it_resumes(tmp_path, write, two_copies):
    config = write(tmp_path)
    compose.run(config, [SHARED, INLINE, "run.steps=2", "run.export=false"])
    compose.run(config, [SHARED, INLINE])
    close(tmp_path / "run", two_copies)


MISTAKES = {
    "not applied": lambda pairs, scaling: ({}, scaling),
    "to half of the layers": lambda pairs, scaling: ({n: p for n, p in pairs.items() if "layers.1." in n}, scaling),
    "scaled twice": lambda pairs, scaling: (pairs, scaling**2),
    "another A": lambda pairs, scaling: ({n: (a.flip(0), b) for n, (a, b) in pairs.items()}, scaling),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_probe_refuses_a_generator_that_applies_the_adapter_wrongly(tmp_path, write, monkeypatch, mistake):
    use = Adapter.use
    monkeypatch.setattr(Adapter, "use", lambda self, *given: use(self, *MISTAKES[mistake](*given)))
    with pytest.raises(WeightSyncError, match="replica 0 of the generator does"):
        compose.run(write(tmp_path), [SHARED, INLINE, "run.steps=1"])


ON_ONE_GPU = ["cluster.gpus.backend=1", "cluster.gpus.generator=1"]
GPU = Machine(8, gpus=1, memory_bytes=1 << 40, gpu_bytes=(1 << 40,), given=True)


def test_the_plan_counts_the_base_once_and_leaves_it_on_the_gpu(tmp_path, write):
    found, plans = {}, {}
    for weights in ("own", "shared"):
        prepared = prepare(write(tmp_path), [*ON_ONE_GPU, f"generator.weights={weights}"], target=GPU)
        plans[weights] = prepared.plan
        found[weights] = known_peaks(prepared.config, prepared.roles, prepared.plan)
    base, own, shared = 4 * prepared.model.parameters, found["own"], found["shared"]
    assert own["generator"]["generation"]["device"] - shared["generator"]["generation"]["device"] == base
    assert (own["backend"]["asleep"]["device"], shared["backend"]["asleep"]["device"]) == (0, base)
    assert own["backend"]["asleep"]["host"] - shared["backend"]["asleep"]["host"] == base
    assert own["backend"]["train"] == shared["backend"]["train"]
    assert plans["shared"].way.transport == "in-place"
    assert plans["shared"].way.adapter.rank == 4
    assert "the adapter alone, which hf applies" in plans["shared"].way.reason


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        (["cluster.ranks.backend=2"], "generator.weights", "the backend has 2 ranks, which split its weights"),
        (["cluster.ranks.generator=2"], "generator.weights", "the generator has 2 ranks"),
        (["cluster.colocate=[]"], "generator", "put both into one group of cluster.colocate"),
        (["rollout.max_staleness=1"], "generator.weights", "set rollout.max_staleness: 0"),
        (["generator.dtype=bfloat16"], "generator.dtype", "it is that of the trainer, float32"),
        (["weight_sync.content=merged"], "weight_sync.content", "set it to auto"),
    ],
    ids=str,
)
def test_what_one_copy_does_not_go_with_is_refused_by_the_plan(tmp_path, write, overrides, path, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        prepare(write(tmp_path), [SHARED, *overrides])
    assert path in str(error.value)
