"""The reference's logprobs of a data set: computed once, before the first step, and kept in the run folder.

    RUN/reference/train-KEY.npy   RUN/reference/validation-KEY.npy      those of trained tokens, in order

The key is a hash of the tokens and of the model, so a resume takes what is there and nothing else.
"""

import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.data.files import disk_errors
from whet.data.model_info import fingerprint
from whet.errors import CheckpointError, WhetError
from whet.interfaces.data import PreparedData
from whet_data.offline import Part
from whet_dpo.loss_config import REFERENCE

if TYPE_CHECKING:
    from whet.interfaces.algorithm import OfflineParts
    from whet.interfaces.backend import Weights


def precomputed(parts: "OfflineParts", data: PreparedData, batch_size: int) -> PreparedData:
    """Return the data with the column `reference_logprobs`; it is scored in batches of so many units where it must be.

    Before the first step the policy is the reference. Raises `CheckpointError` where the run is beyond that, its file
    is gone, and the backend holds no copy of the reference.
    """
    folder = Path(parts.config.run.folder) / "reference"
    model = repr((fingerprint(parts.chat.folder), parts.config.model.dtype))

    def column(name: str, part: Part) -> Mapping[str, Any]:
        mask = part.whole["loss_mask"]
        file = folder / f"{name}-{_key(part, model)}.npy"
        found = _read(file, int(mask.sum()))
        if found is None:
            found = _scored(parts, data, name, part, batch_size, file)
            _write(file, found)
        values = np.zeros(len(mask), np.float32)
        values[mask] = found
        return {REFERENCE: values}

    return data.with_columns(column)


def _scored(parts: "OfflineParts", data: PreparedData, name: str, part: Part, size: int, file: Path) -> Any:
    weights: Weights = "policy" if parts.steps.done == 0 else "reference"
    found, count = [], len(part)
    for number, batch in enumerate(part.batches(size)):
        try:
            scores = parts.backend.score(batch, ("logprobs",), weights)["logprobs"]
        except WhetError as error:
            if weights == "policy":
                raise
            raise CheckpointError(
                f"{file} is gone, and after step {parts.steps.done} the policy is no longer the reference: {error}, "
                "and list that in run.allow_changed; or start again in another run.folder"
            ) from error
        found.append(scores[batch["loss_mask"]])
        data.status(f"{name} data: {min((number + 1) * size, count):,} of {count:,} scored by the reference")
    return np.concatenate(found)


def _key(part: Part, model: str) -> str:
    digest = blake2b(model.encode(), digest_size=8)
    for name in ("tokens", "loss_mask", "lengths"):
        digest.update(part.whole[name].tobytes())
    return digest.hexdigest()


def _read(file: Path, count: int) -> Any:
    """Read a file of so many numbers; None where there is none that holds them."""
    try:
        found = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.shape == (count,) and found.dtype == np.float32 else None


def _write(file: Path, values: Any) -> None:
    """Write a file whole: it is either there or not."""
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(file.name + ".partial")
        with partial.open("wb") as stream:
            np.save(stream, values, allow_pickle=False)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
