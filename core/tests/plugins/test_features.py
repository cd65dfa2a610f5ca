"""Features that one installed distribution brings: what is said where none is installed."""

import pytest
from attrs import evolve

from whet.errors import PluginError
from whet.plan import prepare
from whet.plugins.features import CHAT


def test_a_feature_that_is_not_installed_names_its_distribution(monkeypatch):
    nobody = evolve(CHAT, group="whet.nobody")
    assert nobody.missing() == "pip install whet-chat"
    with pytest.raises(PluginError, match="conversations cannot be tokenised; pip install whet-chat"):
        nobody.load()
    monkeypatch.setattr(prepare, "CHAT", nobody)
    (problem,) = prepare._no_chat()
    assert str(problem) == "model: is given, and nothing here tokenises conversations for it; pip install whet-chat"


def test_two_distributions_of_one_feature_are_named(monkeypatch):
    twice = evolve(CHAT, group="whet.commands")
    assert "remove all but one of their distributions" in twice.missing()
