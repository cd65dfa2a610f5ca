"""A folder that a command writes is whole, and of one process."""

import errno
import os
from pathlib import Path

import pytest

from whet.errors import WhetError
from whet_training.whole import MARK, refuse_used, whole


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


def partial_of(out: Path) -> Path:
    return out / ".partial" if out.exists() else out.with_name("out.partial")


def test_what_a_killed_writer_left_is_replaced(out):
    if (left := os.fork()) == 0:
        with whole(out) as partial:
            (partial / "deep").mkdir()
            (partial / "half").write_text("of it")
            (partial / "link").symlink_to(out.parent)
            os._exit(0)
    os.waitpid(left, 0)
    assert held(partial_of(out)) == [MARK, "deep", "half", "link"]
    refuse_used(out)
    with whole(out) as again:
        assert held(again) == [MARK]
    assert held(out) == []
    assert held(out.parent) == ["out"]


@pytest.mark.parametrize("kind", ["a folder", "a file", "a link", "a link to nothing"])
def test_what_another_has_at_the_partial_folder_is_refused_and_stays(out, tmp_path, kind):
    partial, theirs = partial_of(out), tmp_path / "theirs"
    if kind == "a folder":
        partial.mkdir()
        (partial / "notes.txt").touch()
    elif kind == "a file":
        partial.write_text("notes")
    else:
        partial.symlink_to(theirs)
        if kind == "a link":
            theirs.mkdir()
            (theirs / "notes.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    words = f"{out} is written in {partial} first, and what is there was not left by an unfinished command; move it"
    with pytest.raises(WhetError, match=words), whole(out):
        pass
    assert sorted(tmp_path.rglob("*")) == before


def test_what_appears_meanwhile_is_not_replaced_and_what_was_written_is_kept(out):
    partial = partial_of(out)
    words = f"{out} is no empty folder: it holds theirs; wanted a new or an empty one.* is kept in {partial}: move it"
    with pytest.raises(WhetError, match=words), whole(out):
        (partial / "ours").touch()
        out.mkdir(exist_ok=True)
        (out / "theirs").touch()
    (out / "theirs").unlink()
    assert "ours" in held(partial)
    if partial.parent == out:
        with pytest.raises(WhetError, match="was not left by an unfinished command"), whole(out):
            pass
        assert "ours" in held(partial)


def test_what_cannot_be_moved_is_kept(out, monkeypatch):
    partial, rename = partial_of(out), Path.rename

    def renamed(file, target):
        if file.name != "a":
            raise OSError(errno.EIO, "Input/output error")
        rename(file, target)

    with (
        pytest.raises(WhetError, match=f"cannot write {out}: Input/output error; what was written is kept in"),
        whole(out),
    ):
        for name in "abc":
            (partial / name).touch()
        monkeypatch.setattr(Path, "rename", renamed)
    assert sorted({*held(partial), *(held(out) if out.exists() else [])} - {MARK, ".partial"}) == ["a", "b", "c"]
    with pytest.raises(WhetError), whole(out):
        pass
    assert {"b", "c"} <= {*held(partial)}


def test_a_link_to_nothing_is_refused_at_once(tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "nothing")
    with (
        pytest.raises(WhetError, match="out is no empty folder; wanted a new or an empty one"),
        whole(tmp_path / "out"),
    ):
        pytest.fail("it began")


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
