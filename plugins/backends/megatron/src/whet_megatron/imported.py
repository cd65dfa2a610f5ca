"""Writes a checkpoint of Megatron as a model folder, in one process."""

from pathlib import Path

from attrs import evolve

from whet.data.files import disk_errors
from whet_megatron.architecture import unquantised
from whet_megatron.export import write_config
from whet_megatron.foreign import Foreign, stored
from whet_megatron.stored import read_folder
from whet_training.export import copy_companions, write_weights
from whet_training.whole import refuse_used, whole

EMBEDDING = "embedding.word_embeddings.weight"


def import_model(checkpoint: str, out: str, model: str) -> None:
    """Write the weights of a checkpoint, with config and tokenizer of a model folder, to the folder `out`.

    The weights of that folder are not read, and may be quantised. Raises `CheckpointError` if it is no checkpoint of
    this model, and `WhetError` if `out` is no new or empty folder. After an error there is no `out`.
    """
    refuse_used(Path(out))
    info, index = unquantised(read_folder(model)), Foreign(checkpoint).index
    kind = getattr(index.state_dict_metadata.get(EMBEDDING), "properties", None)
    dtype = str(kind.dtype).removeprefix("torch.") if kind is not None else info.dtype
    with whole(Path(out)) as partial, disk_errors(partial):
        copy_companions(Path(info.path), partial)
        write_weights(partial, stored(checkpoint, info))
        write_config(evolve(info, dtype=dtype), partial, value=False)
