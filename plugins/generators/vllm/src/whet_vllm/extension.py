"""The part that runs in vLLM's own worker processes: receives a weight sync and loads it into vLLM's model.

vLLM imports this module in each worker process, as `worker_extension_cls`. Then vLLM makes the weight transfer with the
name `whet`, so this module registers that name on import. No method raises an error through vLLM: if one of several
workers raised, the results of the others would stay in the pipe for the next call. Errors are in a report instead.

    update_weights   check that every tensor is complete -> undo vLLM's packing of the layers -> load
    finish           pack the layers again -> report: the session, or the failure
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
from whet_vllm.arguments import BACKEND
from whet_weights.whole import EMBEDDING, HEAD, receive_whole, stored_shapes

log = logging.getLogger("vllm.whet")


@dataclass
class Nothing(WeightTransferInitInfo):  # type: ignore[misc]  # untyped for who has no vLLM
    """No settings: each weight sync brings its own."""


@dataclass
class Arrival(WeightTransferUpdateInfo):  # type: ignore[misc]  # untyped for who has no vLLM
    """One weight sync to receive."""

    spec: dict[str, Any] = field(default_factory=dict)
    """The fields of `whet.interfaces.weights.TransferSpec`."""
    receiver: int = 0
    """Index of this engine's first process among all receivers of weights."""


class Transfer(WeightTransferEngine[Nothing, Arrival]):  # type: ignore[misc]  # untyped for who has no vLLM
    """Receives weight syncs, one at a time."""

    init_info_cls, update_info_cls = Nothing, Arrival
    supports_draft_weight_update = False
    report: dict[str, Any]
    """The last weight sync: `session`, `tensors`, `failure` (a message), `spoilt` (the weights are a mixture)."""

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Do nothing: weight syncs share no state."""

    def start_weight_update(self) -> None:
        """Start a new report."""
        self.report = {"session": "", "tensors": 0, "failure": "no weights came", "spoilt": False}

    def receive_weights(self, update_info: Arrival) -> None:
        """Receive and load a whole weight sync, and write its report."""
        try:
            spec, share = TransferSpec(**update_info.spec), get_tensor_model_parallel_rank()
            count = self._take(spec, update_info.receiver + share)
            self.report.update(session=update_info.spec["session"], tensors=count, failure="")
        except Exception as error:
            log.exception("a weight sync failed")
            self.report["failure"] = in_words(error)

    def finish_weight_update(self) -> None:
        """Do nothing: `receive_weights` has loaded the weights."""

    def shutdown(self) -> None:
        """Do nothing: no resource is held."""

    def _take(self, spec: TransferSpec, receiver: int) -> int:
        """Load a whole weight sync. Returns the number of tensors."""
        config = self.model_config
        tied = bool(getattr(config.hf_text_config, "tie_word_embeddings", False))
        arriving = receive_whole(spec, receiver, stored_shapes(config.model), tied=tied)
        names: list[str] = []
        embeddings: dict[str, Any] = {}

        def noted() -> Iterator[tuple[str, Any]]:
            for name, tensor in arriving:
                names.append(name)
                if tied and name.endswith(EMBEDDING):
                    embeddings[name] = tensor
                yield name, tensor

        self.report["spoilt"] = True
        if self.device.type == "cpu":
            pack_experts_again(self.model)
        try:
            initialize_layerwise_reload(self.model)
            wanted = {name for name, _ in self.model.named_parameters()}
            taken = set(self.model.load_weights(noted()) or wanted)
            for _ in arriving:  # the rest, so that the end of the weight sync is checked
                pass
            if tied:
                taken |= self._load_tied_head(wanted - taken, embeddings)
        finally:  # also after an error: else the next weight sync would find half of this one
            finalize_layerwise_reload(self.model, config)
        if left := sorted(wanted - taken):
            raise WeightSyncError(f"vLLM's model took nothing for {', '.join(left[:5])}")
        self.report["spoilt"] = False
        return len(names)

    def _load_tied_head(self, left: set[str], embeddings: dict[str, Any]) -> set[str]:
        """Load a tied embedding into the separate output layer of Llama's shapes. Returns the names that were loaded.

        vLLM's loader skips the output layer, because it expects a shared tensor. During a layerwise reload the two are
        separate, so the output layer would keep its old values.
        """
        heads = [name for name in left if name.endswith(HEAD)]
        if len(heads) != 1 or len(embeddings) != 1:
            return set()
        parameter = self.model.get_parameter(heads[0])
        parameter.weight_loader(parameter, *embeddings.values())
        return set(heads)


def pack_experts_again(model: Any) -> None:
    """Make vLLM pack the experts of each layer for its kernel when the next weights are loaded.

    On a CPU it packs them only where there is no kernel yet, so a second load would leave the packed copy of the first
    weights in use. On a GPU the kernel must stay: recorded graphs hold its addresses, and it reads the weights in
    place.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


class WhetWorker:
    """Methods that this plugin adds to vLLM's workers."""

    weight_transfer_engine: Transfer

    def whet_report(self) -> dict[str, Any]:
        """Return the report of the last weight sync."""
        return self.weight_transfer_engine.report

    def whet_free_bytes(self) -> int:
        """Return the free memory of this process's GPU, in bytes."""
        from vllm.utils.mem_utils import MemorySnapshot

        return int(MemorySnapshot().free_memory)


if BACKEND not in WeightTransferEngineFactory._registry:  # it has no other way to ask
    WeightTransferEngineFactory.register_engine(BACKEND, Transfer)
