"""LoRA adapters as they travel and as they are stored: the names and shapes of PEFT, and the product with a weight.

    linear     base_model.model.X.lora_A.weight [r, in]        .lora_B.weight [out, r]
    experts    base_model.model.X.lora_A.weight [E * r, in]    .lora_B.weight [out, r * E], experts innermost

PEFT wraps the second stacked parameter of an experts module around the first, so the first one's names have
`X.base_layer` in the place of `X`. In this process, the matrices of experts are stacked: A [E, r, in], B [E, out, r].
"""

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.component import AdapterInfo
from whet.data.bounded import MODEL_VALUES, loads
from whet.data.files import disk_errors, use_umask
from whet.errors import WeightSyncError, WhetError

if TYPE_CHECKING:
    import torch

PREFIX = "base_model.model."
WRAPPED = ".base_layer"
A, B = ".lora_A.weight", ".lora_B.weight"
NONE: Mapping[str, str] = {}
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


VARIANTS = (
    "use_dora", "rank_pattern", "alpha_pattern", "lora_bias", "layer_replication", "alora_invocation_tokens",
    "use_qalora", "use_bdlora", "kasa_config", "arrow_config", "monteclora_config",
)  # fmt: skip
"""Keys of `adapter_config.json` that make of an adapter more than B A."""
BASE_CHANGING = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` with which PEFT changes the base weights when the adapter is made: W - s B0 A0 or,
for LoftQ, a quantized W. Of the others, eva, mica, orthogonal and gaussian leave the base as it is."""

logger = logging.getLogger(__name__)


def stored(part: str, tensor: "torch.Tensor") -> "torch.Tensor":
    """Return a matrix in PEFT's shape. `part` is the name that ends in `lora_A.weight` or `lora_B.weight`."""
    if tensor.ndim == 2:
        return tensor
    return tensor.flatten(0, 1) if part.endswith(A) else tensor.permute(1, 2, 0).flatten(1)


def stacked(part: str, tensor: "torch.Tensor", experts: int) -> "torch.Tensor":
    """Return the matrices of `experts` experts, stacked, from a matrix in PEFT's shape."""
    if part.endswith(A):
        return tensor.reshape(experts, -1, tensor.shape[1])
    return tensor.reshape(len(tensor), -1, experts).permute(2, 0, 1).contiguous()


def merged(
    weight: "torch.Tensor", a: "torch.Tensor", b: "torch.Tensor", scaling: float, *, transposed: bool = False
) -> "torch.Tensor":
    """Return W + scaling B A, computed in float32 and rounded to the dtype of the weight.

    weight [out, in] or [E, out, in], a [r, in] or [E, r, in], b [out, r] or [E, out, r]. transposed: [E, in, out].
    """
    update = b.float() @ a.float()
    return weight.float().add(update.mT if transposed else update, alpha=scaling).to(weight.dtype)


def pairs(
    tensors: "Iterable[tuple[str, torch.Tensor]]", info: AdapterInfo
) -> "dict[str, tuple[torch.Tensor, torch.Tensor]]":
    """Return A and B in PEFT's shapes by the name of the module, without `base_model.model.`.

    Raises `WeightSyncError` if a half is missing, comes twice, or has another rank.
    """
    halves: dict[str, dict[str, torch.Tensor]] = {A: {}, B: {}}
    for name, tensor in tensors:
        end = A if name.endswith(A) else B
        module = name.removeprefix(PREFIX).removesuffix(end)
        if not name.startswith(PREFIX) or not name.endswith(end):
            raise WeightSyncError(f"{name} is no matrix of a LoRA adapter, but it was sent with one")
        if module in halves[end]:
            raise WeightSyncError(f"{name} was sent twice")
        rows = tensor.shape[0 if end == A else 1]
        if tensor.ndim != 2 or rows % info.rank or (rows != info.rank and "experts" not in info.kinds):
            raise WeightSyncError(f"{name} was sent with shape {tuple(tensor.shape)}, wanted rank {info.rank}")
        halves[end][module] = tensor
    if odd := sorted(halves[A].keys() ^ halves[B].keys()):
        raise WeightSyncError(f"only one of the two matrices of {odd[0]} was sent")
    if not halves[A]:
        raise WeightSyncError("an adapter without matrices was sent")
    return {module: (a, halves[B][module]) for module, a in halves[A].items()}


def targets(modules: Iterable[str], parameters: Mapping[str, Iterable[str]]) -> "Iterator[tuple[str, str]]":
    """Yield (module of an adapter, name of the weight that it changes).

    `parameters` has the names of the stacked parameters of each experts module, in the order of the module.
    """
    for module in modules:
        owner = module
        while owner.endswith(WRAPPED):
            owner = owner.removesuffix(WRAPPED)
        names = list(parameters.get(owner, ()))
        if not names:
            yield module, f"{module}.weight"
            continue
        depth = (len(module) - len(owner)) // len(WRAPPED)
        if depth >= len(names):
            raise WeightSyncError(f"{owner} has {len(names)} stacked parameters, and an adapter of more was sent")
        yield module, f"{owner}.{names[-1 - depth]}"


def peft_config(
    info: AdapterInfo, base: str, modules: Iterable[str], parameters: Iterable[str] = (), whole: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the content of `adapter_config.json` as PEFT reads it.

    `modules` are the adapted linear layers, `parameters` the adapted stacked parameters, `whole` the modules that are
    stored whole, e.g. a value head.
    """
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if tuple(whole) else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": info.rank,
        "lora_alpha": info.alpha,
        "use_rslora": info.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": sorted(modules),
        "target_parameters": sorted(parameters) or None,
        "modules_to_save": sorted(whole) or None,
    }


def write_peft(
    folder: Path, tensors: "Mapping[str, torch.Tensor]", config: Mapping[str, Any], metadata: Mapping[str, str] = NONE
) -> None:
    """Write a folder that PEFT loads: `tensors` by PEFT's names, in PEFT's shapes. `metadata` goes into their file."""
    from safetensors.torch import save_file

    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(whole, folder / WEIGHTS, metadata={"format": "pt", **metadata})
        use_umask(folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")


def read_peft(folder: Path) -> "tuple[dict[str, Any], dict[str, torch.Tensor]]":
    """Return config and tensors of a folder in PEFT's format.

    Raises `WhetError` if it holds no plain LoRA adapter, or one that is not of the base weights as they are stored.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config: dict[str, Any] = loads((folder / CONFIG).read_bytes(), MODEL_VALUES)
        tensors = load_file(folder / WEIGHTS)
        kind = config["peft_type"], int(config["r"]), float(config["lora_alpha"])
        if not math.isfinite(kind[2]):
            raise ValueError(f"lora_alpha is {kind[2]}, wanted a finite number")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise WhetError(f"{folder} is no LoRA adapter in PEFT's format ({WEIGHTS} and {CONFIG}): {error!r}") from error
    more = [f"{key} {config[key]!r}" for key in VARIANTS if config.get(key)]
    if kind[0] != "LORA" or more or config.get("bias") not in (None, "none"):
        raise WhetError(f"{folder} is no plain LoRA adapter: {', '.join(more) or kind[0]}")
    _refuse_other_base(folder, config.get("init_lora_weights"))
    if config.get("lora_dropout"):
        words = "it is trained further without dropout, which changes nothing else about it"
        logger.warning("%s was trained with lora_dropout %s; %s", folder, config["lora_dropout"], words)
    return config, tensors


def _refuse_other_base(folder: Path, start: Any) -> None:
    if not str(start).lower().startswith(BASE_CHANGING):
        return
    convert = (
        "" if start == "loftq" else "convert it with PEFT's save_pretrained(path_initial_model_for_weight_conversion="
        "FOLDER_OF_THE_UNTRAINED_ADAPTER), which doubles its rank; or "
    )  # fmt: skip
    raise WhetError(
        f"{folder} was made with init_lora_weights {start!r}, which changes the base weights, so it is no adapter of "
        f"the model as it is stored; {convert}save the changed base with unload(), set model.path to it, and set "
        f"init_lora_weights to true in {CONFIG}"
    )
