"""A policy's weights and optimizer state in Megatron's format `torch_dist`, beside a description in JSON.

    backend.json            the backend, the architecture, optimizer steps, `optimizer.distributed`
    megatron/               Megatron's: each rank writes the parts of tensors that it holds
    adapter_*               where adapters are trained: these, in PEFT's format, in the place of the weights

It loads on any number of ranks and with any parallelism: each rank reads the parts that it needs.
"""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

from whet.errors import CheckpointError
from whet_megatron.groups import Ranks
from whet_megatron.index import read_index
from whet_megatron.model import HeldModel
from whet_megatron.optimizer import Stepper
from whet_megatron.parts import load_parts
from whet_megatron.saving import INDEX, TENSORS, Planned, plan
from whet_training import adapter_files

FORMAT = 1
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}
"""Megatron's settings with which a checkpoint loads with any parallelism. The state of the optimizer is gathered in
host memory, on the first rank of those that share it; else it would be, whole, in the GPU memory of each of them.
"""


def planned(folder: Path, model: HeldModel, stepper: Stepper) -> Planned:
    """Plan a checkpoint. Every rank must take part."""
    document = {
        "format": FORMAT,
        "backend": "megatron",
        "architecture": attrs.asdict(model.architecture),
        "value": model.value,
        "adapter": _adapter(model),
        "optimizer_steps": stepper.steps,
        "distributed": stepper.distributed,
    }
    with _quietly():
        return plan(folder, _state(model, stepper, loading=False), document)


def write(folder: Path, model: HeldModel, stepper: Stepper, ranks: Ranks) -> None:
    """Write a checkpoint durably. Every rank must take part."""
    this = planned(folder, model, stepper)
    with _quietly():
        written = ranks.gather_objects(this.write())
        if ranks.rank == 0:
            this.complete(written)
    ranks.sum_all([0.0])


def read(folder: Path, model: HeldModel, stepper: Stepper) -> None:
    """Load a checkpoint. Raises `CheckpointError` before anything is changed if it is of another model or damaged."""
    from torch.distributed.checkpoint.api import CheckpointException

    document = _document(folder)
    _refuse_others(folder, document, model)
    _refuse_other_masters(folder, document.get("distributed"), model, stepper)
    read_index(folder / TENSORS)
    adapter = {}
    if model.adapters is not None:
        info, accept = model.adapters.info, model.adapters.refuse_others
        adapter = adapter_files.read(folder, accept, info, model.path, model.base)
    state = _state(model, stepper, loading=True)
    try:
        with _quietly():
            found = load_parts(state, folder / TENSORS)
    except (Exception, CheckpointException) as error:  # Megatron, torch and the files each raise their own
        raise CheckpointError(f"{folder / TENSORS} cannot be loaded: {error}") from error
    if model.adapters is not None:
        model.adapters.put(adapter)
    for number, stage in enumerate(model.weights.stages if model.adapters is None else ()):
        stage.load_state_dict(found[_key(number)], strict=True)
    stepper.load(found["optimizer"], int(document["optimizer_steps"]))


def _state(model: HeldModel, stepper: Stepper, *, loading: bool) -> dict[str, Any]:
    """Return what this rank holds, as Megatron describes it in a checkpoint."""
    metadata = dict(METADATA)  # Megatron adds its groups, which end with the role
    if model.adapters is not None:  # they are in PEFT's format, and the model is not saved
        return {"optimizer": stepper.sharded_state(model.adapters.sharded(), metadata, loading=loading)}
    stages = enumerate(model.weights.stages)
    state: dict[str, Any] = {_key(number): stage.sharded_state_dict(metadata=metadata) for number, stage in stages}
    state["optimizer"] = stepper.sharded_state(dict(state), metadata, loading=loading)
    return state


def _adapter(model: HeldModel) -> dict[str, Any] | None:
    """Return what a checkpoint says of the adapters. None: all weights are trained."""
    if model.adapters is None:
        return None
    info = model.adapters.info
    return {"rank": info.rank, "alpha": info.alpha, "rslora": info.rslora, "layers": len(model.adapters.weights)}


def _key(number: int) -> str:
    return f"model{number}"


def _document(folder: Path) -> dict[str, Any]:
    """Return the description of a checkpoint."""
    path = folder / INDEX
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kind, form, steps = found["backend"], found["format"], found.get("optimizer_steps", 0)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} holds no {INDEX}, so it is no checkpoint of this backend") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error
    if kind != "megatron":
        words = "export the model with the backend that wrote it, and begin a new run with that"
        raise CheckpointError(f"{folder} is a checkpoint of the backend {kind}, wanted megatron; {words}")
    if form != FORMAT:
        raise CheckpointError(f"{path} has format {form}, wanted {FORMAT}; load it with the whet that wrote it")
    if not isinstance(steps, int) or steps < 0:
        raise CheckpointError(f"{path} has optimizer_steps {steps!r}, wanted a number of steps")
    return found


def _refuse_others(folder: Path, document: dict[str, Any], model: HeldModel) -> None:
    """Raise `CheckpointError`, with the differences, if a checkpoint is of another model."""
    wanted = {**attrs.asdict(model.architecture), "value": model.value, "adapter": _adapter(model)}
    saved = document.get("architecture")
    found = {**(saved if isinstance(saved, dict) else {}), **{key: document.get(key) for key in ("value", "adapter")}}
    wrong = [f"{key} is {found.get(key)}, the model has {value}" for key, value in wanted.items()
             if found.get(key) != value]  # fmt: skip
    if wrong:
        more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise CheckpointError(f"{folder} is of another model: {'; '.join(wrong[:4])}{more}")


def _refuse_other_masters(folder: Path, saved: bool | None, model: HeldModel, stepper: Stepper) -> None:
    """Raise `CheckpointError` if the optimizer wants float32 weights that a checkpoint has under other names.

    Without the distributed optimizer, weights that are float32 themselves are not saved a second time, nor wanted.
    """
    own = stepper.distributed
    if saved not in (None, own) and (own or model.trained_dtype == torch.bfloat16):
        was, now = str(saved).lower(), str(own).lower()
        raise CheckpointError(
            f"{folder} was saved with optimizer.distributed: {was}, and does not load with {now}; "
            f"set it to {was}, or begin a new run with an export of the model"
        )


@contextmanager
def _quietly() -> Iterator[None]:
    """Leave out what torch says about its own functions that Megatron calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*TypedStorage is deprecated.*")
        yield
