"""Targets are found again in any process."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from whet.component import Problem, file_module, import_file, import_path, resolve
from whet.errors import PluginError


def test_a_target_names_a_class_of_a_package() -> None:
    assert resolve("whet.component:Problem") is Problem
    assert import_path(Problem) == "whet.component:Problem"


@pytest.mark.parametrize(
    "target", ["no_such_package:X", "whet.component:Missing", "", ":", "whet.component", "file:/nowhere/x.py:X"]
)
def test_a_target_that_cannot_be_imported_is_named(target: str) -> None:
    with pytest.raises(PluginError, match="cannot be imported"):
        resolve(target)


def test_a_class_of_a_single_file_is_the_same_in_another_process(tmp_path: Path) -> None:
    file = tmp_path / "my thing.py"
    file.write_text("class Thing:\n    size = 3\n")
    path = import_path(import_file(file).Thing)
    assert resolve(path) is import_file(file).Thing
    code = f"from whet.component import resolve; print(resolve({path!r}).size)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "3\n"


def test_a_file_that_fails_to_import_is_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "thing.py"
    file.write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        import_file(file)
    file.write_text("size = 3  # and another length, so that no stale bytecode is used")
    assert import_file(file).size == 3


def test_a_file_that_has_changed_is_imported_anew_and_a_target_in_it_stays_what_was_imported(tmp_path: Path) -> None:
    file = tmp_path / "thing.py"
    file.write_text("size = 1")
    before = import_file(file)
    assert import_file(file) is before
    file.write_text("size = 5")  # of equal length, within the same second
    assert resolve(f"file:{file}:size") == 1, "a run that has begun keeps the code that it began with"
    assert import_file(file).size == 5
    assert resolve(f"file:{file}:size") == 5


def test_a_changed_file_that_fails_to_import_leaves_no_module(tmp_path: Path) -> None:
    file = tmp_path / "thing.py"
    file.write_text("size = 1")
    import_file(file)
    file.write_text("size = 2\n1 / 0")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            import_file(file)
        assert file_module(file) not in sys.modules
    with pytest.raises(PluginError, match="ZeroDivisionError"):
        resolve(f"file:{file}:size")


def test_no_thread_gets_a_file_that_another_thread_is_importing(tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text("import time\ntime.sleep(0.3)\nsize = 1")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: (import_file(file).size, resolve(f"file:{file}:size")), range(4)))
    assert found == [(1, 1)] * 4


def test_a_class_made_inside_a_function_is_refused() -> None:
    class Local:
        pass

    with pytest.raises(PluginError, match="inside a function"):
        import_path(Local)
