import numpy as np
import pytest

from whet.data.batch import from_sequences
from whet_dpo.baseline import kl_baseline, mismatched
from whet_testing.fakes import FakeBackend


def batch(*responses, units=None, prompts=None):
    """Prompts are [10], [20], ...; a token to learn for each number of a response."""
    prompts = prompts or [[10 * (i + 1)] for i in range(len(responses))]
    rows = [
        {"tokens": np.array([*p, *a]), "loss_mask": np.array([False] * len(p) + [True] * len(a))}
        for p, a in zip(prompts, responses, strict=True)
    ]
    return from_sequences(rows, prompt_lengths=[len(p) for p in prompts], unit=units)


def rows(found):
    return [part.tolist() for part in np.split(found["tokens"], np.cumsum(found["lengths"])[:-1])]


def test_each_prompt_gets_the_response_of_the_unit_before():
    found = mismatched(batch([1], [2, 2], [3, 3]))
    assert rows(found) == [[10, 3, 3], [20, 1], [30, 2, 2]]
    assert found["loss_mask"].tolist() == [False, True, True, False, True, False, True, True]
    assert found["prompt_lengths"].tolist() == [1, 1, 1]


def test_a_response_of_the_same_pair_is_not_borrowed():
    found = mismatched(batch([1], [2], [3], [4], units=[0, 0, 1, 1], prompts=[[10], [10], [20], [20]]))
    assert rows(found) == [[10, 3], [10, 4], [20, 1], [20, 2]]


def test_what_gets_longer_than_the_longest_is_cut():
    found = mismatched(batch([1], [2] * 4, prompts=[[10] * 4, [20]]))
    assert rows(found) == [[10, 10, 10, 10, 2], [20, 1]]


class Backend(FakeBackend):
    """Scores each token by its number: the policy differs from the reference by it."""

    def __init__(self, sign=1.0):
        super().__init__()
        self.sign = sign

    def score(self, batch, outputs, weights="policy"):
        apart = self.sign * batch["tokens"] if weights == "policy" else 0.0
        return {"logprobs": np.where(batch["loss_mask"], -5.0 + apart, 0).astype(np.float32)}


def test_the_baseline_is_the_mean_log_ratio_of_borrowed_responses_and_never_negative():
    whole = batch([1], [2, 2], [3, 3])
    assert kl_baseline(Backend(), whole).tolist() == pytest.approx([(6 + 1 + 4) / 3] * 3)
    assert kl_baseline(Backend(-1.0), whole).tolist() == [0, 0, 0]


def test_responses_without_a_token_to_learn_do_not_count():
    assert kl_baseline(Backend(), batch([1], [], [3, 3])).tolist() == pytest.approx([(6 + 1) / 2] * 3)


@pytest.mark.parametrize("one", [batch([1]), batch([1], [2], units=[0, 0]), batch()])
def test_where_there_is_no_other_response_it_is_0(one):
    assert kl_baseline(Backend(), one).tolist() == [0] * one.sequences
