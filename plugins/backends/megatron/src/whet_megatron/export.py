"""The config files of an exported model folder."""

from pathlib import Path

from whet.data.model_info import ModelInfo
from whet_megatron.architecture import QUANTISED
from whet_training.export import set_padding


def write_config(info: ModelInfo, folder: Path, *, value: bool) -> None:
    """Write the config of the model, with the dtype of its weights; with a `value` head that of a classifier."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(info.path, local_files_only=True)
    config.dtype = info.dtype
    for part in (config, config.get_text_config()):
        vars(part).pop(QUANTISED, None)  # the weights that are written are not
    if value:
        set_padding(config, folder)
        config.architectures = [info.architecture.replace("ForCausalLM", "ForSequenceClassification")]
        config.num_labels = 1
    config.save_pretrained(folder)
