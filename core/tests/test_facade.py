"""`import whet` loads nothing heavy and has what a plugin's author needs."""

import subprocess
import sys

import pytest

import whet

CODE = """
import sys
import whet
assert not [name for name in sys.modules if name.startswith("whet.")], "a name is imported before it is used"
whet.Component, whet.SingleTurn, whet.hookimpl, whet.selection, whet.Loss
assert not {"torch", "ray", "transformers"} & set(sys.modules)
"""


@pytest.mark.parametrize("name", whet.__all__)
def test_each_name_is_that_of_its_module(name: str) -> None:
    found = getattr(whet, name)
    homes = [home for home, names in whet._HOMES.items() if name in names]
    assert [getattr(sys.modules[f"whet.{home}"], name) for home in homes] in ([found], [])
    assert (homes == []) == (name in ("hookimpl", "__version__"))
    assert name in dir(whet)


def test_importing_whet_imports_none_of_its_modules_and_its_names_nothing_heavy() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)


def test_a_name_that_there_is_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'whet' has no attribute 'Trainer'"):
        _ = whet.Trainer
