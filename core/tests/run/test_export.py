"""The exported model of a run takes the place of what was there."""

import pytest

from whet.errors import WhetError
from whet.run.compose import _export
from whet.run.run_folder import RunFolder


class Exporter:
    """A backend that exports one file."""

    def export(self, path):
        """Write the file."""
        path.mkdir()
        (path / "model.safetensors").write_text("new")


def test_a_link_in_the_place_of_the_model_is_replaced_and_its_target_left_alone(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model.safetensors").write_text("old")
    folder = RunFolder(tmp_path / "run")
    folder.claim()
    (folder.path / "model").symlink_to(elsewhere)
    _export(Exporter(), folder, 3)
    folder.release()
    assert not (folder.path / "model").is_symlink()
    assert (folder.path / "model/model.safetensors").read_text() == "new"
    assert (elsewhere / "model.safetensors").read_text() == "old"


class Failing(Exporter):
    """A backend whose export fails after its first file."""

    def __init__(self, meanwhile=lambda: None):
        self.meanwhile = meanwhile

    def export(self, path):
        """Write the file, and fail."""
        super().export(path)
        self.meanwhile()
        raise WhetError("the disk is full")


def test_an_export_that_fails_leaves_nothing(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.claim()
    with pytest.raises(WhetError, match="the disk is full"):
        _export(Failing(), folder, 3)
    assert not list(folder.path.glob("model*"))
    folder.release()


def test_an_export_that_fails_touches_no_other_run_in_its_place(tmp_path):
    folder, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")

    def replace():
        folder.path.rename(tmp_path / "moved")
        other.claim()
        Exporter().export(other.path / "model.partial")

    folder.claim()
    with pytest.raises(WhetError, match="the disk is full"):
        _export(Failing(replace), folder, 3)
    assert (other.path / "model.partial/model.safetensors").exists()
    folder.release()
    other.release()
