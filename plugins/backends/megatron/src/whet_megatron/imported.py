"""Writes a checkpoint of Megatron as a model folder, in one process."""

import shutil
from pathlib import Path

from attrs import evolve

from whet.data.files import disk_errors
from whet.errors import CheckpointError
from whet_megatron.architecture import unquantised
from whet_megatron.export import write_config
from whet_megatron.foreign import Foreign, stored
from whet_megatron.stored import read_folder
from whet_training.export import copy_companions, write_weights

EMBEDDING = "embedding.word_embeddings.weight"


def import_model(checkpoint: str, out: str, model: str) -> None:
    """Write the weights of a checkpoint, with config and tokenizer of a model folder, to the folder `out`.

    The weights of that folder are not read, and may be quantised. Raises `CheckpointError` if it is no checkpoint of
    this model. Then there is no `out`.
    """
    place, partial = Path(out), Path(out).with_name(f"{Path(out).name}.partial")
    if place.exists():
        raise CheckpointError(f"{out} is there already; choose another folder for the model")
    info, index = unquantised(read_folder(model)), Foreign(checkpoint).index
    kind = getattr(index.state_dict_metadata.get(EMBEDDING), "properties", None)
    dtype = str(kind.dtype).removeprefix("torch.") if kind is not None else info.dtype
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with disk_errors(partial):
            copy_companions(Path(info.path), partial)
            write_weights(partial, stored(checkpoint, info))
            write_config(evolve(info, dtype=dtype), partial, value=False)
            partial.rename(place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
