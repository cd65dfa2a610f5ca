"""Adapters in a checkpoint: a folder in PEFT's format that also names the weights that the adapter was trained on."""

import hashlib
import json
import os
from pathlib import Path

from whet.data.files import disk_errors
from whet.errors import CheckpointError, WhetError
from whet_fsdp2.lora import Adapters
from whet_weights.adapter import CONFIG, WEIGHTS, read_peft, write_peft

BASE = "base"
"""Key of the digest in the metadata of the file of weights."""
SAMPLED_BYTES = 4096
"""Bytes of each tensor that a digest is of."""


def write(folder: Path, adapters: Adapters, model: str, digest: str) -> None:
    """Write adapters durably. `model` is the folder of the model, and `digest` its `base_digest`."""
    write_peft(folder, dict(adapters.stored()), adapters.peft_config(model), {BASE: digest})
    with disk_errors(folder):
        for name in (WEIGHTS, CONFIG):
            with (folder / name).open("rb+") as stream:
                os.fsync(stream.fileno())


def read(folder: Path, adapters: Adapters, model: str, digest: str) -> None:
    """Set adapters from a folder that `write` wrote. Raises `CheckpointError` if they are of other weights."""
    from safetensors import safe_open

    try:
        _, tensors = read_peft(folder)
        with safe_open(folder / WEIGHTS, framework="pt") as stream:
            found = (stream.metadata() or {}).get(BASE)
        if found != digest:
            raise CheckpointError(
                f"{folder} has an adapter of other weights than those in {model}; set model.path to the model that "
                "it was trained on, or export the run and begin a new one"
            )
        adapters.put(tensors, str(folder))
    except CheckpointError:
        raise
    except WhetError as error:
        raise CheckpointError(f"{folder} cannot be loaded: {error}") from error


def base_digest(folder: Path) -> str:
    """Return a digest of a model folder's weights: names, shapes, dtypes, and the first bytes of each tensor."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.glob("*.safetensors")):
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
