"""LoRA adapters that come without their base: written as PEFT writes them, for vLLM to load.

vLLM takes an adapter from a folder. A new adapter replaces the one before under the same number, so requests that run
through a weight sync continue with the new one.
"""

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from whet.component import AdapterInfo
from whet.errors import WeightSyncError
from whet_weights.adapter import pairs, peft_config, write_peft

NAME, NUMBER = "whet", 1
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks for which vLLM reserves memory; an adapter may have less."""
MEMORY = Path("/dev/shm")


def engine_arguments(info: AdapterInfo | None) -> dict[str, Any]:
    """Return the arguments of an engine that must apply an adapter. None: it applies none."""
    if info is None:
        return {}
    rank = next((rank for rank in RANKS if rank >= info.rank), info.rank)
    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": rank}


def check(tensors: Mapping[str, Any], info: AdapterInfo, stored: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the modules of an adapter. Raises `WeightSyncError` unless each is a layer of the model folder's model.

    `stored`: the shapes of the folder's tensors. vLLM itself ignores what belongs to no layer.
    """
    found = pairs(tensors.items(), info)
    for module, (a, b) in found.items():
        shape = stored.get(f"{module}.weight")
        if shape != (b.shape[0], a.shape[1]):
            has = "no such layer" if shape is None else f"the shape {shape}"
            raise WeightSyncError(f"an adapter of {module} came for {(b.shape[0], a.shape[1])}, the model has {has}")
    return list(found)


@contextmanager
def folder(tensors: Mapping[str, Any], info: AdapterInfo, base: str, modules: Iterable[str]) -> Iterator[str]:
    """Write an adapter into a temporary folder, in memory where the system has such a place."""
    place = MEMORY if MEMORY.is_dir() else None
    path = Path(tempfile.mkdtemp(prefix="whet-adapter-", dir=place))
    try:
        names = {module.rpartition(".")[2] for module in modules}
        write_peft(path, tensors, peft_config(info, base, names))
        yield str(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)
