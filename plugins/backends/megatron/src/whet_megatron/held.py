"""What a rank holds: its share of the models and of the optimizer, and all that is done with it but computing.

load the model  ->  send weights, save, load, export, sleep, wake
"""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet.config.structure import structure
from whet.data.files import disk_errors
from whet.data.model_info import ModelInfo, write_chat_template
from whet.errors import WhetError
from whet.interfaces.axes import RankCoordinates
from whet.interfaces.loss import Loss
from whet.interfaces.weights import IN_PLACE, TransferSpec
from whet.interfaces.workers import WorkerRank
from whet_megatron import checkpoint, groups, layers
from whet_megatron.config import FORM, MegatronConfig
from whet_megatron.cpu_shim import as_on_gpu
from whet_megatron.export import write_config
from whet_megatron.feed import Feeder
from whet_megatron.fp8 import refuse_device
from whet_megatron.groups import Ranks
from whet_megatron.model import HeldModel
from whet_megatron.optimizer import Stepper
from whet_megatron.passes import Head, Passes
from whet_megatron.saving import Planned
from whet_memory.measure import PeakMeter
from whet_ops.logprobs import LogitRule
from whet_training import adapter_files
from whet_training.export import copy_companions, join_parts, write_part
from whet_training.heads import read_teacher
from whet_training.lora_config import computed
from whet_training.saving import Writer
from whet_weights import lent
from whet_weights.offload import Offload


