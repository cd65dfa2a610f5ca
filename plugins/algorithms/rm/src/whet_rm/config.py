"""The sections of reward modelling and its loss, and what planning needs to know of them. Imports no torch."""

from typing import Any, Literal

from attrs import field, frozen, validators

from whet.component import AlgorithmFacts, LossFacts, Selection
from whet.config.bounds import BATCH, FACTOR, STEPS, between
from whet.config.sections import selection
from whet.data.model_info import ModelInfo
from whet.plan.plan import facts_of
from whet_data.preferences import PAIR_FIELDS
from whet_data.turns import TOOLS

MARGIN = "margin"
FIELDS = (*PAIR_FIELDS, MARGIN, TOOLS)
"""The columns of a record: those of a pair, by how much its chosen response is better, and the tools of both."""


PLAIN = (
    "algorithm.plain: scores are of texts without a chat template, and a judge uses that of the exported model; for a "
    "judge set model.chat_template to one that writes the texts alone"
)


def _known(instance: object, attribute: Any, value: dict[str, str]) -> None:
    unknown = [name for name in value if name not in FIELDS]
    if unknown:
        raise ValueError(f"names {', '.join(unknown)}, wanted {', '.join(FIELDS)}: what a field is, then its name")


@frozen
class RmConfig:
    """Reward modelling on pairs: give the chosen response a higher score than the rejected one."""

    batch_size: int = field(default=64, validator=between(1, BATCH))
    """Pairs that one step consumes."""
    fields: dict[str, str] = field(factory=dict, validator=_known)
    """Names of the fields in the data where they are not `prompt`, `chosen`, `rejected`, `margin` and `tools`; e.g.
    `{prompt: question, chosen: better}`."""
    plain: bool = False
    """Take prompt and responses as texts that go on without a chat template, as models that are not tuned for chat have
    it. Without a prompt, it is what both texts begin with. A judge uses a chat template all the same: that of its
    `model.chat_template` should write the texts alone."""
    loss: Selection = selection("losses", "bradley-terry")
    """The loss to minimise."""
    validate_every: int = field(default=0, validator=between(0, STEPS))
    """Steps between validations; 0: only before the first and after the last step."""


@frozen
class BradleyTerryConfig:
    """The negative log-likelihood of the preferences, where the odds of a preference are the exponential of the
    difference of scores.
    """

    margin: float = field(default=0.0, validator=between(0, FACTOR))
    """How much each record's `margin` counts: the chosen response's score is to be ahead by this times the record's.
    0: records need none."""
    label_smoothing: float = field(default=0.0, validator=[validators.ge(0), validators.lt(0.5)])
    """Share of the pairs that are taken to be the wrong way round."""
    centering: float = field(default=0.0, validator=between(0, FACTOR))
    """Weight of the square of the sum of a pair's scores, which keeps scores around 0; 0: there is no such term. The
    paper's is 0.01."""
    ties: Literal["half", "wrong", "right"] = "half"
    """How a pair with equal scores counts in `rewards/accuracies`; in TRL and NeMo RL as `wrong`."""


def reads_margin(loss: Selection, model: ModelInfo) -> bool:
    """Return whether a loss reads the records' margins."""
    return MARGIN in facts_of(loss, model, LossFacts).columns_read


def rm_facts(config: RmConfig, model: ModelInfo) -> AlgorithmFacts:
    """Return what planning needs to know of the algorithm."""
    margin = {MARGIN} if reads_margin(config.loss, model) else set()
    return AlgorithmFacts(
        inputs=frozenset({"data"}),
        data_format="pairs",
        record_fields=(tuple(config.fields.get(name, name) for name in ("chosen", "rejected", *sorted(margin))),),
        encode="whet_rm.records:encoder",
        records_per_step=config.batch_size,
        columns_written=frozenset({"chosen", *margin}),
        columns_essential=frozenset({"chosen"}),
        notes=(PLAIN,) * (config.plain and not model.chat_template),
    )


def bradley_terry_facts(config: BradleyTerryConfig, model: ModelInfo) -> LossFacts:
    """Return what planning needs to know of the loss."""
    return LossFacts(
        outputs_needed=frozenset({"values"}), columns_read=frozenset({"chosen", *([MARGIN] if config.margin else [])})
    )
