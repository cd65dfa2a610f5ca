"""A generator that does not compute with the trainer's weights ends the run; looking for it changes nothing else."""

import json
import re
from pathlib import Path

import pytest

from whet.errors import ConfigError, WeightSyncError
from whet.plan.prepare import prepare
from whet.plugins import features
from whet.run import compose

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_orphans")]

HERE = Path(__file__).parent
APART = {"ranks": {"generator": 2}, "threads": {"backend": 1, "generator": 1}, "colocate": []}


@pytest.fixture
def run_of(tmp_path, small_run):
    """Write the config of a small run in this process whose generator may be deaf."""

    def write(name="run", steps=3, **sections):
        (tmp_path / name).mkdir()
        run = {"folder": str(tmp_path / name / "run"), "export": False, "steps": steps}
        plugins = [str(HERE / "deaf.py"), str(HERE / "even_digits.py")]
        return small_run(
            tmp_path / name, **{"run": run, "plugins": plugins, "cluster": {"workers": "inline"}, **sections}
        )

    return write


def rows(config, kept=lambda name: True):
    """Read the metrics of a run, those alone that are asked for."""
    file = config.parent / "run/metrics.jsonl"
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []
    return [{name: value for name, value in row.items() if kept(name)} for row in found]


@pytest.mark.parametrize("keeps", ["*", "*.1.mlp.up_proj.weight", "*.0.self_attn.k_proj.*", "*embed_tokens.weight"])
def test_a_generator_that_keeps_weights_is_refused_after_the_first_step(run_of, keeps):
    config = run_of(generator={"use": "deaf-hf", "keeps": keeps})
    with pytest.raises(WeightSyncError) as caught:
        compose.run(config)
    said = str(caught.value)
    assert said.startswith("after the weight sync of version 1 replica 0 of the generator does not compute what the")
    assert "wanted an average of at most 0.001 for a generator in float32, a trainer in float32" in said
    assert rows(config) == [], "no step was finished on what it samples"


def test_of_several_replicas_the_one_that_is_wrong_is_named(run_of):
    config = run_of(generator={"use": "deaf-hf", "replica": 1}, cluster=APART)
    with pytest.raises(WeightSyncError, match=r"^after the weight sync of version 1 replica 1 of the generator"):
        compose.run(config)


@pytest.mark.parametrize(("probe", "probed"), [({"every": 0}, []), ({"bound": 100.0}, [1])], ids=["off", "wide"])
def test_switched_off_or_with_a_wide_bound_it_refuses_nothing(run_of, probe, probed):
    config = run_of(generator={"use": "deaf-hf"}, weight_sync={"probe": probe})
    compose.run(config)
    found = rows(config)
    assert len(found) == 3
    assert all(row["logprob_gap/max"] > 1e-3 for row in found[1:])
    assert [row["step"] for row in found if "probe/logprob_gap" in row] == probed


def computed(name):
    """Whether a metric is of the training itself."""
    return name != "time" and not name.startswith(("seconds/", "memory/", "probe/"))


def test_where_nothing_can_check_the_distribution_that_can_is_named(run_of, monkeypatch):
    monkeypatch.setattr(features, "entry_points", lambda group: ())
    wanted = "weight_sync.probe.every: is 10; pip install whet-weights, or set 0 to run without checks"
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        prepare(run_of())


def test_ten_steps_are_bitwise_what_they_are_without_it(run_of):
    without, with_ = (run_of(f"every-{every}", steps=10, weight_sync={"probe": {"every": every}}) for every in (0, 1))
    for config in (without, with_):
        compose.run(config)
    assert len(rows(without)) == 10
    assert rows(without, computed) == rows(with_, computed)
    for step in range(1, 11):
        file = f"run/rollouts/step-{step:06d}.jsonl"
        assert (without.parent / file).read_bytes() == (with_.parent / file).read_bytes()
    for row in rows(with_):
        assert 0 <= row["probe/logprob_gap"] < 1e-4
        assert row["seconds/generator.probe"] > 0


def test_it_is_made_while_rollouts_run_ahead(run_of):
    rollout = {"max_tokens": 8, "max_staleness": 1, "on_weight_update": "continue"}
    config = run_of(steps=6, rollout=rollout, weight_sync={"probe": {"every": 1}}, cluster=APART)
    compose.run(config)
    gaps = [row["probe/logprob_gap"] for row in rows(config)]
    assert len(gaps) == 6
    assert max(gaps) < 1e-4, gaps
