"""What an engine answers becomes a completion, or an error where it cannot be trained on."""

import numpy as np
import pytest

from whet.data.records import Request, Sampling
from whet.errors import WhetError
from whet_generation.completeness import checked_logprobs, nothing_yet, version_spans

REQUEST = Request("r1", np.full(3, 5, np.int64), Sampling(), 0)


@pytest.mark.parametrize(
    ("found", "count", "spans"),
    [
        ([(0, "default"), (3, "7"), (4, "7"), (5, "9")], 5, ((0, 0), (3, 7))),
        ([(0, "7"), (2, "9")], 3, ((0, 7), (2, 9))),
        ([], 0, ()),
    ],
)
def test_spans_begin_where_other_weights_do_and_within_the_tokens(found, count, spans) -> None:
    assert version_spans(found, count, "Steam 9") == spans


def test_tokens_of_unknown_weights_are_an_error() -> None:
    with pytest.raises(WhetError, match="says of no token which weights made it; wanted Steam 9"):
        version_spans([], 2, "Steam 9")


def test_logprobs_are_at_most_0_and_finite() -> None:
    assert checked_logprobs(np.array([-0.5, 1e-9], np.float32), REQUEST, "Steam").tolist() == [-0.5, 0.0]
    with pytest.raises(WhetError, match="request r1: Steam gave logprobs that are not finite; the weights may"):
        checked_logprobs(np.array([-0.5, np.nan], np.float32), REQUEST, "Steam")


def test_a_request_that_never_began_has_no_tokens() -> None:
    assert (nothing_yet("r1").id, len(nothing_yet("r1").tokens), nothing_yet("r1").versions) == ("r1", 0, ())
