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


@pytest.mark.parametrize(("one", "lacking"), [(Saves(), "load"), (Loads(), "state")])
@pytest.mark.parametrize("call", [states, lambda components: load_states(components, {})])
def test_a_component_with_a_part_of_a_state_is_refused(one, lacking, call):
    with pytest.raises(
        PluginError,
        match=rf"filter 0 \({type(one).__name__}\) has the method .* no `{lacking}`.*; add `{lacking}`, or rename",
    ):
        call({"filter 0": one})