class HeldModels:
    """The models and the optimizer of one rank."""

    @as_on_gpu
    def __init__(
        self,
        rank: WorkerRank,
        config: Mapping[str, Any],
        model: ModelInfo,
        total_steps: int = 0,
        seed: int = 0,
        trained: bool = True,
        *,
        scratch: str,
    ) -> None:
        torch.set_num_threads(rank.threads)
        self._config = structure(config, MegatronConfig, None)
        self._info, self._trained = model, trained
        layers.choose(self._config.layers, torch.device(rank.device))  # before anything imports Megatron
        if self._config.fp8:
            refuse_device(self._config.fp8, layers.capability(torch.device(rank.device)))
        self._ranks = Ranks(rank, self._config.parallel)
        self._device = self._ranks.device
        try:
            self._build(rank, model, total_steps, seed, trained)
        except BaseException:  # of a role that shares its processes others must be able to start
            self._ranks.leave()
            raise
        asleep = Path(scratch) / "asleep"
        self._offload = Offload(asleep / f"{rank.role}-{rank.rank}")
        self._policy_offload = Offload(asleep / f"{rank.role}-{rank.rank}-policy")
        self._lent = lent.Lent(FORM, (self._model, self._ranks), self._policy_offload.wake)
        if rank.role == "backend" and not self._model.value:
            lent.offer(self._lent)
        self._writer = Writer(self._ranks)
        self._planned: Planned | None = None
        self._losses: dict[str, Loss] = {}
        self._nonfinite = 0
        self._asleep = False

    def _build(self, rank: WorkerRank, model: ModelInfo, total_steps: int, seed: int, trained: bool) -> None:
        """Load the models, and make what computes with them."""
        groups.seed(seed)
        self._memory = PeakMeter(self._device, rank.role)
        with self._memory.phase("loading"):
            begin = self._config.load
            lora = computed(self._config.lora, trained)
            self._model = HeldModel(model, self._config, self._ranks, seed, trained=trained, lora=lora, begin=begin)
        self._frozen: dict[str, HeldModel] = {}
        if self._config.reference and self._model.adapters is None:
            self._frozen["reference"] = HeldModel(model, self._config, self._ranks, seed, trained=False, begin=begin)
        if self._config.teacher and not self._model.value:
            self._frozen["teacher"] = HeldModel(
                read_teacher(self._config.teacher, model), self._config, self._ranks, seed, trained=False
            )
        self._stepper: Stepper | None = Stepper(self._model, self._config, total_steps) if trained else None
        arch, config = self._model.architecture, self._config
        self._feeder = Feeder(
            config.parallel, config.layout, self._device, self._ranks.group("context"), self._ranks.coordinates,
            experts=(arch.layers, arch.experts_per_token) if arch.experts else None,
            multiple=config.fp8.multiple if config.fp8 else 1,
        )  # fmt: skip
        if self._ranks.rank == 0:
            print(f"megatron: the layers are {self._model.layers}", flush=True)

    def _passes(self, model: HeldModel) -> Passes:
        rule = LogitRule(float32=self._config.head_dtype == "float32")
        return Passes(Head(model, self._config.logprob_chunk, rule), self._device)

    def coordinates(self) -> RankCoordinates:
        """Return this rank's coordinates. Ranks with the same `data` work on one batch shard."""
        return self._ranks.coordinates

    @property
    def _first(self) -> bool:
        """Return whether this rank reports what is equal on all ranks."""
        return self._ranks.reports and self._ranks.coordinates.data == 0

    def _steps(self) -> Stepper:
        if self._stepper is None:
            raise WhetError("this model is frozen: nobody said that it would be trained")
        return self._stepper

    # Weights

    @as_on_gpu
    def send_weights(self, spec: TransferSpec) -> None:
        """Send this rank's part of the weights under the names of the model folder. An adapter alone: rank 0 sends it.

        In place nothing is sent: the generator of this process computes with the same memory.
        """
        if spec.transport == IN_PLACE:
            self._lent.sent(spec)
            return
        adapters = self._model.adapters
        if spec.adapter is not None and adapters is None:
            raise WhetError("an adapter is to be sent, and there is none; set backend.lora")
        dtype = getattr(torch, spec.dtype) if spec.dtype else None
        with self._memory.phase("weight_sync"), self._model.using(spec.weights):
            if spec.adapter is not None and adapters is not None:
                sender = None if self._ranks.rank else 0
                stream: Iterator[tuple[str, Tensor]] = ((name, one.to(dtype)) for name, one in adapters.stored())
            else:
                sender = self._ranks.grid.sender(self._ranks.rank)
                stream = self._model.weights.sent(dtype)
            if sender is None:
                _exhaust(stream)
                return
            from whet_weights.transfer import send

            send(spec, stream, sender)

    @as_on_gpu
    def save(self, folder: str) -> None:
        """Write weights, optimizer and schedule, durably. Every rank writes what it holds."""
        self._write_adapter(folder)
        checkpoint.write(Path(folder), self._model, self._steps(), self._ranks)

    @as_on_gpu
    def take(self, folder: str) -> None:
        """Copy what this rank saves to host memory, and begin to write the copy. Every rank must take part."""
        self._write_adapter(folder)
        self._planned = checkpoint.planned(Path(folder), self._model, self._steps())
        shared = self._planned.shared_with([*self._model.parameters(), *self._held(), *self._gradients()])
        self._writer.take(shared, sum(tensor.nbytes for _, tensor in shared), self._planned.write)

    async def written(self) -> Any:
        """Wait until the files of the last `take` are durable. Return where everything is in them."""
        return await self._writer.written()

    async def complete(self, written: list[Any]) -> None:
        """Write the index of the last `take`, from what `written` returned on all ranks. Rank 0 does so."""
        if self._ranks.rank == 0 and self._planned is not None:
            await asyncio.to_thread(self._planned.complete, written)
        self._planned = None

    @as_on_gpu
    def load(self, folder: str) -> int:
        """Load a checkpoint that `save` wrote, on any number of ranks and with any parallelism. Returns its optimizer
        steps.
        """
        checkpoint.read(Path(folder), self._model, stepper := self._steps())
        return stepper.steps

    def _write_adapter(self, folder: str) -> None:
        """Write the adapter in PEFT's format, if one is trained. Every rank must take part."""
        if (adapters := self._model.adapters) is not None:
            if self._ranks.rank == 0:
                tensors, model = dict(adapters.stored()), self._info.path
                adapter_files.write(Path(folder), tensors, adapters.peft_config(model), self._model.base)
            else:
                for _ in adapters.stored():
                    pass

    @as_on_gpu
    def export(self, folder: str) -> None:
        """Write a model folder that `transformers` can load, with the weights that the forward pass uses.

        With `lora.export: adapter`: a folder that PEFT can load.
        """
        if self._model.adapters is not None and self._config.lora is not None and self._config.lora.export == "adapter":
            self._write_adapter(folder)
            self._ranks.sum_all([0.0])
            return
        sender, stream = self._ranks.grid.sender(self._ranks.rank), self._model.weights.sent()
        if self._ranks.rank == 0:
            with disk_errors(Path(folder)):
                copy_companions(Path(self._info.path), Path(folder))
                write_chat_template(self._info, folder)
                write_config(self._info, Path(folder), value=self._model.value)
        self._ranks.sum_all([0.0])
        if sender is None:
            _exhaust(stream)
        else:
            with disk_errors(Path(folder)):
                write_part(Path(folder), stream, sender)
        self._ranks.sum_all([0.0])
        if self._ranks.rank == 0:
            with disk_errors(Path(folder)):
                join_parts(Path(folder))
        self._ranks.sum_all([0.0])

    # Life

    def sleep(self, weights: bool = True) -> int:
        """Free the memory of the optimizer and of further models, and with `weights` also that of the weights that are
        sent, unless they are borrowed. Returns the number of bytes.
        """
        self._asleep = True
        freed = sum(_free(gradients) for gradients in self._gradients())
        for model in (*self._frozen.values(), *(() if self._lent.borrowed else (self._model,))):
            _forget_quantised(model)
        # The optimizer's float32 weights may be the policy's own.
        policy = {parameter.untyped_storage().data_ptr() for parameter in self._model.parameters()}
        freed += self._offload.sleep(one for one in self._held() if one.untyped_storage().data_ptr() not in policy)
        if not weights or self._lent.borrowed:
            return freed
        return freed + self._policy_offload.sleep(self._model.parameters())

    def wake(self) -> None:
        """Bring weights and optimizer back. Gradients are zero."""
        if not self._asleep:
            return
        self._offload.wake()
        self._policy_offload.wake()
        for gradients in self._gradients():
            gradients.untyped_storage().resize_(gradients.numel() * gradients.element_size())
            gradients.zero_()
        self._asleep = False

    def _gradients(self) -> Iterator[Tensor]:
        """Yield the buffers of gradients."""
        for stage in self._model.chunks if self._trained else ():
            for buffer in (*stage.buffers, *stage.expert_parallel_buffers):
                yield buffer.grad_data

    def _held(self) -> Iterator[Tensor]:
        """Yield the tensors of frozen models and of the optimizer."""
        for model in self._frozen.values():
            yield from model.parameters()
        if self._stepper is not None:
            yield from self._stepper.held()

    @as_on_gpu
    def close(self) -> None:
        """Leave the process groups."""
        lent.withdraw(self._lent)
        self._offload.close()
        self._policy_offload.close()
        self._ranks.leave()


def _exhaust(stream: Iterator[Any]) -> None:
    """Iterate to the end: other ranks gather what this one holds a part of."""
    for _ in stream:
        pass


def _forget_quantised(model: HeldModel) -> None:
    """Free the copies in FP8 that Transformer Engine keeps of weights from one pass to the next. The next pass makes
    them anew.
    """
    for chunk in model.chunks:
        for module in chunk.modules():
            if kept := getattr(module, "_fp8_workspaces", None):
                kept.clear()


def _free(tensor: Tensor) -> int:
    """Free the memory of a tensor, and return its number of bytes."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    return size
