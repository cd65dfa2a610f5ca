"""The state of a component is saved whole, or the component is refused."""

from types import SimpleNamespace

import numpy as np
import pytest

from whet.component import Component, Selection
from whet.errors import PluginError
from whet.interfaces.state import Components, load_states, states, stored


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


class Failing(Both):
    def state(self):
        raise KeyError("seen")

    def load(self, state):
        return state["missing"]


def test_a_method_that_raises_is_named_with_its_component():
    with pytest.raises(PluginError, match=r"state\(\) of filter 0 failed: KeyError: 'seen'"):
        states({"filter 0": Failing()})
    with pytest.raises(PluginError, match=r"load\(\) of filter 0 failed: KeyError: 'missing'"):
        load_states({"filter 0": Failing()}, {"filter 0": {}})


def test_a_function_that_builds_no_component_is_named():
    chosen = Selection("advantages", Component("own", dict, "own.module:build"), None, "acme")
    with pytest.raises(PluginError, match=r"`own.module:build` returned None; return the component 'own'"):
        Components({}).keep(chosen, None)


class WithNothingMeasured:
    state = dict  # a builtin, which has no signature

    def load(self, state):
        pass


def test_what_json_would_change_is_refused():
    with pytest.raises(PluginError, match=r"it gave \{'last': nan\}; it holds a NaN; keep None instead"):
        stored("it", {"last": float("nan")})
    with pytest.raises(PluginError, match="JSON returns"):
        stored("it", {"last": (1.0, float("nan"))})
    assert states({"a": WithNothingMeasured()}) == {"a": {}}


class Awaited(Saves):
    async def load(self, state):
        raise AssertionError


def test_a_load_that_nobody_awaits_is_named_and_what_json_lacks_has_advice():
    with pytest.raises(PluginError, match=r"load\(\) of one did nothing: `Awaited.load` must neither be `async def`"):
        load_states({"one": Awaited()}, {"one": {}})
    with pytest.raises(PluginError, match=r"JSON cannot store: .*float32.* `\.item\(\)`"):
        stored("it", {"last": np.float32(1)})


class OfAGame:
    def state(self, board):
        return board


@pytest.mark.parametrize("one", [Loads(), OfAGame(), SimpleNamespace(state=dict)])
def test_methods_of_other_meanings_are_no_state(one):
    load_states({"environment": one}, {"environment": {}})
    assert states({"environment": one}) == {}
