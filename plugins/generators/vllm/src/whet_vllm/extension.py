"""What runs in vLLM's own worker processes: takes weights from a hand-over and puts them into vLLM's model.

vLLM imports this module in each of them, as `worker_extension_cls`, and then makes the transfer of the name `whet`: so
it registers that name when it is imported. Nothing here raises where vLLM would have to carry it: one worker of several
that raises leaves the answers of the others in the pipe, for the next call. What went wrong is in the report instead.

    update_weights   every tensor is there, unharmed and as wanted -> layers forget how vLLM packed them -> load
    finish           -> they are packed again -> report: the session, or why not
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from whet.errors import WeightSyncError, in_words
from whet.interfaces.weights import TransferSpec
from whet.weights.whole import EMBEDDING, HEAD, receive_whole, stored_shapes
from whet_vllm.arguments import BACKEND

log = logging.getLogger("vllm.whet")


@dataclass
class Nothing(WeightTransferInitInfo):  # type: ignore[misc]  # untyped for who has no vLLM
    """All that is to be known comes with each hand-over."""


@dataclass
class Arrival(WeightTransferUpdateInfo):  # type: ignore[misc]  # untyped for who has no vLLM
    """A hand-over to take, whole."""

    link: dict[str, Any] = field(default_factory=dict)
    """The fields of `whet.interfaces.weights.TransferSpec`."""
    receiver: int = 0
    """Number of the first of this engine's processes among all that take weights."""


class Transfer(WeightTransferEngine[Nothing, Arrival]):  # type: ignore[misc]  # untyped for who has no vLLM
    """Takes hand-overs, one at a time."""

    init_info_cls, update_info_cls = Nothing, Arrival
    supports_draft_weight_update = False
    report: dict[str, Any]
    """Of the last hand-over: `session`, `tensors`, `failure` in words; `spoilt`: whether it left a mixture behind."""

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Nothing is shared between hand-overs."""

    def start_weight_update(self) -> None:
        """Begin a report."""
        self.report = {"session": "", "tensors": 0, "failure": "no weights came", "spoilt": False}

    def receive_weights(self, update_info: Arrival) -> None:
        """Take all of a hand-over."""
        try:
            link, share = TransferSpec(**update_info.link), get_tensor_model_parallel_rank()
            count = self._take(link, update_info.receiver + share)
            self.report.update(session=update_info.link["session"], tensors=count, failure="")
        except Exception as error:
            log.exception("a hand-over of weights failed")
            self.report["failure"] = in_words(error)

    def finish_weight_update(self) -> None:
        """What was taken is in place already."""

    def shutdown(self) -> None:
        """Nothing is held."""

    def _take(self, link: TransferSpec, receiver: int) -> int:
        """Load a whole hand-over; give the number of tensors."""
        config = self.model_config
        tied = bool(getattr(config.hf_text_config, "tie_word_embeddings", False))
        arriving = receive_whole(link, receiver, stored_shapes(config.model), tied=tied)
        names: list[str] = []
        embeddings: dict[str, Any] = {}

        def noted() -> Iterator[tuple[str, Any]]:
            for name, tensor in arriving:
                names.append(name)
                if tied and name.endswith(EMBEDDING):
                    embeddings[name] = tensor
                yield name, tensor

        self.report["spoilt"] = True
        try:
            initialize_layerwise_reload(self.model)
            wanted = {name for name, _ in self.model.named_parameters()}
            taken = set(self.model.load_weights(noted()) or wanted)
            for _ in arriving:  # a loader that stops early would leave unsaid whether that was all
                pass
            if tied:
                taken |= self._load_tied_head(wanted - taken, embeddings)
        finally:  # also after an error: else the next hand-over would find half of this one
            finalize_layerwise_reload(self.model, config)
        if left := sorted(wanted - taken):
            raise WeightSyncError(f"vLLM's model took nothing for {', '.join(left[:5])}")
        self.report["spoilt"] = False
        return len(names)

    def _load_tied_head(self, left: set[str], embeddings: dict[str, Any]) -> set[str]:
        """Load the embedding into an output layer of its own, which Llama's shapes have although it is tied.

        vLLM leaves it out, for it has shared the tensor; once layers are apart it would stay as it was.
        """
        heads = [name for name in left if name.endswith(HEAD)]
        if len(heads) != 1 or len(embeddings) != 1:
            return set()
        parameter = self.model.get_parameter(heads[0])
        parameter.weight_loader(parameter, *embeddings.values())
        return set(heads)


class WhetWorker:
    """What vLLM's workers can be asked beside vLLM's own methods."""

    weight_transfer_engine: Transfer

    def whet_report(self) -> dict[str, Any]:
        """Say what became of the last hand-over."""
        return self.weight_transfer_engine.report

    def whet_free_bytes(self) -> int:
        """Say how much memory of this process's GPU is free."""
        from vllm.utils.mem_utils import MemorySnapshot

        return int(MemorySnapshot().free_memory)


if BACKEND not in WeightTransferEngineFactory._registry:  # it has no other way to ask
    WeightTransferEngineFactory.register_engine(BACKEND, Transfer)
