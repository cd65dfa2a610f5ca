"""Adapters in a checkpoint: a folder in PEFT's format that also names the weights that the adapter was trained on."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from whet.component import AdapterInfo
from whet.data.files import disk_errors, fsync
from whet.data.model_info import weight_files
from whet.errors import CheckpointError, WhetError
from whet_training.lora import refuse_other_scaling
from whet_weights.adapter import CONFIG, WEIGHTS, read_peft, write_peft

BASE = "base"
"""Key of the digest in the metadata of the file of weights."""
SAMPLED_BYTES = 4096
"""Bytes of each tensor that a digest is of."""


def write(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], digest: str) -> None:
    """Write an adapter durably, by PEFT's names. `config`: PEFT's. `digest`: `base_digest` of the model's folder."""
    write_peft(folder, tensors, config, {BASE: digest})
    with disk_errors(folder):
        for name in (WEIGHTS, CONFIG):
            fsync(folder / name)


def read(
    folder: Path, accept: Callable[[dict[str, Tensor], str], None], info: AdapterInfo, model: str, digest: str
) -> dict[str, Tensor]:
    """Return an adapter that `write` wrote, once `accept` has taken it and the name of the folder.

    Raises `CheckpointError` if it is of other weights than those in the folder `model`, if its rank or scaling is not
    that of `info`, or if `accept` raises `WhetError`.
    """
    from safetensors import safe_open

    try:
        config, tensors = read_peft(folder)
        refuse_other_scaling(config, info, folder)
        with safe_open(folder / WEIGHTS, framework="pt") as stream:
            found = (stream.metadata() or {}).get(BASE)
        if found != digest:
            raise CheckpointError(
                f"{folder} has an adapter of other weights than those in {model}; set model.path to the model that "
                "it was trained on, or export the run and begin a new one"
            )
        accept(tensors, str(folder))
    except CheckpointError:
        raise
    except WhetError as error:
        raise CheckpointError(f"{folder} cannot be loaded: {error}") from error
    return tensors


def base_digest(folder: Path) -> str:
    """Return a digest of a model folder's weights: names, shapes, dtypes, and the first bytes of each tensor."""
    digest = hashlib.blake2b(digest_size=16)
    for file in weight_files(folder):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
            header.pop("__metadata__", None)
            for name, entry in sorted(header.items()):
                begin, end = entry["data_offsets"]
                stream.seek(8 + size + begin)
                digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
                digest.update(stream.read(min(end - begin, SAMPLED_BYTES)))
    return digest.hexdigest()
