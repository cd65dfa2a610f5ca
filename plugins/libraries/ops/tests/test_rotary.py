"""Sequences are alone up to where rotary frequencies begin to follow the longest one of a pass."""

from types import SimpleNamespace
from typing import Any

import pytest

from whet_ops.rotary import longest_alone


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (None, None),
        ({"rope_type": "yarn"}, None),
        ({"rope_type": "dynamic"}, 128),
        ({"rope_type": "longrope"}, 128),
        ({"rope_type": "longrope", "original_max_position_embeddings": 32}, 32),
        ({"full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 32}, "sliding": {}}, 32),
    ],
)
def test_the_longest_sequence_alone_follows_from_the_config(rope: Any, longest: int | None) -> None:
    settings = SimpleNamespace(rope_parameters=rope, max_position_embeddings=128)
    assert longest_alone(SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: settings))) == longest
