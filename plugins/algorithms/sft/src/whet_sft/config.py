"""The sections of SFT and its loss, and what planning needs to know of them."""

from typing import Literal

from attrs import field, frozen

from whet.component import AlgorithmFacts, LossFacts, Selection
from whet.config.bounds import BATCH, STEPS, between
from whet.config.sections import selection
from whet.data.model_info import ModelInfo
from whet.interfaces.chat import TrainOn
from whet_data.demonstrations import FIELDS, known_fields, record_fields


@frozen
class SftConfig:
    """Supervised fine-tuning: learn to write what the data holds."""

    batch_size: int = field(default=64, validator=between(1, BATCH))
    """Records that one step consumes."""
    train_on: TrainOn = "all"
    """The turns of the assistant to train on: `all`, or only the `last`."""
    fields: dict[str, str] = field(factory=dict, validator=known_fields(FIELDS))
    """Names of the fields in the data where they are not `messages`, or `prompt` and `completion`, or `text`; e.g.
    `{prompt: question, completion: answer}`."""
    plain: bool = False
    """Take `prompt` and `completion` as text that goes on without a chat template, as models that are not tuned for
    chat have it."""
    loss: Selection = selection("losses", "nll")
    """The loss to minimise."""
    validate_every: int = field(default=0, validator=between(0, STEPS))
    """Steps between validation losses; 0: only before the first and after the last step."""


@frozen
class NllConfig:
    """The negative log-likelihood of the data, as the mean over all trained tokens of a batch."""

    weighting: Literal["none", "probability"] = "none"
    """The weight of a token. `none`: all tokens weigh 1. `probability`: its probability under the model, without
    gradient. This is Dynamic Fine-Tuning, TRL's `loss_type: dft`: unlikely tokens of the data are learnt less."""


def sft_facts(config: SftConfig, model: ModelInfo) -> AlgorithmFacts:
    """Return what planning needs to know of the algorithm."""
    return AlgorithmFacts(
        inputs=frozenset({"data"}),
        data_format="conversations",
        record_fields=record_fields(config.fields),
        encode="whet_sft.sft:encoder",
        records_per_step=config.batch_size,
    )


def nll_facts(config: NllConfig, model: ModelInfo) -> LossFacts:
    """Return what planning needs to know of the loss."""
    return LossFacts(outputs_needed=frozenset({"logprobs"}))
