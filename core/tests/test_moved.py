"""Import paths of earlier versions."""

import importlib
import subprocess
import sys

import pytest

EVERY_PATH = """
import importlib, warnings
from whet.moved import MOVED
for path, new in MOVED.items():
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        old = importlib.import_module(f"whet.{path}")
    today = importlib.import_module(f"whet.{new}")
    assert f"whet.{path} has moved to whet.{new}" in [str(one.message) for one in warned], path
    names = [name for name in vars(today) if not name.startswith("__")]
    assert all(getattr(old, name) is getattr(today, name) for name in names), path
"""


def test_each_path_of_before_leads_to_the_module_of_today_with_a_warning() -> None:
    done = subprocess.run([sys.executable, "-c", EVERY_PATH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_module_is_loaded_twice_where_a_whole_room_has_moved() -> None:
    with pytest.warns(DeprecationWarning, match=r"whet\.cluster\.inline has moved to whet\.runtime\.inline"):
        old = importlib.import_module("whet.cluster.inline")
    assert old is importlib.import_module("whet.runtime.inline")


def test_a_module_of_another_distribution_is_found_by_its_path_of_before() -> None:
    pytest.importorskip("whet_ops", reason="whet-ops is not installed")
    with pytest.warns(DeprecationWarning, match=r"whet\.ops\.kl has moved to whet_ops\.kl"):
        old = importlib.import_module("whet.ops.kl")
    assert old is importlib.import_module("whet_ops.kl")
    with pytest.warns(DeprecationWarning, match=r"whet\.data\.pairs has moved to whet_data\.preferences"):
        from whet.data.pairs import encode_pair  # noqa: F401 -- the path of before itself is tested


def test_load_plugins_is_found_in_its_room_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"whet\.plugins\.load_plugins has moved to whet\.plugins\.registry"):
        from whet.plugins import load_plugins
    assert load_plugins is importlib.import_module("whet.plugins.registry").load_plugins


def test_a_module_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"whet\.nothing"):
        importlib.import_module("whet.nothing")


@pytest.mark.parametrize(
    ("module", "name", "today"),
    [
        ("traffic", "Line", "channel"),
        ("process", "last_words", "last_words"),
        ("process", "printable", "last_words"),
        ("call", "Call", "connection"),
    ],
)
def test_a_name_that_moved_between_modules_leads_on_with_a_warning(module: str, name: str, today: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{name} has moved to whet.runtime.{today}.{name}".replace(".", r"\.")):
        old = getattr(importlib.import_module(f"whet.runtime.{module}"), name)
    assert old is getattr(importlib.import_module(f"whet.runtime.{today}"), name)
    with pytest.raises(AttributeError, match="nothing"):
        _ = importlib.import_module(f"whet.runtime.{module}").nothing
