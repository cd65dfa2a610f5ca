"""What validation makes of several batches; the loop itself is watched in the tests of its algorithms."""

from types import SimpleNamespace

import numpy as np
import pytest

from whet.component import Spec
from whet.data.metrics import mean, plain
from whet_ops.algorithms.offline_loop import evaluate_all, offline_loop, sequences, trained_tokens
from whet_testing.fakes import FakeBackend
from whet_testing.steps import Watch, WatchedSteps


def test_the_validation_loss_is_the_mean_over_sequences_of_all_batches():
    class Uneven(FakeBackend):
        def evaluate(self, batch, loss):
            return {"loss": mean(float(batch.sequences)), "rewards/accuracies": mean(1.0, batch.sequences / 2)}

    batches = [SimpleNamespace(sequences=6), SimpleNamespace(sequences=2)]
    found = plain(evaluate_all(Uneven(), batches, Spec(""), sequences))
    assert found == pytest.approx({"loss": (36 + 4) / 8, "rewards/accuracies": 2 / 4})


def test_a_loss_that_is_no_mean_over_batches_is_corrected_over_all_batches_of_a_file_and_of_all_files():
    class Backend(FakeBackend):
        def evaluate(self, batch, loss):
            return {"loss": mean(9.0), "kind": mean(*batch.kind)}

    one, two, three = (SimpleNamespace(sequences=1, kind=kind) for kind in ((2.0, 1), (6.0, 3), (0.0, 4)))
    data = SimpleNamespace(validation=lambda size: {"one": [one, two], "two": [three]})
    logged, steps = [], WatchedSteps(Watch(), 0)
    steps.log_start = logged.append
    parts = SimpleNamespace(backend=Backend(), loss=Spec(""), steps=steps)
    offline_loop(
        parts, data, SimpleNamespace(batch_size=2, validate_every=0),
        over_all=lambda metrics: {**metrics, "loss": mean(metrics["kind"].number())},
        derive=lambda metrics: {**metrics, "twice": mean(2 * metrics["loss"].number())},
    )  # fmt: skip
    (found,) = logged
    wanted = {"validation/loss": 1.0, "validation/one/loss": 2.0, "validation/two/loss": 0.0}
    assert {name: found[name].number() for name in wanted} == wanted
    assert found["validation/twice"].number() == 2.0


def test_the_validation_loss_is_the_mean_over_trained_tokens_of_all_batches():
    class Backend(FakeBackend):
        def evaluate(self, batch, loss):
            return {"loss": mean(float(batch["value"][0]))}

    batches = [{"loss_mask": np.ones(30, bool), "value": [1.0]}, {"loss_mask": np.ones(10, bool), "value": [3.0]}]
    assert plain(evaluate_all(Backend(), batches, Spec(""), trained_tokens)) == pytest.approx({"loss": 1.5})
