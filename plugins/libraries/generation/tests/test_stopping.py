"""A stop string is found at the token that completes it."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.errors import WhetError
from whet_generation.stopping import MOST_KEPT, StopStrings


def first_end(strings: StopStrings, tokenizer: Any, tokens: list[int], stop: str) -> int | None:
    """Find how many tokens it takes until the decoded text holds the string, by decoding everything each time."""
    for end in range(1, len(tokens) + 1):
        if stop in tokenizer.decode(tokens[:end], skip_special_tokens=False):
            return end
    return None


def found_end(strings: StopStrings, tokens: list[int], stop: str, vocab_size: int) -> int | None:
    enders = strings.enders((stop,), vocab_size)
    for end in range(1, len(tokens) + 1):
        if enders[tokens[end - 1]] and strings.completed(np.array(tokens[:end]), (stop,)):
            return end
    return None


TEXT = st.text(st.sampled_from(list("ab7+=. \n\\{")) | st.sampled_from(list("éß→漢🙂")), min_size=1, max_size=30)


@pytest.fixture(scope="module")
def strings(tiny_model_folder: Any) -> StopStrings:
    return StopStrings(tiny_model_folder)


@settings(max_examples=150)
@given(text=TEXT, data=st.data())
def test_a_stop_string_is_found_at_the_token_that_completes_it(
    strings: StopStrings, tiny_tokenizer: Any, text: str, data: st.DataObject
) -> None:
    begin = data.draw(st.integers(0, len(text) - 1))
    stop = text[begin : begin + data.draw(st.integers(1, 5))]
    tokens = tiny_tokenizer.encode(text, add_special_tokens=False)
    expected = first_end(strings, tiny_tokenizer, tokens, stop)
    assert expected is not None
    assert found_end(strings, tokens, stop, len(tiny_tokenizer)) == expected


@settings(max_examples=100)
@given(tokens=st.lists(st.integers(0, 383), min_size=1, max_size=40), stop=TEXT)
def test_random_tokens_stop_where_their_text_does(
    strings: StopStrings, tiny_tokenizer: Any, tokens: list[int], stop: str
) -> None:
    vocab_size = len(tiny_tokenizer)
    tokens = [token % vocab_size for token in tokens]
    stop = stop[:2]
    assert found_end(strings, tokens, stop, vocab_size) == first_end(strings, tiny_tokenizer, tokens, stop)


def test_a_special_token_s_text_can_be_a_stop_string(strings: StopStrings, tiny_tokenizer: Any) -> None:
    end = tiny_tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert strings.enders(("<|im_end|>",), len(tiny_tokenizer))[end]
    assert strings.completed(np.array([30, end]), ("<|im_end|>",))


def test_few_tokens_need_their_text_looked_at(strings: StopStrings, tiny_tokenizer: Any) -> None:
    # Tokens that are part of a character are always looked at: 128 of this small vocabulary.
    assert strings.enders(("\\boxed{",), len(tiny_tokenizer)).sum() < 128 + 10


def test_of_very_many_stop_strings_those_that_were_used_last_are_kept(tiny_model_folder: Any) -> None:
    strings = StopStrings(tiny_model_folder)
    for i in range(MOST_KEPT * 3):
        strings.enders(("always", f"boundary-{i}"), 384)
    kept = strings._enders_of.cache_info()
    assert (kept.currsize, kept.misses) == (MOST_KEPT, MOST_KEPT * 3 + 1)


def test_without_a_tokenizer_stop_strings_are_an_error(tmp_path: Any) -> None:
    with pytest.raises(WhetError, match=r"tokenizer\.json"):
        StopStrings(tmp_path).enders(("x",), 10)
