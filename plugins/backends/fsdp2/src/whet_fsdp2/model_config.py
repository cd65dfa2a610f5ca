"""The config files of an exported model folder."""

import copy
from pathlib import Path
from typing import Any


def write_config(model: Any, folder: Path, dtype: Any) -> None:
    """Write the config and the generation config of a model, as one process would load it."""
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    if hasattr(config, "distributed_config"):
        del config.distributed_config
    config.save_pretrained(folder)
    if model.can_generate() and not (folder / "generation_config.json").exists():
        model.generation_config.save_pretrained(folder)
