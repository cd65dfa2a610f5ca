"""A rank of the generator: holds weights, or borrows those of the backend, and runs the engine when it is called."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from whet.config.structure import structure
from whet.data.model_info import ModelInfo
from whet.data.records import Request
from whet.errors import ConfigError, WeightSyncError, WhetError
from whet.interfaces.weights import TransferSpec
from whet.interfaces.workers import WorkerRank
from whet_generation.stopping import StopStrings
from whet_megatron import groups, layers
from whet_megatron.config import FORM, MegatronConfig
from whet_megatron.cpu_shim import as_on_gpu
from whet_megatron.generator.config import VOCABULARY_MULTIPLE, MegatronGeneratorConfig
from whet_megatron.groups import Ranks
from whet_megatron.model import HeldModel
from whet_weights import lent
from whet_weights.offload import Offload
from whet_weights.transfer import receive


class Worker:
    """A rank of the generator. The driver calls the public methods by name, on every rank."""

    @as_on_gpu
    def __init__(
        self, rank: WorkerRank, config: Mapping[str, Any], model: ModelInfo, max_length: int, seed: int, scratch: str
    ) -> None:
        torch.set_num_threads(rank.threads)
        self._rank, self._info = rank, model
        self._config = structure(config, MegatronGeneratorConfig, None)
        self._lent: lent.Lent | None = None
        self._own: Ranks | None = None
        self._offload = Offload(Path(scratch) / "asleep" / f"{rank.role}-{rank.rank}")
        self._version, self._broken = 0, ""
        try:
            self._model, self._ranks = self._borrowed() if self._config.weights == "shared" else self._loaded(seed)
            self._engine = self._make_engine(max_length)
        except BaseException:  # of a role that shares its processes others must be able to start
            self._let_go()
            raise

    def _borrowed(self) -> tuple[HeldModel, Ranks]:
        """Return the backend's model."""
        self._lent = lent.borrow(FORM)
        model, found = self._lent.held
        if found.size != self._rank.size or found.sizes != self._config.parallel.sizes:
            wanted = f"{self._rank.size} ranks as {self._config.parallel}"
            raise ConfigError(
                f"{self._rank.role}.parallel: is for {wanted}, and the backend has {found.size} as {found.sizes}"
            )
        return model, found

    def _loaded(self, seed: int) -> tuple[HeldModel, Ranks]:
        """Load a model of its own."""
        parallel, chosen = self._config.parallel.sizes, self._config.layers
        layers.choose(chosen, torch.device(self._rank.device))  # before anything imports Megatron
        self._own = Ranks(self._rank, parallel)
        groups.seed(seed)
        config = MegatronConfig(parallel=parallel, layers=chosen, vocabulary_multiple=VOCABULARY_MULTIPLE)
        return HeldModel(self._info, config, self._own, seed, trained=False), self._own

    def _make_engine(self, max_length: int) -> Any:
        from whet_megatron.generator.engine import Engine

        if self._model.layers != "test":
            _refuse_without_flash_attention()
            if self._model.dtype == torch.float32:
                raise ConfigError("generator: flash-attn computes in bfloat16 alone; set model.dtype: bfloat16")
        config = self._config
        return Engine(
            self._model, self._ranks, StopStrings(self._info.path), max_batch=config.max_batch,
            cache_gib=config.cache_gib, prefill_tokens=config.prefill_tokens, max_length=max_length,
        )  # fmt: skip

    def place(self) -> dict[str, int]:
        """Return this rank's replica, and the room of its cache."""
        engine = self._engine
        return {"replica": self._ranks.coordinates.data, "blocks": engine.blocks, "block_tokens": engine.block_tokens}

    @as_on_gpu
    def step(self, requests: Sequence[Request], limits: Sequence[int], aborted: Sequence[str], steps: int) -> list[Any]:
        """Add requests, end others, and generate up to `steps` tokens of each. Return what happened, if it leads.

        All ranks of a replica must be called with equal arguments.
        """
        if self._broken:
            raise WeightSyncError(
                f"the generator has no weights to use, as the last weight sync failed: {self._broken}"
            )
        try:
            self._engine.add(list(zip(requests, limits, strict=True)))
            with self._model.using("policy" if self._lent is None else self._lent.weights):
                found = self._engine.abort(aborted) + self._engine.run(steps, self._version)
        except BaseException:
            self._engine.drop()
            raise
        return found if self._engine.leads else []

    @as_on_gpu
    def drop(self) -> None:
        """Forget all requests."""
        self._engine.drop()

    @as_on_gpu
    def receive_weights(self, spec: TransferSpec, version: int) -> None:
        """Take the weights of a weight sync. After a failed sync nothing is generated until a sync is complete."""
        self._broken = "it was not complete"
        try:
            self._take(spec)
        except Exception as error:
            self._broken = str(error)
            raise
        self._version, self._broken = version, ""

    def _take(self, spec: TransferSpec) -> None:
        if self._lent is not None:
            self._lent.taken(spec)
            return
        if spec.adapter is not None:
            raise WhetError("an adapter was sent alone, and this generator takes whole weights")
        from whet_megatron.generator.received import take

        self._offload.wake(contents=False)
        take(self._model.weights, self._model.architecture, receive(spec, self._rank.rank))

    @as_on_gpu
    def sleep(self) -> int:
        """Free the memory of the cache, and of own weights. Returns the number of bytes."""
        freed: int = self._engine.free()
        return freed if self._lent is not None else freed + self._offload.sleep(self._model.parameters())

    @as_on_gpu
    def wake(self) -> None:
        """Take the memory again."""
        self._offload.wake()
        self._engine.allocate()

    @as_on_gpu
    def close(self) -> None:
        """Leave the process groups, or give borrowed weights back."""
        self._offload.close()
        self._let_go()

    def _let_go(self) -> None:
        if self._lent is not None:
            self._lent.borrowed = False
        if self._own is not None:
            self._own.leave()


def _refuse_without_flash_attention() -> None:
    try:
        import flash_attn  # noqa: F401  # whether it loads is the question
    except ImportError as error:
        raise ConfigError(
            f"generator: Megatron's inference computes attention with flash-attn, which cannot be imported ({error}); "
            "install it for the CUDA of this machine with `pip install 'whet-megatron[flash]'`"
        ) from error
