"""What is in another interpreter is known before anything runs in it, and what does not fit is told with its place."""

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

import whet
from whet.component import Package
from whet.errors import ConfigError
from whet.runtime import WIRE_FORMAT
from whet.runtime.interpreters import Interpreter, faults, find, probe, surroundings, versions
from whet_testing.environments import bare_environment, make_environment

HERE = Path(sys.executable)


def test_this_interpreter_fits_itself() -> None:
    found = probe(HERE, ["whet.plan.plan"], ["pluggy"])
    assert found.versions == versions(["pluggy"])
    assert found.versions["pluggy"] == metadata.version("pluggy")
    assert (found.whet, found.wire, found.missing, found.fault) == (whet.__version__, WIRE_FORMAT, (), "")
    assert faults(found, {"pluggy": metadata.version("pluggy"), "WHET": whet.__version__}) == []


def test_what_is_missing_or_of_another_version_is_named_with_its_interpreter(tmp_path: Path) -> None:
    python = make_environment(
        tmp_path / "other",
        without=["pluggy", "rich"],
        also={"pluggy-0.1.dist-info/METADATA": "Name: pluggy\nVersion: 0.1\n"},
    )
    wanted = {name: metadata.version(name) for name in ("pluggy", "rich")}
    assert faults(probe(python, ["rich.table", "rich", "json"], list(wanted)), wanted) == [
        f"{python} has pluggy 0.1, and the driver pluggy {wanted['pluggy']}; install the same in both",
        f"{python} has no rich, and the driver rich {wanted['rich']}; install the same in both",
        f"{python} lacks rich, which its workers import; install what offers it there",
    ]


def test_a_missing_package_is_named_as_people_call_it_and_told_how_to_get() -> None:
    steam = Package("Steam", "steam_engine", ("steam", "steam-cpu"), "light a fire")
    found = Interpreter("/python", "3.12.1", whet.__version__, WIRE_FORMAT, missing=("steam_engine", "rich.table"))
    assert faults(found, packages=[steam]) == [
        "/python has no Steam, which its workers stand on; light a fire",
        "/python lacks rich, which its workers import; install what offers it there",
    ]
    assert steam.version({"steam-cpu": "7.1"}) == "7.1"
    assert steam.version({"rich": "1"}) == ""
    assert not steam.is_here


def test_an_interpreter_without_core_is_told_how_to_get_it(tmp_path: Path) -> None:
    bare_environment(tmp_path / "bare")
    python = tmp_path / "bare" / "bin" / "python"
    [words] = faults(probe(python))
    assert words.startswith(f"{python} has no whet (ModuleNotFoundError: No module named 'whet'); wanted whet 0.")
    assert words.endswith(f"{python} -m pip install whet=={whet.__version__}")


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        ({"whet/__init__.py": "__version__ = '0.0.9'"}, "has whet 0.0.9 (wire format 0), and the driver whet 0."),
        (
            {
                "whet/__init__.py": f"__version__ = {whet.__version__!r}",
                "whet/runtime/__init__.py": "",
                "whet/runtime/interpreters.py": "def contents(*_): return {'wire': 77, 'versions': {}, 'missing': []}",
            },
            "(wire format 77), and the driver whet 0.",
        ),
    ],
    ids=["older", "another wire"],
)
def test_another_core_is_refused(tmp_path: Path, modules: dict[str, str], words: str) -> None:
    python = make_environment(tmp_path / "other", without=["whet"], also=modules)
    [told] = faults(probe(python))
    assert words in told
    assert told.startswith(str(python))


def test_a_python_that_is_too_old_is_told_before_anything_else() -> None:
    [words] = faults(Interpreter("/old/python", "3.9.2", fault="SyntaxError"))
    assert words == "/old/python has Python 3.9.2; whet needs 3.11 or newer"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("#!/bin/sh\necho no Python >&2; exit 3", "is no Python that can be used: no Python"),
        ("#!/bin/sh\nexit 3", "is no Python that can be used: exit code 3"),
        ("#!/bin/sh\nsleep 60", "does not answer"),
        ("nothing", "does not answer"),
    ],
)
def test_what_is_no_interpreter_is_told(tmp_path: Path, script: str, words: str) -> None:
    file = tmp_path / "python"
    file.write_text(script)
    file.chmod(0o755)
    with pytest.raises(ConfigError, match=f"{file} {words}"):
        probe(file, seconds=1.0)


def test_one_is_found_by_name_by_path_and_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHET_ENVIRONMENTS", str(tmp_path))
    bare_environment(tmp_path / "engine")
    python = tmp_path / "engine" / "bin" / "python"
    monkeypatch.chdir(tmp_path)
    assert [find(named) for named in ("engine", str(python), f"{tmp_path}/engine", "./engine/")] == [python] * 4
    with pytest.raises(ConfigError, match="is 'engin', and there is no such environment; there are: engine"):
        find("engin")
    with pytest.raises(ConfigError, match="is '/gone', where there is no Python"):
        find("/gone")


def test_where_there_is_no_home_folder_it_is_said_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WHET_ENVIRONMENTS", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where neither HOME nor the user is known
    with pytest.raises(ConfigError, match="no home folder for environments: set HOME, or WHET_ENVIRONMENTS"):
        find("engine")


def test_programs_of_its_own_environment_come_first(tmp_path: Path) -> None:
    bare_environment(tmp_path / "engine")
    given = {"PATH": "/usr/bin", "PYTHONHOME": "/driver", "VIRTUAL_ENV": "/driver", "HOME": "/root"}
    assert surroundings(f"{tmp_path}/engine/bin/python", given) == {
        "PATH": f"{tmp_path}/engine/bin{os.pathsep}/usr/bin", "VIRTUAL_ENV": f"{tmp_path}/engine", "HOME": "/root",
    }  # fmt: skip
    assert surroundings("/usr/bin/python3", given) == {"PATH": "/usr/bin:/usr/bin", "HOME": "/root"}
