"""The rules of a backend that frees its memory for a while and goes on later; part of `BackendContract`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whet.component import BackendFacts, Spec
from whet.data.batch import Batch
from whet.errors import WhetError
from whet.interfaces.backend import Backend
from whet.interfaces.weights import TransferSpec
from whet.interfaces.workers import RoleContext
from whet_start.small_models import make_model
from whet_testing.batches import random_batch
from whet_testing.contracts.placed import Placed, on_gpu

Fresh = Callable[..., Backend]
LIKELIHOOD = Spec("whet_testing.losses:Likelihood")


class SleepRules(Placed):
    """Rules for a contract that has the fixtures `fresh` and `backend`."""

    def make(self, context: RoleContext) -> Backend:
        """Build the backend under test."""
        raise NotImplementedError("override `make` to build the backend")

    def facts(self) -> BackendFacts | None:
        """Return the facts of the backend that `make` builds. None skips the comparison."""
        return None

    def test_after_sleep_and_wake_it_goes_on_as_before(self, backend: Backend) -> None:
        batch = random_batch(0)
        before = backend.score(batch, ("logprobs",))["logprobs"]
        backend.sleep()
        backend.wake()
        assert np.array_equal(backend.score(batch, ("logprobs",))["logprobs"], before)

    def test_asleep_it_refuses_work_and_woken_it_trains_as_if_it_had_not_slept(
        self, fresh: Fresh, tmp_path: Path
    ) -> None:
        batch, losses = random_batch(0), []
        for sleeps in (False, True):
            backend = fresh()
            backend.train(batch, LIKELIHOOD)
            if sleeps:
                _sleep_twice(backend)
                for work in _works(backend, batch, tmp_path):
                    with pytest.raises(WhetError, match="sleep"):
                        work()
                backend.wake()
                backend.wake()
            losses.append([_loss_of_a_step(backend, batch), _loss(backend, batch)])
        assert losses[0] == losses[1]

    def test_what_it_gives_back_asleep_is_told_in_bytes(self, backend: Backend) -> None:
        backend.train(random_batch(0), LIKELIHOOD)
        first, second = _sleep_twice(backend)
        assert first is None or first > 0
        assert not second
        backend.wake()
        assert _loss(backend, random_batch(0)) > 0

    @pytest.mark.gpu
    def test_on_a_gpu_its_memory_is_free_for_others_while_it_sleeps(self, tmp_path: Path, tiny_tokenizer: Any) -> None:
        import torch

        self.need_one_gpu()
        folder = make_model(tmp_path / "model", tiny_tokenizer, hidden=512, layers=4)
        weights, batch = sum(file.stat().st_size for file in folder.glob("*.safetensors")), random_batch(0)
        backend = self.make(self.context(tmp_path / "run", "backend", folder, on_gpu))
        try:
            backend.train(batch, LIKELIHOOD)
            before = backend.score(batch, ("logprobs",))["logprobs"]
            free = torch.cuda.mem_get_info()[0]
            backend.sleep()
            assert torch.cuda.mem_get_info()[0] - free > 2.5 * weights, "weights and two moments"
            backend.wake()
            assert np.array_equal(backend.score(batch, ("logprobs",))["logprobs"], before)
            assert np.isfinite(_loss_of_a_step(backend, batch))
        finally:
            backend.close()


def _works(backend: Backend, batch: Batch, folder: Path) -> list[Callable[[], Any]]:
    """Return a function for each kind of work of a backend."""
    spec = TransferSpec("disk", str(folder), "session", 1)
    return [
        lambda: backend.train(batch, LIKELIHOOD),
        lambda: backend.evaluate(batch, LIKELIHOOD),
        lambda: backend.score(batch, ("logprobs",)),
        lambda: backend.send_weights(spec).result(),
        lambda: backend.save(folder / "checkpoint").result(),
        lambda: backend.load(folder / "checkpoint"),
        lambda: backend.export(folder / "export"),
    ]


def _sleep_twice(backend: Backend) -> list[int | None]:
    return [backend.sleep(), backend.sleep()]


def _loss_of_a_step(backend: Backend, batch: Batch) -> float:
    return backend.train(batch, LIKELIHOOD)["loss"].number()


def _loss(backend: Backend, batch: Batch) -> float:
    return backend.evaluate(batch, LIKELIHOOD)["loss"].number()
