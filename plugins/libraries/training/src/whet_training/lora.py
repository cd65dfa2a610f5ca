"""Sets of LoRA adapters with which a model computes, and adapters in PEFT's format: what is drawn, read and refused.

linear layer    y = W x + s B (A x)      A [r, in] kaiming uniform, B [out, r] zero
experts         W_e + s B_e A_e          A [E, r, in], B [E, out, r]
s               alpha / r, or alpha / sqrt(r) with rslora (Kalajdzievski 2023, arXiv:2312.03732)
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.component import AdapterInfo
from whet.data import randomness
from whet.errors import ConfigError, WhetError
from whet_training.lora_config import LoraConfig, adapter_info
from whet_weights import adapter as peft

Pair = tuple[Tensor, Tensor]
"""A [r, in] and B [out, r] of one weight; of stacked weights [E, r, in] and [E, out, r]."""
TRIAL_SIZE = 0.3
"""Root mean square of a trial's update of a weight, times the root of the number of its inputs. The weights of trained
models have about 1, so a trial changes every layer clearly and breaks none."""
VALUE_HEAD = "score"
"""The module of a value head, which is trained whole beside adapters and stored with them."""
HEAD_WEIGHT = f"{peft.PREFIX}{VALUE_HEAD}.weight"
"""PEFT's name of its weight."""


class AdapterSets:
    """The adapters of the weights that this rank has, and which set of them computes."""

    SETS = ("policy", "reference", "base", "trial")
    """The sets of weights that the model computes with; see `using`."""

    def __init__(self, config: LoraConfig, seed: int) -> None:
        self.info, self._config, self._seed = adapter_info(config), config, seed
        self.scaling = self.info.scaling
        self.pairs: dict[str, Pair] = {}
        """What is trained, by the name of the weight: parameters."""
        self._start: dict[str, Pair] = {}
        self._chosen: Mapping[str, Pair] | None = self.pairs

    @contextmanager
    def using(self, weights: str) -> Iterator[None]:
        """Compute with other adapters meanwhile.

        `policy`: those in training. `reference`: those at the start of the run. `base`: none. `trial`: random ones.
        """
        before, self._chosen = self._chosen, self.set_of(weights)
        try:
            yield
        finally:
            self._chosen = before

    def at(self, weight: str) -> Pair | None:
        """Return the adapter of a weight. None: the model computes without adapters."""
        return None if self._chosen is None else self._chosen[weight]

    def set_of(self, weights: str) -> Mapping[str, Pair] | None:
        """Return the adapters of a set of weights; see `using`. None: the set has none."""
        if weights == "trial":
            return {weight: self._trial(weight) for weight in self.pairs}
        if weights == "reference":  # without a start of its own, B is zero
            return self._start if self._config.adapter else None
        return self.pairs if weights == "policy" else None

    def _remember_start(self) -> None:
        """Keep a copy of adapters that the run starts from, for the reference."""
        kept = self.pairs if self._config.adapter else {}
        self._start = {weight: (a.detach().clone(), b.detach().clone()) for weight, (a, b) in kept.items()}

    def _trial(self, weight: str) -> Pair:
        """Return random matrices whose update of a weight has the size `TRIAL_SIZE`: what this rank has of them."""
        drawn = drawn_trial(self._seed, weight, *self._shapes(weight), self.info)
        device = self.pairs[weight][0].device
        first, second = (matrix.to(device) for matrix in self._part(weight, *drawn))
        return first, second

    def _shapes(self, weight: str) -> tuple[Sequence[int], Sequence[int]]:
        """Return the shapes of the whole A and B of a weight."""
        a, b = self.pairs[weight]
        return a.shape, b.shape

    def _part(self, weight: str, a: Tensor, b: Tensor) -> Pair:
        """Return what this rank has of the whole A and B of a weight."""
        return a, b


def drawn_a(seed: int, weight: str, shape: Sequence[int]) -> Tensor:
    """Return the A from which training begins: kaiming uniform (a = sqrt(5)), as in PEFT. [..., in] float32."""
    bound = 1 / math.sqrt(shape[-1])
    drawn = randomness.generator(seed, f"lora {weight}").uniform(-bound, bound, shape)
    return torch.from_numpy(drawn.astype(np.float32))


def drawn_trial(seed: int, weight: str, a: Sequence[int], b: Sequence[int], info: AdapterInfo) -> Pair:
    """Return random A and B of these shapes, whose update of the weight has the size `TRIAL_SIZE`. float32."""
    draw, bound = randomness.generator(seed, f"lora trial {weight}"), 1 / math.sqrt(a[-1])
    size = TRIAL_SIZE * math.sqrt(3 / info.rank) / info.scaling
    first, second = draw.uniform(-bound, bound, a), size * draw.standard_normal(b)
    return torch.from_numpy(first.astype(np.float32)), torch.from_numpy(second.astype(np.float32))


def refuse_others(wanted: Mapping[str, Sequence[int]], found: Mapping[str, Tensor], source: str) -> None:
    """Raise `WhetError` unless tensors are an adapter as it is trained here: names and shapes are those of PEFT."""
    if odd := sorted(wanted.keys() ^ found.keys()):
        how = f"lacks {odd[0]}" if odd[0] in wanted else f"holds {odd[0]}, which backend.lora does not train"
        words = "set backend.lora.targets and backend.lora.experts to those of the adapter"
        raise WhetError(f"{source} {how}; {words}")
    for name, shape in wanted.items():
        if list(found[name].shape) != list(shape) or not torch.isfinite(found[name]).all():
            own = list(found[name].shape)
            raise WhetError(f"{source}: {name} has shape {own}, wanted {list(shape)} and finite values")


def read_start(folder: Path, info: AdapterInfo) -> dict[str, Tensor]:
    """Return the adapter that a run starts from. Raises `ConfigError` if it has another rank or scaling."""
    config, tensors = peft.read_peft(folder)
    refuse_other_scaling(config, info, folder)
    return tensors


def has_head(lora: LoraConfig | None) -> bool:
    """Return whether the adapter that a model starts from comes with a value head."""
    return lora is not None and bool(lora.adapter) and HEAD_WEIGHT in peft.read_peft(Path(lora.adapter))[1]


def refuse_other_scaling(config: Mapping[str, Any], info: AdapterInfo, folder: Path) -> None:
    """Raise `ConfigError` if an adapter has another rank or scaling than the config says. `config`: PEFT's."""
    for key, found, wanted in (
        ("rank", config["r"], info.rank),
        ("alpha", config["lora_alpha"], info.alpha),
        ("rslora", bool(config.get("use_rslora")), info.rslora),
    ):
        if found != wanted:
            raise ConfigError(f"backend.lora.{key}: is {wanted}, and the adapter {folder} has {found}; set it to that")
