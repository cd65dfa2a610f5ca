"""The exported model of a run takes the place of what was there."""

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
