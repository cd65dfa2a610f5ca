"""What validation makes of several batches; the loop itself is watched in the tests of its algorithms."""

from types import SimpleNamespace

import numpy as np
import pytest

from whet.component import Spec
from whet.data.metrics import mean, plain
from whet_ops.algorithms.offline_loop import evaluate_all, sequences, trained_tokens
from whet_testing.fakes import FakeBackend


def test_the_validation_loss_is_the_mean_over_sequences_of_all_batches():
    class Uneven(FakeBackend):
        def evaluate(self, batch, loss):
            return {"loss": mean(float(batch.sequences)), "rewards/accuracies": mean(1.0, batch.sequences / 2)}

    batches = [SimpleNamespace(sequences=6), SimpleNamespace(sequences=2)]
    found = plain(evaluate_all(Uneven(), batches, Spec(""), sequences))
    assert found == pytest.approx({"loss": (36 + 4) / 8, "rewards/accuracies": 2 / 4})


def test_the_validation_loss_is_the_mean_over_trained_tokens_of_all_batches():
    class Backend(FakeBackend):
        def evaluate(self, batch, loss):
            return {"loss": mean(float(batch["value"][0]))}

    batches = [{"loss_mask": np.ones(30, bool), "value": [1.0]}, {"loss_mask": np.ones(10, bool), "value": [3.0]}]
    assert plain(evaluate_all(Backend(), batches, Spec(""), trained_tokens)) == pytest.approx({"loss": 1.5})
