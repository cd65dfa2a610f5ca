"""A folder that a command writes is whole, and of one process."""

import os
from pathlib import Path

import pytest

from whet.errors import WhetError
from whet_training.whole import refuse_used, whole


@pytest.fixture(params=["new", "empty", "a link"])
def out(request, tmp_path):
    """Return a path in a folder of its own: of nothing, of an empty folder, or of a link to one."""
    out = tmp_path / "in" / "out"
    out.parent.mkdir()
    if request.param == "empty":
        out.mkdir()
    elif request.param == "a link":
        (tmp_path / "elsewhere").mkdir()
        out.symlink_to(tmp_path / "elsewhere")
    return out


def held(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_folder_is_there_when_it_is_whole_and_after_an_error_nothing_is_left(out):
    before = held(out.parent)
    with pytest.raises(WhetError, match="the disk is full"), whole(out) as partial:
        (partial / "half").write_text("of it")
        raise WhetError("the disk is full")
    assert held(out.parent) == before
    assert not out.exists() or not held(out)
    with whole(out) as partial:
        (partial / "all").write_text("of it")
        (partial / "more").mkdir()
    assert held(out) == ["all", "more"]
    assert held(out.parent) == ["out"]


def test_a_second_writer_is_refused_and_leaves_what_the_first_has_written(out):
    with whole(out) as partial:
        (partial / "weights").write_text("of the first")
        words = f"^{out} is being written by another process; wait for it, or choose another folder$"
        with pytest.raises(WhetError, match=words), whole(out):
            pass
    assert (out / "weights").read_text() == "of the first"


def test_what_a_killed_writer_left_is_replaced(out):
    partial = out / ".partial" if out.exists() else out.with_name("out.partial")
    (partial / "deep").mkdir(parents=True)
    (partial / "half").write_text("of it")
    (partial / "link").symlink_to(out.parent)
    refuse_used(out)
    with whole(out) as again:
        assert not held(again)
    assert held(out) == []
    assert held(out.parent) == ["out"]


def test_what_appears_meanwhile_is_not_replaced(out):
    words = f"{out} is no empty folder: it holds theirs; wanted a new or an empty one"
    with pytest.raises(WhetError, match=words), whole(out) as partial:
        (partial / "ours").touch()
        out.mkdir(exist_ok=True)
        (out / "theirs").touch()
    assert held(out) == ["theirs"]
    assert held(out.parent) == ["out"]


def test_a_folder_that_lost_the_lock_to_a_third_is_refused(out, monkeypatch):
    monkeypatch.setattr(os.path, "samestat", lambda one, other: False)
    with pytest.raises(WhetError, match="is being written by another process"), whole(out):
        pass


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c", "d"]])
def test_a_folder_that_is_used_is_refused(tmp_path, names):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(
        WhetError, match=rf"^{tmp_path} is no empty folder: it holds {', '.join(names[:3])}(, \.\.\.)?;"
    ):
        refuse_used(tmp_path)
    with pytest.raises(WhetError, match=f"^{tmp_path / 'a'} is no empty folder; wanted a new or an empty one"):
        refuse_used(tmp_path / "a")
