"""The worker of a backend sums micro-batches, takes steps, and refuses what it cannot do, with any model."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen

from whet.component import Spec, import_path
from whet.data.batch import Batch
from whet.data.model_info import ModelInfo
from whet.errors import CheckpointError, WhetError
from whet.interfaces.loss import LossResult
from whet.interfaces.workers import WorkerRank
from whet_ops.backend_worker import BackendWorker
from whet_testing.batches import random_batch
from whet_testing.losses import Likelihood

LIKELIHOOD = Spec("whet_testing.losses:Likelihood")


@frozen
class Bigrams:
    """A model of pairs of tokens."""

    lr: float = 0.5
    """Learning rate."""
    micro_batch_tokens: int = 8192
    """Tokens of a micro-batch."""


class Worker(BackendWorker):
    """Logits of the next token depend on the token before alone."""

    def start(self) -> None:
        self.lr, self.micro_batch_tokens = self.config.lr, self.config.micro_batch_tokens
        self.logits = torch.zeros(256, 256, requires_grad=True)

    def outputs(self, batch: Batch, names: Iterable[str]) -> dict[str, Any]:
        tokens = batch["tokens"]
        follows = self.logits.log_softmax(-1)[tokens[:-1], tokens[1:]]
        return {name: torch.nn.functional.pad(follows, (1, 0)) for name in names}

    def clip(self) -> float:
        assert self.logits.grad is not None
        return float(self.logits.grad.norm())

    def step(self) -> None:
        assert self.logits.grad is not None
        with torch.no_grad():
            self.logits -= self.lr * self.logits.grad
        self.logits.grad = None

    def write(self, folder: Path) -> None:
        (folder / "logits.json").write_text(json.dumps(self.logits.tolist()))

    def read(self, folder: Path) -> None:
        self.logits = torch.tensor(json.loads((folder / "logits.json").read_text()), requires_grad=True)


def worker(**settings: Any) -> Worker:
    rank = WorkerRank("backend", 0, 1)
    return Worker(rank, settings, import_path(Bigrams), ModelInfo("made-up", {}))


def numbers(found: Any) -> dict[str, float]:
    return {name: metric.number() for name, metric in found.items()}


def test_a_step_does_not_depend_on_micro_batches() -> None:
    batch, found = random_batch(0), []
    for size in (1, 20, 8192):
        made = worker(micro_batch_tokens=size)
        found.append((numbers(made.train(batch, LIKELIHOOD)), made.score(batch, ("logprobs",), "policy")["logprobs"]))
    for other, scores in found[1:]:
        assert other == pytest.approx(found[0][0], rel=1e-5)
        np.testing.assert_allclose(scores, found[0][1], rtol=1e-5)
    assert found[0][0]["loss"] == pytest.approx(np.log(256), rel=1e-5)
    assert found[0][0]["lr"] == 0.5


def test_steps_lower_the_loss_and_a_count_of_0_takes_none() -> None:
    batch, made = random_batch(0), worker(lr=50.0)
    silent = batch.with_columns(loss_mask=np.zeros(batch.tokens, bool))
    made.train(silent, LIKELIHOOD)
    assert not made.logits.any()
    made.train(batch, LIKELIHOOD)
    assert made.evaluate(batch, LIKELIHOOD)["loss"].number() < np.log(256)


def test_a_gradient_that_is_not_finite_ends_the_run_before_the_step() -> None:
    made = worker()
    with torch.no_grad():
        made.logits += torch.nan
    before = made.logits
    with pytest.raises(WhetError, match="lower the learning rate"):
        made.train(random_batch(0), LIKELIHOOD)
    assert made.logits is before


@frozen
class Other:
    """How a loss breaks its contract."""

    count: float = 1.0
    """The count of its term."""
    term: str = "likelihood"
    """The name of its term."""
    detached: bool = False
    """Whether the term has no gradient."""


class Broken(Likelihood):
    def counts(self, batch: Batch) -> Any:
        return {"likelihood": self.config.count}

    def __call__(self, outputs: Any, batch: Batch) -> LossResult:
        (term,) = super().__call__(outputs, batch).terms.values()
        return LossResult({self.config.term: term.detach() if self.config.detached else term})


@pytest.mark.parametrize(("settings", "words"), [
    ({"term": "other"}, "the loss Broken returned the terms other, and has weights of likelihood"),
    ({"detached": True}, "the term likelihood of the loss Broken has no gradient, so it trains nothing"),
])  # fmt: skip
def test_a_loss_that_would_train_nothing_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(WhetError, match=words):
        worker().train(random_batch(0), Spec(import_path(Broken), import_path(Other), settings))


def test_a_loss_that_counts_nothing_is_warned_of_and_its_sum_refused(caplog: Any) -> None:
    made, loss = worker(), Spec(import_path(Broken), import_path(Other), {"count": 0.0})
    made.train(random_batch(0), loss)
    (told,) = caplog.messages
    assert re.search(r"the loss Broken counts 0 in a batch with \d+ tokens to train on", told)
    with pytest.raises(WhetError, match=r"the term likelihood of the loss Broken is .* and its count is 0"):
        made.evaluate(random_batch(0), loss)


def test_outputs_are_0_where_nothing_is_learned() -> None:
    batch = random_batch(0)
    found = worker().score(batch, ("logprobs",), "policy")["logprobs"]
    assert not found[~batch["loss_mask"]].any()
    assert found[batch["loss_mask"]].all()


@pytest.mark.parametrize("k", [3, None])
def test_outputs_of_several_values_are_0_where_nothing_is_learned(k: int | None) -> None:
    batch, made = random_batch(0), worker()
    ids = torch.ones(batch.tokens, k or batch.tokens, dtype=torch.int32)  # as many values as tokens are no tokens
    made.outputs = lambda part, names: {"topk_ids": ids}  # type: ignore[method-assign]
    found = made.score(batch, ("topk_ids",), "policy")["topk_ids"]
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, np.repeat(batch["loss_mask"][:, None], ids.shape[1], 1))


def test_checkpoints_are_read_back_and_others_refused(tmp_path: Path) -> None:
    batch, made, again = random_batch(0), worker(), worker()
    made.train(batch, LIKELIHOOD)
    made.save(str(tmp_path / "checkpoint"))
    again.load(str(tmp_path / "checkpoint"))
    assert torch.equal(made.logits, again.logits)
    with pytest.raises(CheckpointError, match=r"missing cannot be loaded: .*logits\.json"):
        again.load(str(tmp_path / "missing"))


def test_weights_that_it_does_not_hold_are_refused() -> None:
    with pytest.raises(WhetError, match="holds no reference weights"):
        worker().score(random_batch(0), ("logprobs",), "reference")
