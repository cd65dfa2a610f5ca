"""A rank of the backend: holds its share of the model, and computes losses, gradients and scores.

One call of `train`:

    counts of the loss  -> summed over ranks, before anything else
    live sequences      -> sequences that cannot change the loss are left out of the forward pass
    micro-batches       -> whole units, up to a budget of tokens; every rank runs the same number of micro-batches
        forward         -> logprobs -> loss -> weight x sum / global count -> backward
    gradient norm       -> over all ranks; if it is not finite, no step is taken
    clip, AdamW or Muon
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from whet.component import Spec
from whet.config.structure import structure
from whet.data import metrics
from whet.data.batch import Batch
from whet.data.files import disk_errors, use_umask
from whet.data.metrics import Metric
from whet.data.model_info import ModelInfo, locate, read_model, write_chat_template
from whet.errors import ConfigError, WhetError
from whet.interfaces.axes import RankCoordinates
from whet.interfaces.loss import Loss
from whet.interfaces.weights import TransferSpec
from whet.interfaces.workers import WorkerRank
from whet_fsdp2 import adapter_files, attention, checkpoint
from whet_fsdp2.config import Fsdp2Config
from whet_fsdp2.config import outputs as known_outputs
from whet_fsdp2.export import copy_companions, set_padding
from whet_fsdp2.feed import AnyRoot, Feed, Root, ValueRoot, feed, nothing, spread
from whet_fsdp2.layout import Layout, plan
from whet_fsdp2.loading import enable_checkpointing, load_model, prepare, quiet
from whet_fsdp2.lora import Adapters, AdapterWeights
from whet_fsdp2.optimizer import Stepper, is_finite
from whet_fsdp2.ranks import Ranks, Watch
from whet_fsdp2.weights import PolicyWeights, full, local, persistent_buffers, reshard, shard
from whet_weights.offload import Offload

P = ParamSpec("P")
T = TypeVar("T")
MAX_NONFINITE = 3
"""Calls of `train` in a row that may end without a step because loss or gradient is not finite."""


def _leaving_room(method: Callable[Concatenate["Worker", P], T]) -> Callable[Concatenate["Worker", P], T]:
    """Wrap a method so that it frees its cached GPU memory when it ends. See `Worker.let_go`."""

    @wraps(method)
    def call(self: "Worker", /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        finally:
            self.let_go()

    return call


class Worker:
    """A rank of the backend. The driver calls the public methods by name, on every rank."""

    def __init__(
        self,
        rank: WorkerRank,
        config: Mapping[str, Any],
        model: ModelInfo,
        total_steps: int = 0,
        longest: int = 0,
        seed: int = 0,
        trained: bool = True,
        *,
        scratch: str,
    ) -> None:
        torch.set_num_threads(rank.threads)
        self._config = structure(config, Fsdp2Config, None)
        self._info, self._longest = model, longest
        self._ranks = Ranks(rank)
        self._device = self._ranks.device
        self._low = model.dtype == "bfloat16"
        attention.register()
        self._seed, self._trained = seed, trained
        self._adapters: Adapters | None = None
        self._root, self._layout = self._build(model, trained)
        low = self._low and rank.size == 1 and trained
        adapters = self._adapters
        self._weights = AdapterWeights(self._root, adapters) if adapters else PolicyWeights(self._root, low)
        self._frozen: dict[str, AnyRoot] = {}
        if self._config.reference and adapters is None:
            self._frozen["reference"], _ = self._build(model, trained=False)
        if self._config.teacher and isinstance(self._root, Root):
            info = self._teacher()
            teacher, layout = self._build(info, trained=False)
            assert isinstance(teacher, Root)
            if layout != self._layout:
                words = f"{info.path} can only be laid out as {layout}, the model that is trained is {self._layout}"
                raise ConfigError(f"backend.teacher: {words}; set backend.layout: padded")
            self._frozen["teacher"] = teacher
            self._root.teacher = (teacher,)
        self._stepper = Stepper(self._weights, self._config.optimizer, self._config.schedule, total_steps)
        self._offload = Offload(Path(scratch) / "asleep" / f"{rank.role}-{rank.rank}")
        self._losses: dict[str, Loss] = {}
        self._nonfinite = 0

    def _teacher(self) -> ModelInfo:
        info = read_model(locate(self._config.teacher), self._info.dtype, self._info.trust_remote_code)
        if info.vocab_size != self._info.vocab_size:
            sizes = f"{info.vocab_size} tokens, the model that is trained {self._info.vocab_size}"
            raise ConfigError(f"backend.teacher: {info.path} has a vocabulary of {sizes}; they must share one")
        return info

    def _build(self, info: ModelInfo, trained: bool) -> tuple[AnyRoot, Layout]:
        config = self._config
        model = load_model(info, config.head, self._seed)
        adapters = None
        if trained and config.lora is not None:
            adapters = self._adapters = Adapters(model, config.lora, self._seed, config.head)
            self._base = adapter_files.base_digest(Path(info.path))
        root, layout = prepare(model, config.layout, config.logprob_chunk, self._longest, config.head)
        if trained and self._config.gradient_checkpointing:
            enable_checkpointing(model)
        model.to(self._device)
        if not trained:
            model.requires_grad_(False)
        whole: list[Any] = []
        if adapters is not None:
            adapters.to(self._device)
            whole = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self._low and (adapters is not None or (not trained and self._ranks.size == 1)):
            for parameter in model.parameters():
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(torch.bfloat16)
        if self._ranks.size > 1:
            shard(
                root,
                ranks=self._ranks.size,
                device=self._device,
                low_precision=self._low,
                reshard_after_forward=self._config.reshard_after_forward,
                whole=whole,
            )
        return root, layout

    def coordinates(self) -> RankCoordinates:
        """Return this rank's coordinates: every rank has a batch shard of its own."""
        return RankCoordinates(data=self._ranks.rank)

    # Training

    @_leaving_room
    def train(self, batch: Batch, loss: Spec, count_over: Batch | None = None) -> dict[str, Metric]:
        """Take one optimizer step on this rank's share of a batch."""
        if not self._trained:
            raise WhetError("this model is frozen: nobody said that it would be trained")
        made = self._loss(loss)
        counts = self._counts(made, batch if count_over is None else count_over)
        tokens = {"tokens": metrics.total(float(batch.tokens))}
        if not any(counts.values()):
            return {
                **tokens,
                **self._of_step(0.0, 0.0, self._stepper.next_rate()),
                **(_flag("skipped_steps") if self._first else {}),
            }
        watch = Watch(self._device, self._ranks.role)
        self._weights.drop_gradients()
        total, found = self._accumulate(self._live(batch, made), made, counts, watch)
        equal = self._weights.complete_gradients(self._ranks.size, self._ranks.size)
        value, square = self._ranks.sum([total, float(self._stepper.square_of_norm()) / equal])
        norm = square**0.5
        if not is_finite(value, norm):
            return {**tokens, **found, **self._refuse_step(value, norm), **watch.metrics()}
        self._nonfinite = 0
        rate = self._stepper.step(norm, self._config.max_grad_norm)
        self._weights.drop_gradients()
        watch.lap("optimizer")
        return {**tokens, **found, **self._of_step(value, norm, rate), **(watch.metrics() if self._first else {})}

    @property
    def _first(self) -> bool:
        return self._ranks.rank == 0

    def _of_step(self, value: float, norm: float, rate: float) -> dict[str, Metric]:
        """Return the metrics that are equal on all ranks: on rank 0 only, so that they are counted once."""
        if not self._first:
            return {}
        return {"loss": metrics.mean(value), "grad_norm": metrics.mean(norm), "lr": metrics.mean(rate)}

    def _refuse_step(self, value: float, norm: float) -> dict[str, Metric]:
        self._weights.drop_gradients()
        self._nonfinite += 1
        if self._nonfinite >= MAX_NONFINITE:
            raise WhetError(
                f"the loss is {value} and the gradient's norm {norm}: not finite for {self._nonfinite} calls in "
                "a row, so no step was taken; lower backend.optimizer.lr, or look at the loss's inputs"
            )
        return _flag("nonfinite_steps") if self._first else {}

    def _accumulate(
        self, batch: Batch, loss: Loss, counts: Mapping[str, float], watch: "Watch"
    ) -> tuple[float, dict[str, Metric]]:
        """Add up gradients over micro-batches. Returns this rank's part of the objective, and the loss's metrics."""
        values, found = [], []
        for part in self._micro_batches(batch):
            one = self._feed(part, batch)
            with torch.enable_grad():
                outputs = self._root(one, loss.outputs)
                objective, of_loss = self._objective(one, outputs, part, loss, counts)
                watch.lap("forward")
                self._backward(objective, outputs)
            values.append(objective.detach())
            found.append(of_loss)
            watch.lap("backward")
        total = float(torch.stack(values).double().sum()) if values else 0.0
        return total, metrics.detached(metrics.merge(found))

    def _backward(self, objective: Tensor, outputs: Mapping[str, Tensor]) -> None:
        if not objective.requires_grad:
            if self._ranks.size == 1:
                return
            # The other ranks gather and reduce in their backward pass; this one has to take part.
            objective = outputs[self._root.probe].nan_to_num().sum() * 0.0
        # FSDP2 averages gradients over ranks; the objective is a sum.
        torch.autograd.backward(objective * self._ranks.size)

    def _objective(
        self, one: Feed, outputs: Mapping[str, Tensor], part: Batch | None, loss: Loss, counts: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Return weight x sum / global count of a micro-batch, summed over terms, and the loss's metrics."""
        zero = torch.zeros((), device=self._device)
        if part is None:
            return zero, {}
        result = loss(spread(one, outputs), self._tensors(part))
        for name, value in result.terms.items():
            if counts.get(name):
                zero = zero + value * (loss.weights.get(name, 1.0) / counts[name])
        return zero, dict(result.metrics)

    # Without gradient

    @_leaving_room
    @torch.no_grad()
    def evaluate(self, batch: Batch, loss: Spec) -> dict[str, Metric]:
        """Return the metrics of the loss on this rank's share; rank 0 adds the loss over all ranks."""
        made = self._loss(loss)
        counts = self._counts(made, batch)
        total, found = 0.0, []
        for part in self._micro_batches(batch):
            one = self._feed(part, batch)
            objective, of_loss = self._objective(one, self._root(one, made.outputs), part, made, counts)
            total += float(objective)
            found.append(of_loss)
        (value,) = self._ranks.sum([total])
        tokens = {"tokens": metrics.total(float(batch.tokens))}
        if self._first:
            tokens["loss"] = metrics.mean(value)
        return {**tokens, **metrics.detached(metrics.merge(found))}

    @_leaving_room
    @torch.no_grad()
    def score(self, batch: Batch, outputs: tuple[str, ...], weights: str = "policy") -> dict[str, Any]:
        """Return outputs of this rank's share: NumPy, [N] or [N, K] each."""
        ours = weights == "policy" or (self._adapters is not None and weights in Adapters.SETS)
        root = self._root if ours else self._frozen.get(weights)
        if root is None:
            raise WhetError(f"no {weights} weights are held; set backend.{weights}")
        with self._using(weights if ours else "policy"):
            return self._score(root, batch, outputs)

    def _using(self, weights: str) -> AbstractContextManager[None]:
        return nullcontext() if self._adapters is None else self._adapters.using(weights)

    def _score(self, root: AnyRoot, batch: Batch, outputs: tuple[str, ...]) -> dict[str, Any]:
        self._refuse_unknown(outputs, "what is to be scored")
        found = {name: _room(name, batch) for name in outputs}
        starts = np.cumsum(batch["lengths"]) - batch["lengths"]
        for chosen in self._plan(batch):
            part = None if chosen is None else batch.take(chosen)
            one = self._feed(part, batch)
            values = spread(one, root(one, outputs))
            if part is None:
                continue
            lengths = part["lengths"]
            where = np.arange(part.tokens) + np.repeat(starts[chosen] - (np.cumsum(lengths) - lengths), lengths)
            for name in outputs:
                found[name][where] = values[name].cpu().numpy()
        return found

    # What both need

    def _loss(self, spec: Spec) -> Loss:
        key = json.dumps([spec.target, spec.config_type, spec.config], sort_keys=True, default=str)
        if key not in self._losses:
            from whet.config.build import build

            made: Any = build(spec)
            self._refuse_unknown(made.outputs, f"the loss {spec.target}")
            self._losses[key] = made
        return self._losses[key]

    def _refuse_unknown(self, wanted: Iterable[str], who: str) -> None:
        given = known_outputs(self._config)
        if unknown := sorted(name for name in wanted if name.partition(":")[0] not in given):
            words = f"{', '.join(unknown)}, which this model does not give: it gives {', '.join(sorted(given))}"
            raise WhetError(f"{who} needs {words}")

    def _counts(self, loss: Loss, batch: Batch) -> dict[str, float]:
        """Return the count of each term over all ranks."""
        names = list(loss.weights)
        mine = loss.counts(self._tensors(batch)) if batch.sequences else {}
        return dict(zip(names, self._ranks.sum([float(mine.get(name, 0.0)) for name in names]), strict=True))

    def _live(self, batch: Batch, loss: Loss) -> Batch:
        """Return the batch without units that cannot change the loss. One unit stays, so that the metrics exist."""
        if not batch.sequences:
            return batch
        live = np.asarray(torch.as_tensor(loss.live(self._tensors(batch))).cpu()).astype(bool)
        if live.all():
            return batch
        units = batch.units()
        kept = [unit for unit in units if live[unit].any()] or units[:1]
        return batch.take(np.concatenate(kept))

    def _plan(self, batch: Batch) -> list[Any]:
        """Return the sequences of each micro-batch. None: only other ranks still have a micro-batch."""
        parts = plan(batch, self._layout, self._config.micro_batch_tokens) if batch.sequences else []
        return [*parts, *[None] * (self._ranks.max(len(parts)) - len(parts))]

    def _micro_batches(self, batch: Batch) -> Iterator[Batch | None]:
        for chosen in self._plan(batch):
            yield None if chosen is None else batch.take(chosen)

    def _feed(self, part: Batch | None, batch: Batch) -> Feed:
        if part is None:
            return nothing(batch.take([]), self._layout, self._device)
        return feed(part, self._layout, self._device)

    def _tensors(self, batch: Batch) -> Batch:
        return batch.map(self._tensor)

    def _tensor(self, column: Any) -> Tensor:
        writable = column if column.flags.writeable else column.copy()
        return torch.from_numpy(writable).to(self._device)

    # Weights

    def send_weights(self, spec: TransferSpec) -> None:
        """Send the weights that the forward pass uses. All ranks gather; rank 0 sends, or with cuda-ipc every rank."""
        with self._using(spec.weights):
            self._send(spec)

    def _send(self, spec: TransferSpec) -> None:
        if spec.adapter is not None and self._adapters is None:
            raise WhetError("an adapter is to be sent, and there is none; set backend.lora")
        stream = (
            self._weights.computing() if self._adapters is None or spec.adapter is None else self._adapters.stored()
        )
        if not self._first and spec.transport != "cuda-ipc":
            for _ in stream:
                pass
            return
        from whet_weights.transfer import send

        dtype = getattr(torch, spec.dtype) if spec.dtype else None
        cast = ((name, tensor.to(dtype if tensor.is_floating_point() else None)) for name, tensor in stream)
        send(spec, cast if dtype else stream, sender=self._ranks.rank if spec.senders > 1 else 0)

    def save(self, folder: str) -> None:
        """Write weights, optimizer and schedule, durably."""
        extra = {
            "backend": "fsdp2",
            "architecture": self._info.architecture,
            "optimizer": self._config.optimizer.kind,
            "optimizer_steps": self._stepper.steps,
            "steps": {name: float(state["step"]) for name, state in self._stepper.state().items()},
        }
        checkpoint.write(Path(folder), self._saved(), extra, writes=self._first)
        if self._adapters is not None and self._first:
            adapter_files.write(Path(folder), self._adapters, self._info.path, self._base)
        self._ranks.sum([0.0])

    def _saved(self) -> Iterator[tuple[str, Tensor]]:
        for name, master in self._weights.saved():
            yield f"weights/{name}", full(master)
        for name, buffer in persistent_buffers(self._root.model) if self._adapters is None else ():
            yield f"buffers/{name}", buffer
        for name, moment in self._stepper.moments():
            yield name, full(moment)

    @torch.no_grad()
    @_leaving_room
    def load(self, folder: str) -> None:
        """Load a checkpoint that `save` wrote, on any number of ranks."""
        saved = checkpoint.Saved(Path(folder))
        saved.refuse_others({f"weights/{name}": master.shape for name, master in self._weights.saved()})
        self._stepper.refuse_others(saved)
        if self._adapters is not None:
            adapter_files.read(Path(folder), self._adapters, self._info.path, self._base)
        buffers = dict(persistent_buffers(self._root.model))
        for name, tensor in saved.read(n for n in saved.tensors if n.startswith("weights/")):
            self._weights.put(name.partition("/")[2], tensor)
        for name, tensor in saved.read(n for n in saved.tensors if n.startswith("buffers/")):
            buffers[name.partition("/")[2]].copy_(tensor)
        self._stepper.load(saved)
        self._weights.push()

    def export(self, folder: str) -> None:
        """Write a model folder that `transformers` can load, with the weights that the forward pass uses.

        With `lora.export: adapter`: a folder that PEFT can load.
        """
        if self._adapters is not None and self._config.lora and self._config.lora.export == "adapter":
            if self._first:
                adapter_files.write(Path(folder), self._adapters, self._info.path, self._base)
            self._ranks.sum([0.0])
            return
        state = {name: tensor.cpu() for name, tensor in self._weights.computing() if self._first}
        if self._first:
            model = self._root.model
            model.config.dtype = torch.bfloat16 if self._low else torch.float32
            with disk_errors(Path(folder)), quiet():
                copy_companions(Path(self._info.path), Path(folder))
                write_chat_template(self._info, folder)
                if isinstance(self._root, ValueRoot):
                    set_padding(model.config, Path(folder))
                model.save_pretrained(folder, state_dict=state)
                use_umask(*Path(folder).glob("*.safetensors"))
        self._ranks.sum([0.0])

    # Life

    def sleep(self) -> int:
        """Free the memory of all weights and of the optimizer. Returns the number of bytes."""
        self._weights.drop_gradients()
        return self._offload.sleep(self._held())

    def wake(self) -> None:
        """Bring weights and optimizer back."""
        self._offload.wake()

    def let_go(self) -> None:
        """Release cached GPU memory where roles take turns on the GPU: the other role needs it during a weight sync."""
        if self._offload.used and self._device.type == "cuda":
            for root in (self._root, *self._frozen.values()):
                reshard(root)
            torch.cuda.empty_cache()

    def _held(self) -> Iterator[Tensor]:
        for root in (self._root, *self._frozen.values()):
            reshard(root)
            yield from map(local, root.parameters())
        yield from map(local, self._weights.masters.values())
        yield from (local(moment) for _, moment in self._stepper.moments())

    def close(self) -> None:
        """Leave the process group."""
        self._offload.close()
        self._ranks.leave()


def _room(name: str, batch: Batch) -> Any:
    """Make room for an output of a whole batch."""
    kind, _, k = name.partition(":")
    if kind == "logprobs_at":
        return np.zeros(batch["topk_ids"].shape, np.float32)
    shape = (batch.tokens, int(k)) if kind.startswith("topk_") else (batch.tokens,)
    return np.zeros(shape, np.int32 if kind == "topk_ids" else np.float32)


def _flag(name: str) -> dict[str, Metric]:
    return {name: metrics.total(1.0)}
