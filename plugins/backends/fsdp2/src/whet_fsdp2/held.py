"""The share of the models and of the optimizer that a rank holds, and everything done with it except computing.

load the model  ->  send weights, save, load, export, sleep, wake
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from whet.config.structure import structure
from whet.data.files import disk_errors
from whet.data.model_info import ModelInfo, write_chat_template
from whet.errors import ConfigError, WhetError
from whet.interfaces.axes import RankCoordinates
from whet.interfaces.loss import Loss
from whet.interfaces.weights import IN_PLACE, TransferSpec
from whet.interfaces.workers import WorkerRank
from whet_fsdp2 import attention, checkpoint
from whet_fsdp2.config import Fsdp2Config
from whet_fsdp2.experts import Experts
from whet_fsdp2.feed import widths
from whet_fsdp2.kernels import refuse_unfit
from whet_fsdp2.lending import lend
from whet_fsdp2.loading import load_model, prepare, quiet
from whet_fsdp2.lora import Adapters, AdapterWeights
from whet_fsdp2.optimizer import Stepper
from whet_fsdp2.ranks import Ranks
from whet_fsdp2.root import AnyRoot, Root, ValueRoot
from whet_fsdp2.sharding import local, reshard
from whet_fsdp2.weights import PolicyWeights, persistent_buffers
from whet_memory.measure import PeakMeter
from whet_ops.rotary import longest_alone
from whet_training import adapter_files
from whet_training.export import copy_companions, set_padding, write_weights
from whet_training.heads import read_teacher
from whet_training.layout import Layout
from whet_training.lora import has_head
from whet_training.lora_config import LoraConfig, computed
from whet_training.saving import Writer
from whet_weights import lent
from whet_weights.offload import Offload
from whet_weights.stored_names import StoredNames

P = ParamSpec("P")
T = TypeVar("T")
H = TypeVar("H", bound="HeldModels")


def leaving_room(method: Callable[Concatenate[H, P], T]) -> Callable[Concatenate[H, P], T]:
    """Wrap a method so that it frees memory that only it needs when it ends. See `HeldModels.let_go`."""

    @wraps(method)
    def call(self: H, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        finally:
            self.let_go()

    return call


class HeldModels:
    """The models and the optimizer of one rank."""

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
        self._config = structure(config, Fsdp2Config, None)
        self._info = model
        self._ranks = Ranks(rank, self._config.parallel)
        self._device = self._ranks.device
        self._memory = PeakMeter(self._device, rank.role)
        self._low = model.dtype == "bfloat16"
        attention.register()
        self._seed, self._trained = seed, trained
        self._widths = widths(self._config)
        self._experts: Experts | None = None
        self._adapters: Adapters | None = None
        with self._memory.phase("loading"):
            self._root, self._layout = self._build(model, trained, computed(self._config.lora, trained))
            self._memory.count_mapped(map(local, self._root.model.parameters()))
        self._stored = StoredNames(self._root.model)
        copied = self._low and trained and self._ranks.grid.averaged == 1
        compute = torch.bfloat16 if self._low else torch.float32
        self._weights = (
            AdapterWeights(self._root, self._adapters, rank.size, self._ranks.grid.averaged) if self._adapters
            else PolicyWeights(self._root, copied, rank.size, compute)
        )  # fmt: skip
        self._frozen: dict[str, AnyRoot] = {}
        if self._config.reference and self._adapters is None:
            self._frozen["reference"], _ = self._build(model, trained=False)
        if self._config.teacher and isinstance(self._root, Root):
            info = read_teacher(self._config.teacher, model)
            teacher, layout = self._build(info, trained=False)
            assert isinstance(teacher, Root)
            if layout != self._layout:
                words = f"{info.path} can only be laid out as {layout}, the model that is trained is {self._layout}"
                raise ConfigError(f"backend.teacher: {words}; set backend.layout: padded")
            self._frozen["teacher"] = teacher
            self._root.teacher = (teacher,)
        limits = (longest_alone(root.model) for root in (self._root, *self._frozen.values()))
        self._longest_alone = min((limit for limit in limits if limit), default=None)
        self._stepper = Stepper(
            self._weights, self._config.optimizer, self._config.schedule, total_steps,
            offload=self._config.offload_optimizer and trained,
        )  # fmt: skip
        self._writer = Writer(self._ranks)
        asleep = Path(scratch) / "asleep"
        self._offload = Offload(asleep / f"{rank.role}-{rank.rank}")
        self._policy_offload = Offload(asleep / f"{rank.role}-{rank.rank}-policy")
        self._lent: lent.Lent | None = None
        if rank.role == "backend" and rank.size == 1 and isinstance(self._root, Root):
            self._lent = lend(self._root.model, self._adapters, self._policy_offload.wake)
        self._losses: dict[str, Loss] = {}
        self._nonfinite = 0
        # An optimizer step makes the pages of trained weights memory of this process; frozen ones stay in the file.
        self._memory.count_mapped(local(one) for one in self._parameters() if not one.requires_grad)

    def _build(self, info: ModelInfo, trained: bool, lora: LoraConfig | None = None) -> tuple[AnyRoot, Layout]:
        config, ranks = self._config, self._ranks
        refuse_unfit(config.kernels, self._device.type, config.parallel.tensor)
        # Only weights that are trained have float32 masters.
        mastered = (trained and lora is None) or not self._low
        model = load_model(
            info, config.head, self._seed, dtype=torch.float32 if mastered else torch.bfloat16, ranks=ranks,
            reshard_after_forward=config.reshard_after_forward, low_precision=self._low and mastered,
            draws=self._trained or has_head(lora),
        )  # fmt: skip
        if ranks.size == 1:
            model.to(self._device)
        if lora is not None:
            self._adapters = Adapters(model, lora, self._seed, config.head)
            self._adapters.to(self._device)
            self._base = adapter_files.base_digest(Path(info.path))
        if not trained:
            model.requires_grad_(False)
        adapted = self._adapters.only_called() if lora is not None and self._adapters is not None else nullcontext()
        with adapted:
            root, layout = prepare(
                model, config.layout, config.logprob_chunk, config.head, ranks.context, config.kernels,
                compiled=config.compile, checkpointing=trained and config.gradient_checkpointing,
                float32_head=config.head_dtype == "float32",
            )  # fmt: skip
        if self._experts is None:  # the first model that is built is the policy
            self._experts = Experts(root, config.experts, ranks, layout)
        reshard(model)
        return root, layout

    def coordinates(self) -> RankCoordinates:
        """Return this rank's coordinates. Ranks with the same `data` work on one batch shard."""
        return self._ranks.coordinates

    @property
    def _first(self) -> bool:
        return self._ranks.rank == 0

    def _using(self, weights: str) -> AbstractContextManager[None]:
        return nullcontext() if self._adapters is None else self._adapters.using(weights)

    # Weights

    def send_weights(self, spec: TransferSpec) -> None:
        """Send the weights that the forward pass uses, under the names of the model folder, or an adapter alone.

        All ranks gather; rank 0 sends, or with cuda-ipc every rank.
        """
        with self._memory.phase("weight_sync"), self._using(spec.weights):
            self._send(spec)

    def _send(self, spec: TransferSpec) -> None:
        if spec.transport == IN_PLACE:
            if self._lent is None:
                raise WhetError("weights of several ranks, or with a value head, are not lent; send them another way")
            self._lent.sent(spec)
            return
        if spec.adapter is not None and self._adapters is None:
            raise WhetError("an adapter is to be sent, and there is none; set backend.lora")
        reshard(self._root.model)
        alone = None if spec.adapter is None else self._adapters
        stream = self._stored.stored(self._weights.computing()) if alone is None else alone.stored()
        if not self._first and spec.transport != "cuda-ipc":
            for _ in stream:
                pass
            return
        from whet_weights.transfer import send

        dtype = getattr(torch, spec.dtype) if spec.dtype else None
        cast = ((name, tensor.to(dtype if tensor.is_floating_point() else None)) for name, tensor in stream)
        send(spec, cast if dtype else stream, sender=self._ranks.rank if spec.senders > 1 else 0)

    def save(self, folder: str) -> None:
        """Write weights, optimizer and schedule, durably. Every rank writes what it holds."""
        self._write_adapter(folder)
        checkpoint.write(Path(folder), self._saved(), extra=self._described(), rank=self._ranks.rank)
        self._ranks.sum([0.0])

    def take(self, folder: str) -> None:
        """Copy what this rank saves to host memory, and begin to write the copy. An adapter is small: it is written.

        All ranks must take part.
        """
        self._write_adapter(folder)
        size = sum(part.nbytes for _, part in self._saved_of_model()) + self._stepper.bytes_of_parts(self._ranks.rank)
        write = partial(checkpoint.write, Path(folder), extra=self._described(), rank=self._ranks.rank)
        self._writer.take(self._saved(), size, write)

    async def written(self) -> None:
        """Wait until the files of the last `take` are durable."""
        await self._writer.written()

    def _write_adapter(self, folder: str) -> None:
        if self._adapters is not None and self._first:
            adapters, model = self._adapters, self._info.path
            adapter_files.write(Path(folder), dict(adapters.stored()), adapters.peft_config(model), self._base)

    def _described(self) -> dict[str, Any]:
        return {
            "backend": "fsdp2",
            "ranks": self._ranks.size,
            "architecture": self._info.architecture,
            "optimizer": self._config.optimizer.kind,
            "optimizer_steps": self._stepper.steps,
            "steps": self._stepper.taken(),
        }

    def _saved(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parts that this rank writes."""
        yield from self._saved_of_model()
        yield from self._stepper.parts(self._ranks.rank)

    def _saved_of_model(self) -> Iterator[tuple[str, Tensor]]:
        for kind, tensors in self._state().items():
            for name, tensor in tensors:
                if kind != "weights" or name not in self._stepper.masters_away:
                    yield from checkpoint.parts(f"{kind}/{name}", tensor, self._ranks.rank)

    def _state(self) -> dict[str, list[tuple[str, Tensor]]]:
        if self._adapters is not None:  # they are in PEFT's format, and the model is not saved
            return {"weights": []}
        buffers = list(persistent_buffers(self._root.model))
        return {"weights": list(self._weights.masters.items()), "buffers": buffers}

    @torch.no_grad()
    @leaving_room
    def load(self, folder: str) -> int:
        """Load a checkpoint that `save` wrote, on any number of ranks and with any parallelism. Returns its optimizer
        steps.
        """
        reshard(self._root.model)
        saved = checkpoint.Saved(Path(folder))
        saved.refuse_others({f"weights/{name}": master.shape for name, master in self._state()["weights"]})
        self._stepper.refuse_others(saved)
        if self._adapters is not None:
            info = self._adapters.info
            adapter_files.read(Path(folder), self._adapters.put, info, self._info.path, self._base)
        away = self._stepper.masters_away
        for kind, tensors in self._state().items():
            saved.read_into((f"{kind}/{n}", tensor) for n, tensor in tensors if kind != "weights" or n not in away)
        self._weights.push(self._weights.copied - away)
        self._stepper.load(saved)
        return self._stepper.steps

    def export(self, folder: str) -> None:
        """Write a model folder that `transformers` can load, with the weights that the forward pass uses.

        With `lora.export: adapter`: a folder that PEFT can load.
        """
        if self._config.lora is not None and self._config.lora.export == "adapter" and self._adapters is not None:
            self._write_adapter(folder)
            self._ranks.sum([0.0])
            return
        reshard(self._root.model)
        weights = self._stored.stored(self._weights.computing())
        if not self._first:
            for _ in weights:  # every rank takes part in the gathering
                pass
        else:
            with disk_errors(Path(folder)), quiet():
                copy_companions(Path(self._info.path), Path(folder))
                write_chat_template(self._info, folder)
                if isinstance(self._root, ValueRoot):
                    set_padding(self._root.model.config, Path(folder))
                dtype = torch.bfloat16 if self._low else torch.float32
                write_weights(Path(folder), weights)
                _write_config(self._root.model, Path(folder), dtype)
        self._ranks.sum([0.0])

    # Life

    def sleep(self, weights: bool = True) -> int:
        """Free the memory of the optimizer and of further models, and with `weights` also that of the weights that are
        sent, unless they are borrowed. Returns the number of bytes.
        """
        self._weights.drop_gradients()
        sent = {one.untyped_storage().data_ptr(): one for one in self._sent()}
        freed = self._offload.sleep(one for one in self._held() if one.untyped_storage().data_ptr() not in sent)
        if not weights or (self._lent is not None and self._lent.borrowed):
            return freed
        return freed + self._policy_offload.sleep(sent.values())

    def wake(self) -> None:
        """Bring weights and optimizer back."""
        self._offload.wake()
        self._policy_offload.wake()
        # What was read back lies in memory of this process.
        self._memory.count_mapped(self._lendable() if self._lent is not None and self._lent.borrowed else ())

    def let_go(self) -> None:
        """Free what only a pass needs: gathered weights of frozen models, which no backward pass frees.

        Where roles take turns on the GPU, all gathered weights and cached GPU memory: the other role needs it during a
        weight sync.
        """
        for root in self._frozen.values():
            reshard(root.model)
        if not self._trained:
            reshard(self._root.model)
        if self._offload.used and self._device.type == "cuda":
            for root in (self._root, *self._frozen.values()):
                reshard(root.model)
            torch.cuda.empty_cache()

    def _parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all models, each rank's shards of them."""
        for root in (self._root, *self._frozen.values()):
            reshard(root.model)
            yield from root.model.parameters()

    def _sent(self) -> Iterator[Tensor]:
        """Yield what `send_weights` reads on this rank: the weights that compute, and an adapter."""
        reshard(self._root.model)
        yield from map(local, self._root.model.parameters())
        yield from map(local, self._weights.masters.values() if self._adapters is not None else ())

    def _lendable(self) -> list[Tensor]:
        """Return the weights with which a generator of this process can compute."""
        return list(self._lent.held.named.values()) if self._lent is not None else []

    def _held(self) -> Iterator[Tensor]:
        yield from map(local, self._parameters())
        yield from map(local, self._weights.masters.values())
        yield from self._stepper.held()

    def close(self) -> None:
        """Leave the process group."""
        if self._lent is not None:
            lent.withdraw(self._lent)
        self._offload.close()
        self._policy_offload.close()
        self._ranks.leave()


def _write_config(model: Any, folder: Path, dtype: Any) -> None:
    """Write the config and the generation config of a model, as one process would load it."""
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    head = model.get_output_embeddings() if getattr(config, "tie_word_embeddings", False) else None
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        config.tie_word_embeddings = False  # the files had a head of its own, which `transformers` loads all the same
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    if hasattr(config, "distributed_config"):
        del config.distributed_config
    config.save_pretrained(folder)
    if model.can_generate() and not (folder / "generation_config.json").exists():
        model.generation_config.save_pretrained(folder)
