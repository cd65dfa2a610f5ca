"""Off-policy distillation: learn what a teacher would have said in the place of a data set's responses.

Hinton et al. 2015 (arXiv:1503.02531), per token of a language model; the data may have been written by anybody.
"""

from functools import partial
from typing import TYPE_CHECKING

from whet.data.model_info import ModelInfo, read_model
from whet_data.demonstrations import encode
from whet_distill.config import DistillDataConfig
from whet_distill.teaching import Teaching
from whet_ops.aggregation import counted
from whet_ops.algorithms.config import AverageConfig
from whet_ops.algorithms.offline_loop import offline_loop, read_data, trained_tokens

if TYPE_CHECKING:
    from whet.data.batch import Batch
    from whet.interfaces.algorithm import OfflineParts
    from whet.interfaces.data import Encode


class DistillData:
    """The loop: read a batch, ask the teacher, train, and validate when due."""

    def __init__(self, config: DistillDataConfig) -> None:
        self.config = config

    def run(self, parts: "OfflineParts") -> None:
        """Run from the first step that is left to the last."""
        data = read_data(parts)
        teach = Teaching(self.config, parts, read_model(parts.chat.folder))
        offline_loop(parts, data, self.config, prepare=lambda batch, step: teach(batch), weight=self.weight)

    def weight(self, batch: "Batch") -> float:
        """Return the weight of a batch in `validation/loss`: the number that its loss is divided by."""
        loss = self.config.loss.config
        return float(counted(batch, loss)) if isinstance(loss, AverageConfig) else trained_tokens(batch)


def encoder(config: DistillDataConfig, model: ModelInfo) -> "Encode":
    """Return what turns a record into a sequence to train on."""
    return partial(encode, names=config.fields, train_on=config.train_on)
