"""The rules of a backend that saves in the background; part of `BackendContract`."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from whet.component import Spec
from whet.interfaces.backend import Backend, SavesInBackground
from whet_testing.batches import random_batch

Fresh = Callable[..., Backend]
LIKELIHOOD = Spec("whet_testing.losses:Likelihood")


class SavingRules:
    """Rules for a contract that has the fixture `fresh`."""

    def test_a_save_in_the_background_holds_what_there_was_when_it_was_taken(
        self, fresh: Fresh, tmp_path: Path
    ) -> None:
        backend, again = fresh(), fresh()
        if not isinstance(backend, SavesInBackground):
            pytest.skip("this backend does not save in the background")
        losses, scores = [], []
        backend.train(random_batch(0), LIKELIHOOD)
        pending = backend.save_in_background(tmp_path / "checkpoint")
        pending.taken()
        for one in (backend, again):
            if one is again:
                pending.result()
                again.load(tmp_path / "checkpoint")
            losses.append(one.train(random_batch(1), LIKELIHOOD)["loss"])
            scores.append(one.score(random_batch(1), ("logprobs",))["logprobs"])
            one.sleep()
        assert losses[0] == losses[1]
        assert np.array_equal(scores[0], scores[1])
