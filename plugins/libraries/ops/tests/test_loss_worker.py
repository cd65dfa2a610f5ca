"""A loss that breaks its contract is refused: what it returns must not be left out, or train nothing, silently."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attrs import asdict

from whet.component import Spec
from whet.data.batch import Batch, from_sequences
from whet.errors import WhetError
from whet.interfaces.loss import LossResult

torch = pytest.importorskip("torch")

from whet_ops.algorithms.config import CorrectionSection  # noqa: E402
from whet_ops.algorithms.corrected_loss import Corrected  # noqa: E402
from whet_ops.algorithms.minibatches import SharedCount  # noqa: E402
from whet_ops.algorithms.policy_steps import with_correction  # noqa: E402
from whet_ops.loss_worker import LossWorker  # noqa: E402


class Worker(LossWorker):
    def __init__(self) -> None:
        self._ranks = SimpleNamespace(sum=list)
        self._device, self._losses = torch.device("cpu"), {}


class Sum:
    """A sound loss: the sum of logprobs."""

    columns: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("logprobs",)
    weights: Any = {"policy": 2.0}

    def counts(self, batch: Batch) -> Any:
        return {"policy": batch.tokens}

    def live(self, batch: Batch) -> Any:
        return torch.ones(batch.sequences, dtype=torch.bool)

    def __call__(self, outputs: Any, batch: Batch) -> Any:
        return LossResult({"policy": outputs["logprobs"].sum()})


@pytest.fixture
def batch() -> Batch:
    return from_sequences([{"tokens": range(n), "loss_mask": np.ones(n, bool)} for n in (2, 3)], prompt_lengths=[1, 1])


def objective(loss: Any, batch: Batch) -> Any:
    worker = Worker()
    outputs = {"logprobs": torch.arange(float(batch.tokens)).requires_grad_()}
    return worker._objective(outputs, batch, loss, worker._counts(loss, batch))


def test_a_sound_loss_is_weighed_and_normalised(batch: Batch) -> None:
    total, _ = objective(Sum(), batch)
    assert float(total.detach()) == pytest.approx(2.0 * 10 / 5)
    with torch.no_grad():
        assert float(objective(Sum(), batch)[0]) == pytest.approx(4.0)


class CountsNothing(Sum):
    def counts(self, batch: Batch) -> Any:
        return {"policy": 0}


def test_a_term_with_a_sum_and_without_a_count_is_refused(batch: Batch) -> None:
    with pytest.raises(WhetError, match="the term policy of the loss CountsNothing is 10 and its count is 0"):
        objective(CountsNothing(), batch)

    class Empty(CountsNothing):
        def __call__(self, outputs: Any, batch: Batch) -> Any:
            return LossResult({"policy": outputs["logprobs"].sum() * 0.0})

    assert float(objective(Empty(), batch)[0].detach()) == 0


def test_a_loss_that_counts_nothing_of_a_batch_to_train_on_is_warned_of_once(batch: Batch, caplog: Any) -> None:
    worker = Worker()
    assert worker._counts(CountsNothing(), batch.with_columns(loss_mask=np.zeros(batch.tokens, bool))) == {"policy": 0}
    assert not caplog.messages, "nothing is to be trained"
    for _ in range(2):
        assert worker._counts(CountsNothing(), batch) == {"policy": 0}
    (told,) = caplog.messages
    assert "CountsNothing counts 0 in a batch with 5 tokens to train on" in told


RESULTS = {
    "another term": (lambda sum: LossResult({"other": sum}), "returned the terms other, and has weights of policy"),
    "a number": (lambda sum: LossResult({"policy": sum.item()}), "the term policy .* is 10.0, wanted a tensor"),
    "each token": (lambda sum: LossResult({"policy": sum.expand(5)}), r"of the shape \(5,\), wanted a tensor of one"),
    "detached": (lambda sum: LossResult({"policy": sum.detach()}), "has no gradient, so it trains nothing"),
    "no result": (lambda sum: sum, "returned Tensor, wanted a LossResult"),
    "a plain metric": (
        lambda sum: LossResult({"policy": sum}, {"gap": 0.5}),
        r"the metric 'gap' of .* is float, wanted a pair \(sum,",
    ),
}


@pytest.mark.parametrize(("result", "message"), RESULTS.values(), ids=RESULTS)
def test_a_result_that_would_train_nothing_is_refused(batch: Batch, result: Any, message: str) -> None:
    class Wrong(Sum):
        def __call__(self, outputs: Any, batch: Batch) -> Any:
            return result(outputs["logprobs"].sum())

    with pytest.raises(WhetError, match=f"Wrong.*{message}|{message}"):
        objective(Wrong(), batch)


def test_a_term_that_has_nothing_to_learn_needs_no_gradient(batch: Batch) -> None:
    class Nothing(Sum):
        def __call__(self, outputs: Any, batch: Batch) -> Any:
            return LossResult({"policy": torch.zeros(())})

    assert float(objective(Nothing(), batch)[0]) == 0.0


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({}, "^the loss Miscounted has counts of none, and weights of policy"),
        (None, "^`counts` of the loss Miscounted returned None, wanted a mapping of terms to numbers"),
        (3.0, "^`counts` of the loss Miscounted returned 3.0, wanted a mapping"),
        ({"policy": -3.0}, "^the count of policy of the loss Miscounted is -3.0, wanted a number that is not below 0"),
        ({"policy": torch.tensor(float("nan"))}, r"^the count of policy .* is tensor\(nan\), wanted a number"),
        ({"policy": None}, "^the count of policy .* is None, wanted a number"),
    ],
)
def test_counts_that_are_none_are_refused(batch: Batch, counts: Any, message: str) -> None:
    class Miscounted(Sum):
        def counts(self, batch: Batch) -> Any:
            return counts

    with pytest.raises(WhetError, match=message):
        objective(Miscounted(), batch)


def made_wrong(config: Any) -> Any:
    return CountsNothing()


INNER = asdict(Spec(f"{__name__}:made_wrong", "", {}))


@pytest.mark.parametrize("loss", [
    SharedCount({"loss": INNER, "minibatches": 2}),
    Corrected({"loss": INNER, "correction": {}}),
    SharedCount({"loss": asdict(with_correction(Spec(**INNER), CorrectionSection(mask="token"))), "minibatches": 2}),
])  # fmt: skip
def test_an_error_of_a_loss_that_another_wraps_names_the_inner_one(batch: Batch, loss: Any) -> None:
    columns = dict.fromkeys(("advantages", "sampler_logprobs"), np.zeros(batch.tokens, np.float32))
    with pytest.raises(WhetError, match="the term policy of the loss CountsNothing is 10 and its count is 0"):
        objective(loss, batch.with_columns(**columns))


def test_live_has_a_value_for_each_sequence(batch: Batch) -> None:
    class Short(Sum):
        def live(self, batch: Batch) -> Any:
            return torch.ones(1, dtype=torch.bool)

    assert len(Worker()._live(batch, Sum())["lengths"]) == 2
    with pytest.raises(WhetError, match=r"`live` of the loss Short has the shape \(1,\), wanted .* 2 sequences"):
        Worker()._live(batch, Short())


@pytest.mark.parametrize(("elsewhere", "mine", "kept"), [
    (0.0, [False, True], [1]), (0.0, [False, False], [0]), (1.0, [False, True], [1]), (1.0, [False, False], []),
])  # fmt: skip
def test_a_rank_without_a_live_unit_computes_one_only_if_no_rank_has_any(
    batch: Batch, elsewhere: float, mine: list[bool], kept: list[int]
) -> None:
    class Dead(Sum):
        def live(self, batch: Batch) -> Any:
            return torch.tensor(mine)

    worker = Worker()
    worker._ranks = SimpleNamespace(sum=lambda values: [value + elsewhere for value in values])
    found = worker._live(batch.with_columns(number=np.arange(2)), Dead())
    assert found["number"].tolist() == kept
    assert len(found["tokens"]) == found["lengths"].sum()
