"""The kit by the path that it had in core."""

import importlib

import pytest

from whet_testing.contracts.environment import EnvironmentContract


def test_the_path_in_core_leads_to_the_kit_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"whet\.testing\.contracts\.environment has moved to whet_testing\."):
        old = importlib.import_module("whet.testing.contracts.environment")
    assert old.EnvironmentContract is EnvironmentContract
    assert importlib.import_module("whet.testing.models") is importlib.import_module("whet_start.small_models")
