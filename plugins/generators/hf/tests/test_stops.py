"""Completions end at their stop tokens, stop strings and limits, and keep the tokens that ended them."""

from typing import Any

import numpy as np
from attrs import evolve


def test_a_completion_ends_with_its_stop_token(decoding: Any, requests_of: Any) -> None:
    free = decoding.decode(requests_of(12, max_tokens=30))
    for i, completion in enumerate(free):
        stop = int(completion.tokens[len(completion.tokens) // 2])
        requests = requests_of(12, max_tokens=30, stop_tokens=(stop, 10**6, -1))
        ended = decoding.decode(requests)[i]
        first = completion.tokens.tolist().index(stop)
        assert ended.stop == "stop"
        assert ended.tokens.tolist() == completion.tokens[: first + 1].tolist()
        np.testing.assert_allclose(ended.logprobs, completion.logprobs[: first + 1], atol=1e-5)


def test_each_request_has_its_own_stops(decoding: Any, requests_of: Any, tiny_tokenizer: Any) -> None:
    requests = requests_of(9, max_tokens=40)
    free = decoding.decode(requests)
    texts = [tiny_tokenizer.decode(c.tokens[5:6], skip_special_tokens=False) for c in free]
    asked = []
    for i, (request, text, whole) in enumerate(zip(requests, texts, free, strict=True)):
        stops = ({"stop": (text,)}, {"stop_tokens": (int(whole.tokens[7]),)}, {})[i % 3]
        asked.append(evolve(request, sampling=evolve(request.sampling, **stops)))
    for i, (ended, whole, text) in enumerate(zip(decoding.decode(asked), free, texts, strict=True)):
        assert ended.tokens.tolist() == whole.tokens[: len(ended.tokens)].tolist()
        if i % 3 == 0:
            assert text in tiny_tokenizer.decode(ended.tokens, skip_special_tokens=False)
            assert text not in tiny_tokenizer.decode(ended.tokens[:-1], skip_special_tokens=False)
            assert len(ended.tokens) <= 6
        elif i % 3 == 1:
            assert ended.tokens[-1] == whole.tokens[7]
            assert len(ended.tokens) <= 8
        else:
            assert (len(ended.tokens), ended.stop) == (40, "length")
