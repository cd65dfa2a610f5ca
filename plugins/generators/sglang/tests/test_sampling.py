"""SGLang is asked for what a request says; its answers are read with care."""

from typing import Any

import numpy as np
import pytest

from whet.data.records import Request, Sampling
from whet.errors import WhetError
from whet_sglang.sampling import completion, sampling_params


def request(**sampling: Any) -> Request:
    return Request("r1", np.full(3, 5, np.int64), Sampling(**sampling), 2**63 + 4)


def test_a_request_is_asked_for_as_it_is() -> None:
    asked = sampling_params(request(temperature=0.5, stop=("a",), stop_tokens=(3,)), 9)
    assert (asked["temperature"], asked["max_new_tokens"], asked["top_k"], asked["sampling_seed"]) == (0.5, 9, -1, 4)
    assert (asked["stop"], asked["stop_token_ids"], asked["ignore_eos"]) == (["a"], [3], True)


def span(version: str, start: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": start + 1}


def output(**changes: Any) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": "length", "length": 2}, "weight_versions": [span("2", 0)],
        "output_token_logprobs": [(-0.5, 4, None), (1e-9, 5, None)], **changes,
    }  # fmt: skip
    return {"output_ids": [4, 5], "meta_info": meta}


def test_a_completion_has_what_the_output_says() -> None:
    made = completion(request(), output())
    assert (made.id, made.stop, made.versions) == ("r1", "length", ((0, 2),))
    assert completion(request(), output(weight_versions=[span("default", 0), span("7", 1)])).versions == (
        (0, 0),
        (1, 7),
    )
    assert made.tokens.tolist() == [4, 5]
    assert made.logprobs.tolist() == [-0.5, 0.0]


def test_an_aborted_request_has_the_tokens_of_which_all_is_known() -> None:
    found = output(finish_reason={"type": "abort"}, output_token_logprobs=[(-0.5, 4, None)])
    made = completion(request(), found)
    assert (made.tokens.tolist(), made.stop) == ([4], "abort")
    nothing = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}
    assert completion(request(), nothing).versions == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_versions": []}, r"which weights made it; wanted SGLang 0\.5\.23 or later"),
        ({"finish_reason": {"type": "error"}}, "SGLang ended it with {'type': 'error'}"),
        ({"finish_reason": {"type": "stop", "matched": "NaN happened"}}, "NaN happened"),
        ({"output_token_logprobs": [(-1.0, 4, None)]}, "logprobs of 1 tokens that are not its 2"),
        ({"output_token_logprobs": [(-1.0, 4, None), (-1.0, 6, None)]}, "that are not its 2"),
        ({"output_token_logprobs": [(-1.0, 4, None), (float("nan"), 5, None)]}, "not finite; the weights may"),
    ],
)
def test_an_output_that_cannot_be_trusted_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WhetError, match=message):
        completion(request(), output(**changes))
