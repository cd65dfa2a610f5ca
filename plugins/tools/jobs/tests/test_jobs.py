"""What a job reads of a run that goes on meanwhile."""

import shutil
from types import SimpleNamespace
from typing import Any, cast

import pytest
from attrs import evolve

from whet.config.sections import Config, KeepBestSection, ModelSection, RolloutSection, RunSection
from whet.errors import CheckpointError, WhetError
from whet.plan.prepare import prepare
from whet.run import checkpoint
from whet.run.run_folder import RunFolder
from whet_jobs.jobs import _alone, _best, _load, exported


def write(run, step, state, backend):
    checkpoint.begin(run, step, state, {"backend": backend})()


def save(run, step):
    write(run, step, {}, lambda folder: (folder / "weights").write_text(str(step)))


def test_a_checkpoint_that_is_pruned_while_it_is_read_makes_way_for_the_newest(tmp_path):
    run, read = RunFolder(tmp_path), []
    save(run, 1)

    def load(folder):
        if not read:
            shutil.rmtree(folder.parent)
            save(run, 2)
        read.append(folder.parent.name)
        if not (folder / "weights").exists():
            raise WhetError("it lacks its weights")

    _load(SimpleNamespace(load=load), run, None, exported(run, None))
    assert read == ["step-000001", "step-000002"]


def test_a_damaged_checkpoint_is_an_error_at_once(tmp_path):
    run, read = RunFolder(tmp_path), []
    save(run, 1)

    def load(folder):
        read.append(folder)
        raise WhetError("damaged")

    with pytest.raises(WhetError, match="damaged"):
        _load(SimpleNamespace(load=load), run, None, exported(run, None))
    assert len(read) == 1
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; it has 1"):
        exported(run, 7)


@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_a_model_that_ranks_have_split_is_exported_by_one_worker(tmp_path, tiny_model_folder, backend):
    config = tmp_path / "config.yaml"
    config.write_text(f"""
model: {{path: {tiny_model_folder}}}
algorithm: {{use: sft}}
backend: {{use: {backend}, parallel: {{tensor: 2}}}}
data: {{train: [{{path: none.jsonl}}]}}
run: {{folder: {tmp_path}/run, steps: 1}}
""")
    alone = prepare(config, _alone(config), config_only=False, trains=False)
    assert alone.plan.role("backend").ranks == 1
    with pytest.raises(WhetError, match=r"cluster\.ranks"):
        prepare(config, ["cluster.workers=inline"], config_only=False, trains=False)


DAMAGE = {
    "a file changed": lambda folder: (folder / "backend" / "weights").write_text("3"),
    "a file emptied": lambda folder: (folder / "backend" / "weights").write_text(""),
    "a file removed": lambda folder: (folder / "backend" / "weights").unlink(),
    "its manifest removed": lambda folder: (folder / checkpoint.MANIFEST).unlink(),
    "its manifest emptied": lambda folder: (folder / checkpoint.MANIFEST).write_text("{}"),
    "half removed": lambda folder: shutil.rmtree(folder / "backend"),
    "emptied": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
    "removed": shutil.rmtree,
    "another in its place": lambda folder: (
        shutil.rmtree(folder),
        shutil.copytree(folder.with_name("step-000001"), folder),
    ),
    "a file in its place": lambda folder: (shutil.rmtree(folder), folder.write_text("")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_older_checkpoint_is_exported_only_by_its_step(tmp_path, damage):
    run = RunFolder(tmp_path)
    for step in (1, 2):
        save(run, step)
        run.journal("saved", step=step)
    DAMAGE[damage](run.checkpoints / "step-000002")
    with pytest.raises(CheckpointError) as raised:
        exported(run, None)
    message = str(raised.value)
    assert message.endswith("nothing was exported; to export an older checkpoint, give --step 1")
    assert "step-000002" in message or "step 2" in message
    assert exported(run, 1).step == 1
    with pytest.raises(CheckpointError):
        exported(run, 2)


def test_a_checkpoint_that_a_rewound_run_took_back_is_not_missed(tmp_path):
    run = RunFolder(tmp_path)
    save(run, 1)
    for step in (1, 2):
        run.journal("saved", step=step)
    run.journal("rewound", after_step=1)
    assert exported(run, None).step == 1


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    run = RunFolder(tmp_path)
    write(run, 1, {"identity": {"run": {"seed": 1}}}, lambda folder: None)
    run.write_json("identity.json", {"run": {"seed": 0}})
    with pytest.raises(CheckpointError, match=r"saved by another run than .*\n  run\.seed: the run has 1, .* gives 0"):
        exported(run, None)
    allowing = Config(
        RunSection("x", 1, allow_changed=["run.seed"]), ModelSection("x"), algorithm=cast(Any, None),
        backend=cast(Any, None),
    )  # fmt: skip
    assert exported(run, None, allowing).step == 1


def test_a_checkpoint_of_an_earlier_version_or_of_other_ranks_is_exported(tmp_path):
    run = RunFolder(tmp_path)
    rollout, split = {"order": "admission"}, {"parallel": {"tensor": 2}}
    write(run, 1, {"identity": {"rollout": rollout, "backend": split}}, lambda folder: None)
    now = {"rollout": {**rollout, "max_staleness": 0}, "backend": {"parallel": {"tensor": 1}}}
    run.write_json("identity.json", now)
    config = Config(RunSection("x", 1), ModelSection("x"), algorithm=cast(Any, None), backend=cast(Any, None))
    assert exported(run, None, config).step == 1
    run.write_json("identity.json", {**now, "rollout": {**rollout, "max_staleness": 1}})
    with pytest.raises(CheckpointError, match=r"rollout\.max_staleness: the run has nothing, the config gives 1"):
        exported(run, None, evolve(config, rollout=RolloutSection(max_staleness=1)))


def test_the_best_checkpoint_is_chosen_by_the_metric_of_the_config(tmp_path):
    run = RunFolder(tmp_path)
    for step, value in ((1, 0.5), (2, 0.9), (3, 0.7)):
        write(run, step, {"metrics": {"evaluation/test/correct": value}}, lambda folder: None)

    def config(best: KeepBestSection | None) -> Config:
        run = RunSection(folder=str(tmp_path), steps=3, keep_best=best)
        return cast(Config, SimpleNamespace(run=run))

    assert _best(run, config(KeepBestSection("evaluation/test/correct"))) == 2
    assert _best(run, config(KeepBestSection("evaluation/test/correct", "min"))) == 1
    with pytest.raises(CheckpointError, match=r"has no run\.keep_best"):
        _best(run, config(None))
    with pytest.raises(CheckpointError, match=r"no checkpoint of .* has the metric 'loss'"):
        _best(run, config(KeepBestSection("loss")))
