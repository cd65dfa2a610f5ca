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
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from whet.component import Spec
from whet.config.structure import structure
from whet.data import metrics
from whet.data.batch import Batch
from whet.data.files import disk_errors
from whet.data.metrics import Metric
from whet.data.model_info import ModelInfo, locate, read_model, write_chat_template
from whet.errors import ConfigError, WhetError
from whet.interfaces.axes import RankCoordinates
from whet.interfaces.loss import Loss
from whet.interfaces.weights import TransferSpec
from whet.interfaces.workers import WorkerRank
from whet_fsdp2 import adapter_files, attention, checkpoint, saving
from whet_fsdp2.config import Fsdp2Config
from whet_fsdp2.config import outputs as known_outputs
from whet_fsdp2.experts import Experts, Step
from whet_fsdp2.export import copy_companions, set_padding, write_config, write_weights
from whet_fsdp2.feed import Feed, feed, nothing, spread
from whet_fsdp2.layout import Layout
from whet_fsdp2.loading import enable_checkpointing, load_model, prepare, quiet
from whet_fsdp2.lora import Adapters, AdapterWeights
from whet_fsdp2.optimizer import Stepper, is_finite
from whet_fsdp2.packing import plan
from whet_fsdp2.ranks import Ranks, Watch
from whet_fsdp2.root import AnyRoot, Root, ValueRoot
from whet_fsdp2.sharding import local, reshard
from whet_fsdp2.weights import PolicyWeights, persistent_buffers
from whet_memory.measure import PeakMeter
from whet_weights.offload import Offload
from whet_weights.stored_names import StoredNames

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
        self._ranks = Ranks(rank, self._config.parallel)
        self._device = self._ranks.device
        self._memory = PeakMeter(self._device, rank.role)
        self._low = model.dtype == "bfloat16"
        attention.register()
        self._seed, self._trained = seed, trained
        self._experts: Experts | None = None
        self._adapters: Adapters | None = None
        with self._memory.phase("loading"):
            self._root, self._layout = self._build(model, trained)
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
            info = self._teacher()
            teacher, layout = self._build(info, trained=False)
            assert isinstance(teacher, Root)
            if layout != self._layout:
                words = f"{info.path} can only be laid out as {layout}, the model that is trained is {self._layout}"
                raise ConfigError(f"backend.teacher: {words}; set backend.layout: padded")
            self._frozen["teacher"] = teacher
            self._root.teacher = (teacher,)
        self._stepper = Stepper(self._weights, self._config.optimizer, self._config.schedule, total_steps)
        self._writer = saving.Writer()
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
        config, ranks = self._config, self._ranks
        # Only weights that are trained have float32 masters.
        mastered = (trained and config.lora is None) or not self._low
        model = load_model(
            info, config.head, self._seed, dtype=torch.float32 if mastered else torch.bfloat16, ranks=ranks,
            reshard_after_forward=config.reshard_after_forward, low_precision=self._low and mastered,
        )  # fmt: skip
        if ranks.size == 1:
            model.to(self._device)
        if trained and config.lora is not None:
            self._adapters = Adapters(model, config.lora, self._seed, config.head)
            self._adapters.to(self._device)
            self._base = adapter_files.base_digest(Path(info.path))
        root, layout = prepare(model, config.layout, config.logprob_chunk, self._longest, config.head, ranks.context)
        if trained and config.gradient_checkpointing:
            enable_checkpointing(model)
        if self._experts is None:  # the first model that is built is the policy
            self._experts = Experts(root, config.experts, ranks, layout)
        if not trained:
            model.requires_grad_(False)
        reshard(model)
        return root, layout

    def coordinates(self) -> RankCoordinates:
        """Return this rank's coordinates. Ranks with the same `data` work on one batch shard."""
        return self._ranks.coordinates

    # Training

    @_leaving_room
    def train(self, batch: Batch | None, loss: Spec, count_over: Batch | None = None) -> dict[str, Metric]:
        """Take one optimizer step on this rank's share of a batch."""
        if not self._trained:
            raise WhetError("this model is frozen: nobody said that it would be trained")
        batch, count_over = self._ranks.share([batch, count_over])
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
        with self._memory.phase("train"):
            total, found = self._accumulate(self._live(batch, made), made, counts, watch)
        self._weights.complete_gradients()
        (value,) = self._ranks.sum([total])
        norm = self._ranks.sum_all([float(self._weights.square_of_norm())])[0] ** 0.5
        if not is_finite(value, norm):
            return {**tokens, **found, **self._refuse_step(value, norm), **watch.metrics()}
        self._nonfinite = 0
        with self._memory.phase("optimizer"):
            rate = self._stepper.step(norm, self._config.max_grad_norm)
        self._weights.drop_gradients()
        watch.lap("optimizer")
        of_step = {**self._of_step(value, norm, rate), **self._memory.metrics()}
        return {**tokens, **found, **of_step, **(watch.metrics() if self._first else {})}

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
        routing = self._routing(batch, loss)
        for part in self._micro_batches(batch):
            one = self._feed(part, batch)
            with torch.enable_grad():
                outputs = self._root(one, loss.outputs)
                objective, of_loss = self._objective(one, outputs, part, loss, counts)
                if routing is not None:
                    objective = routing.add_to(objective, outputs[self._root.probe])
                watch.lap("forward")
                self._backward(objective, outputs)
            values.append(objective.detach())
            found.append(of_loss)
            watch.lap("backward")
        total = float(torch.stack(values).double().sum()) if values else 0.0
        if routing is not None:
            found.append(routing.metrics())
        return total, metrics.detached(metrics.merge(found))

    def _routing(self, batch: Batch, loss: Loss) -> Step | None:
        """Begin to count the routing of a step. None: the model is dense."""
        if not self._experts:
            return None

        def passes() -> Iterator[None]:
            for part in self._micro_batches(batch):
                with torch.no_grad():
                    self._root.pass_through(self._feed(part, batch))
                yield

        live = bool(torch.as_tensor(loss.live(self._tensors(batch))).any()) if batch.sequences else False
        return self._experts.begin(batch, len(self._plan(batch)), live, passes())

    def _backward(self, objective: Tensor, outputs: Mapping[str, Tensor]) -> None:
        if not objective.requires_grad:
            if self._ranks.size == 1:
                return
            # The other ranks gather and reduce in their backward pass; this one has to take part.
            objective = outputs[self._root.probe].nan_to_num().sum() * 0.0
        # FSDP2 averages gradients over its ranks; the objective is a sum.
        torch.autograd.backward(objective * self._ranks.grid.averaged)

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
    def evaluate(self, batch: Batch | None, loss: Spec) -> dict[str, Metric]:
        """Return the metrics of the loss on this rank's share; rank 0 adds the loss over all ranks."""
        batch = self._ranks.share(batch)
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
    def score(self, batch: Batch | None, outputs: tuple[str, ...], weights: str = "policy") -> dict[str, Any]:
        """Return outputs of this rank's share: NumPy, [N] or [N, K] each."""
        batch = self._ranks.share(batch)
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
        live = self._of_loss(batch, loss)
        if live.all():
            return batch
        units = batch.units()
        kept = [unit for unit in units if live[unit].any()] or units[:1]
        return batch.take(np.concatenate(kept))

    def live(self, batch: Batch | None, loss: Spec) -> Any:
        """Return which sequences [B] of a batch can change the loss. None where the batch is another rank's."""
        return None if batch is None else self._of_loss(batch, self._loss(loss))

    def _of_loss(self, batch: Batch, loss: Loss) -> Any:
        if not batch.sequences:
            return np.zeros(0, np.bool_)
        return np.asarray(torch.as_tensor(loss.live(self._tensors(batch))).cpu()).astype(bool)

    def _plan(self, batch: Batch) -> list[Any]:
        """Return the sequences of each micro-batch. None: only other ranks still have a micro-batch."""
        parts = plan(batch, self._layout, self._config.micro_batch_tokens) if batch.sequences else []
        return [*parts, *[None] * (self._ranks.max(len(parts)) - len(parts))]

    def _micro_batches(self, batch: Batch) -> Iterator[Batch | None]:
        for chosen in self._plan(batch):
            yield None if chosen is None else batch.take(chosen)

    def _feed(self, part: Batch | None, batch: Batch) -> Feed:
        context = self._ranks.context
        one = (
            nothing(batch.take([]), self._layout, self._device, context)
            if part is None
            else feed(part, self._layout, self._device, context)
        )
        if self._experts:
            self._experts.enter(part, one)
        return one

    def _tensors(self, batch: Batch) -> Batch:
        return batch.map(self._tensor)

    def _tensor(self, column: Any) -> Tensor:
        writable = column if column.flags.writeable else column.copy()
        return torch.from_numpy(writable).to(self._device)

    # Weights

    def send_weights(self, spec: TransferSpec) -> None:
        """Send the weights that the forward pass uses, under the names of the model folder, or an adapter alone.

        All ranks gather; rank 0 sends, or with cuda-ipc every rank.
        """
        with self._memory.phase("weight_sync"), self._using(spec.weights):
            self._send(spec)

    def _send(self, spec: TransferSpec) -> None:
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
        """Copy what this rank saves to host memory, and begin to write the copy. An adapter is small: it is written."""
        self._write_adapter(folder)
        size = sum(part.nbytes for _, part in self._saved())
        write = partial(checkpoint.write, Path(folder), extra=self._described(), rank=self._ranks.rank)
        self._writer.take(self._saved(), size, write)

    async def written(self) -> None:
        """Wait until the files of the last `take` are durable."""
        await self._writer.written()

    def _write_adapter(self, folder: str) -> None:
        if self._adapters is not None and self._first:
            adapter_files.write(Path(folder), self._adapters, self._info.path, self._base)

    def _described(self) -> dict[str, Any]:
        return {
            "backend": "fsdp2",
            "ranks": self._ranks.size,
            "architecture": self._info.architecture,
            "optimizer": self._config.optimizer.kind,
            "optimizer_steps": self._stepper.steps,
            "steps": {name: float(state["step"]) for name, state in self._stepper.state().items()},
        }

    def _saved(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parts that this rank writes."""
        for kind, tensors in self._state().items():
            for name, tensor in tensors:
                yield from checkpoint.parts(f"{kind}/{name}", tensor, self._ranks.rank)
        for name, moment in self._stepper.moments():
            yield from checkpoint.parts(name, moment, self._ranks.rank)

    def _state(self) -> dict[str, list[tuple[str, Tensor]]]:
        if self._adapters is not None:  # they are in PEFT's format, and the model is not saved
            return {"weights": []}
        buffers = list(persistent_buffers(self._root.model))
        return {"weights": list(self._weights.masters.items()), "buffers": buffers}

    @torch.no_grad()
    @_leaving_room
    def load(self, folder: str) -> None:
        """Load a checkpoint that `save` wrote, on any number of ranks and with any parallelism."""
        reshard(self._root.model)
        saved = checkpoint.Saved(Path(folder))
        saved.refuse_others({f"weights/{name}": master.shape for name, master in self._state()["weights"]})
        self._stepper.refuse_others(saved)
        if self._adapters is not None:
            adapter_files.read(Path(folder), self._adapters, self._info.path, self._base)
        for kind, tensors in self._state().items():
            saved.read_into((f"{kind}/{name}", tensor) for name, tensor in tensors)
        self._stepper.load(saved)
        self._weights.push()

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
                write_config(self._root.model, Path(folder), dtype)
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
                reshard(root.model)
            torch.cuda.empty_cache()

    def _held(self) -> Iterator[Tensor]:
        for root in (self._root, *self._frozen.values()):
            reshard(root.model)
            yield from map(local, root.model.parameters())
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
