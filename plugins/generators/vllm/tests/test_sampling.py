"""vLLM's answers are read with care."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from whet.data.records import Request, Sampling
from whet.errors import WhetError
from whet_vllm.sampling import completion, progress


def request(length: int = 3, token: int = 5, **sampling: Any) -> Request:
    return Request("r1", np.full(length, token, np.int64), Sampling(**sampling), 0)


def span(version: str, start: int) -> Any:
    return SimpleNamespace(version=version, start=start)


def output(**changes: Any) -> Any:
    flat = SimpleNamespace(start_indices=[0, 1], logprobs=[-0.5, 1e-9])
    found = {
        "finish_reason": "length", "stop_reason": None, "token_ids": [4, 5], "logprobs": flat,
        "weight_versions": [span("2", 0)],
    }  # fmt: skip
    return SimpleNamespace(outputs=[SimpleNamespace(**{**found, **changes})])


def test_a_completion_has_what_the_output_says() -> None:
    made = completion(request(), output())
    assert (made.id, made.stop, made.versions) == ("r1", "length", ((0, 2),))
    assert completion(request(), output(weight_versions=[span("default", 0), span("7", 1)])).versions == (
        (0, 0),
        (1, 7),
    )
    assert made.tokens.tolist() == [4, 5]
    assert made.logprobs.tolist() == [-0.5, 0.0]


@pytest.mark.parametrize("k", [0, 2])
def test_a_report_has_as_many_likeliest_tokens_as_are_wanted(k: int) -> None:
    starts = [0, 1 + k, 2 * (1 + k)]
    tokens = [token for own in (4, 5, 6) for token in (own, *range(7, 7 + k))]
    flat = SimpleNamespace(start_indices=starts, token_ids=tokens, logprobs=[-0.1 * token for token in tokens])
    made = progress(evolve(request(), progress=k), output(token_ids=[4, 5, 6], logprobs=flat), 1)
    assert (made.begin, made.tokens.tolist()) == (1, [5, 6])
    np.testing.assert_allclose(made.logprobs, [-0.5, -0.6], rtol=1e-6)
    assert made.likeliest.shape == made.likeliest_logprobs.shape == (2, k)
    assert made.likeliest.tolist() == [list(range(7, 7 + k))] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_versions": None}, r"which weights made it; wanted vLLM 0\.32 or later"),
        ({"finish_reason": "error", "stop_reason": "x"}, "vLLM ended it with 'error': 'x'"),
        ({"logprobs": SimpleNamespace(start_indices=[0], logprobs=[-1.0])}, "logprobs of 1 of 2 tokens"),
        (
            {"logprobs": SimpleNamespace(start_indices=[0, 1], logprobs=[-1.0, float("nan")])},
            "not finite; the weights may",
        ),
    ],
)
def test_an_output_that_cannot_be_trusted_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WhetError, match=message):
        completion(request(), output(**changes))
