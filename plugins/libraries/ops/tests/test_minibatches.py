"""What a minibatch is divided by, and which takes no step."""

from typing import Any

import numpy as np
import pytest

from whet.component import Spec
from whet.data.batch import from_sequences
from whet_ops.algorithms.config import MinibatchConfig
from whet_ops.algorithms.minibatches import train_minibatches
from whet_testing.fakes import FakeBackend


@pytest.mark.parametrize("count_over", ["minibatch", "batch"])
def test_a_minibatch_without_a_trained_token_takes_no_step(count_over: Any) -> None:
    rows = [{"tokens": range(2), "loss_mask": np.array([False, trained])} for trained in (True, False, True)]
    batch, backend = from_sequences(rows, prompt_lengths=[1] * 3), FakeBackend()
    config = MinibatchConfig(minibatches=3, count_over=count_over)
    assert len(list(train_minibatches(backend, batch, Spec("", "", {}), config, seed=0))) == 3
    assert backend.step == 2
