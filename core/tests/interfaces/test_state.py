"""The state of a component is saved whole, or the component is refused."""

import pytest

from whet.errors import PluginError
from whet.interfaces.state import load_states, states


class Saves:
    def state(self):
        return {"seen": [1, 0.1]}


class Loads:
    def load(self, state):
        self.loaded = state


class Both(Saves, Loads):
    pass


def test_a_state_is_saved_and_loaded():
    one = Both()
    load_states({"a": one, "b": object()}, states({"a": one, "b": object()}))
    assert one.loaded == {"seen": [1, 0.1]}


@pytest.mark.parametrize("call", [states, lambda components: load_states(components, {})])
def test_a_component_that_nothing_could_load_is_refused(call):
    with pytest.raises(PluginError, match=r"filter 0 \(Saves\) has the method `state` and no `load`.*; add `load`, or"):
        call({"filter 0": Saves()})


class OfAGame:
    def state(self, board):
        return board


@pytest.mark.parametrize("one", [Loads(), OfAGame()])
def test_methods_of_other_meanings_are_no_state(one):
    load_states({"environment": one}, {"environment": {}})
    assert states({"environment": one}) == {}
