"""Peaks of all layers from traces of few, on timelines whose peaks are known."""

import pytest

from whet_memory.timelines import depths, extrapolate, peak, shortened

PARAMETERS, ACTIVATIONS, GRADIENTS, BRIEF = 100, 30, 70, 500


def forward(layers: int) -> list[tuple[str, int]]:
    """Return a forward pass: weights are there, activations stay, and each layer needs something for a moment."""
    held, line = layers * PARAMETERS, [("embed", layers * PARAMETERS)]
    for _ in range(layers):
        line += [("matmul", held + BRIEF), ("norm", held + ACTIVATIONS)]
        held += ACTIVATIONS
    return [*line, ("head", held + 3 * BRIEF), ("loss", held)]


def backward(layers: int) -> list[tuple[str, int]]:
    held, line = layers * (PARAMETERS + ACTIVATIONS), []
    for _ in range(layers):
        line += [("recompute", held + BRIEF), ("gradient", held + GRADIENTS - ACTIVATIONS)]
        held += GRADIENTS - ACTIVATIONS
    return [*line, ("embed", held + BRIEF)]


@pytest.mark.parametrize("phase", [forward, backward])
@pytest.mark.parametrize("layers", [5, 28, 80])
def test_the_peak_of_any_number_of_layers_follows_from_three_and_four(phase, layers: int) -> None:
    assert extrapolate(phase(3), phase(4), layers - 4) == peak(phase(layers))


def test_a_moment_that_is_highest_only_with_many_layers_is_found() -> None:
    """With few layers the head is the peak, with many the last layer of the backward pass."""
    assert peak(backward(3)) < peak(forward(3))
    assert peak(backward(80)) > peak(forward(80))
    assert extrapolate(backward(3), backward(4), 76) == peak(backward(80))


def test_phases_without_operations_in_common_are_compared_as_wholes() -> None:
    assert extrapolate([("a", 10)], [("b", 20)], 3) == 50
    assert extrapolate([], [], 3) == 0


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"num_hidden_layers": 28}, (3, 4, 28)),
        ({"num_hidden_layers": 4}, (4, 4, 4)),
        ({"num_hidden_layers": 60, "first_k_dense_replace": 3}, (5, 6, 60)),
        ({"num_hidden_layers": 48, "layer_types": (["linear"] * 3 + ["full"]) * 12}, (5, 9, 48)),
        ({"text_config": {"num_hidden_layers": 32}}, (3, 4, 32)),
        ({}, (0, 0, 0)),
    ],
)
def test_small_models_differ_by_the_layers_after_which_kinds_repeat(config, found) -> None:
    assert depths(config) == found


def test_a_shortened_config_keeps_everything_but_its_layers() -> None:
    config = {"num_hidden_layers": 8, "layer_types": ["a", "b"] * 4, "hidden_size": 7, "max_window_layers": 8}
    assert shortened(config, 3) == {
        "num_hidden_layers": 3, "layer_types": ["a", "b", "a"], "hidden_size": 7, "max_window_layers": 3
    }  # fmt: skip
    assert shortened({"text_config": {"num_hidden_layers": 8}}, 2) == {"text_config": {"num_hidden_layers": 2}}
