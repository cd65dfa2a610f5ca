"""What a job reads of a run that goes on meanwhile."""

import shutil
from types import SimpleNamespace

import pytest

from whet import checkpoint
from whet.errors import CheckpointError, WhetError
from whet.jobs import _load
from whet.run_folder import RunFolder


def save(run, step):
    checkpoint.write(run, step, {}, {"backend": lambda folder: (folder / "weights").write_text(str(step))})


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

    _load(SimpleNamespace(load=load), run, None)
    assert read == ["step-000001", "step-000002"]


def test_a_damaged_checkpoint_is_an_error_at_once(tmp_path):
    run, read = RunFolder(tmp_path), []
    save(run, 1)

    def load(folder):
        read.append(folder)
        raise WhetError("damaged")

    with pytest.raises(WhetError, match="damaged"):
        _load(SimpleNamespace(load=load), run, None)
    assert len(read) == 1
    with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
        _load(SimpleNamespace(load=load), run, 7)
