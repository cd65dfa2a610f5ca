"""The sections of DPO and KTO, and what planning needs to know of them. Imports no torch."""

from typing import Any, Literal

from attrs import field, frozen

from whet.component import AlgorithmFacts, LossFacts, Selection
from whet.config.bounds import BATCH, STEPS, between
from whet.config.sections import selection
from whet.data.model_info import ModelInfo
from whet.plan.plan import facts_of
from whet_data.preferences import PAIR_FIELDS
from whet_data.turns import TOOLS
from whet_dpo.loss_config import BASELINE, REFERENCE, RESPONSE
from whet_dpo.whole_config import whole_columns

Source = Literal["auto", "precomputed", "on-the-fly", "none"]
LABELLED_FIELDS = ("prompt", "completion", "messages", "label", "chosen", "rejected")
"""The columns of a record of KTO: `prompt`, `completion` and `label`, or `messages` and `label`, or those of a pair."""


def _known(*names: str) -> Any:
    def check(instance: object, attribute: Any, value: dict[str, str]) -> None:
        unknown = [name for name in value if name not in names]
        if unknown:
            raise ValueError(f"names {', '.join(unknown)}, wanted {', '.join(names)}: what a field is, then its name")

    return check


@frozen
class DpoConfig:
    """Preference optimisation on pairs: make the chosen response likelier than the rejected one."""

    batch_size: int = field(default=32, validator=between(1, BATCH))
    """Pairs that one step consumes."""
    fields: dict[str, str] = field(factory=dict, validator=_known(*PAIR_FIELDS, TOOLS))
    """Names of the fields in the data where they are not `prompt`, `chosen`, `rejected` and `tools`; e.g.
    `{prompt: question, chosen: better}`."""
    plain: bool = False
    """Take prompt and responses as texts that go on without a chat template, as models that are not tuned for chat have
    it. Without a prompt, it is what both texts begin with."""
    reference: Source = "auto"
    """Where the reference's logprobs come from. `precomputed`: of all data before the first step, with the weights that
    the run starts from, and kept in the run folder; no copy of them is held. `on-the-fly`: of each batch, which needs
    the backend to hold a copy (`backend.reference`). `none`: there are none. `auto`: `precomputed` where the loss reads
    them, else `none`."""
    loss: Selection = selection("losses", "dpo")
    """The loss to minimise."""
    validate_every: int = field(default=0, validator=between(0, STEPS))
    """Steps between validations; 0: only before the first and after the last step."""


@frozen
class KtoConfig:
    """Preference optimisation on single responses that are called desirable or not."""

    batch_size: int = field(default=64, validator=between(2, BATCH))
    """Records that one step consumes; at least two, since each borrows another's response for the baseline."""
    fields: dict[str, str] = field(factory=dict, validator=_known(*LABELLED_FIELDS, TOOLS))
    """Names of the fields in the data where they are not `prompt`, `completion` and `label`, or `messages` and `label`,
    or those of a pair: `prompt`, `chosen` and `rejected`; and of `tools`."""
    plain: bool = False
    """Take prompt and responses as texts that go on without a chat template, as models that are not tuned for chat have
    it. Without a prompt, it is what both texts of a pair begin with."""
    reference: Literal["auto", "precomputed", "on-the-fly"] = "auto"
    """Where the reference's logprobs come from; see `dpo`. `auto`: `precomputed`. With a baseline, of the responses in
    their place only: those in another's are scored with each batch."""
    baseline: Literal["batch", "none"] = "batch"
    """The number that the loss `kto` compares a reward with. `batch`: the divergence of the policy from the reference,
    estimated over the whole batch from responses to other prompts; needs the backend to hold a copy of the weights that
    the run started from (`backend.reference`). `none`: 0. Losses that read no baseline have none computed."""
    loss: Selection = selection("losses", "kto")
    """The loss to minimise."""
    validate_every: int = field(default=0, validator=between(0, STEPS))
    """Steps between validations; 0: only before the first and after the last step."""


def reads_reference(loss: Selection, model: ModelInfo) -> bool:
    """Return whether a loss reads the reference's logprobs."""
    return REFERENCE in facts_of(loss, model, LossFacts).columns_read


def reads_response_mask(loss: Selection | None, model: ModelInfo) -> bool:
    """Return whether a loss learns prompts, too, and reads which tokens are the response's."""
    return loss is not None and RESPONSE in facts_of(loss, model, LossFacts).columns_read


def reads_baseline(config: KtoConfig, model: ModelInfo) -> bool:
    """Return whether there is a baseline to estimate: the loss reads it, and it is not switched off."""
    read = config.loss is None or BASELINE in facts_of(config.loss, model, LossFacts).columns_read
    return config.baseline == "batch" and read


def source(config: DpoConfig | KtoConfig, model: ModelInfo) -> Source:
    """Return where the reference's logprobs come from, `auto` resolved."""
    if config.reference != "auto":
        return config.reference
    return "precomputed" if reads_reference(config.loss, model) else "none"


def _called(fields: dict[str, str], *names: str) -> tuple[str, ...]:
    """Return what fields are called in the data."""
    return tuple(fields.get(name, name) for name in names)


def dpo_facts(config: DpoConfig, model: ModelInfo) -> AlgorithmFacts:
    """Return what planning needs to know of the algorithm."""
    chosen = source(config, model)
    written = {"chosen", *({REFERENCE} if chosen != "none" else ()), *whole_columns(config.loss)}
    if reads_response_mask(config.loss, model):
        written.add(RESPONSE)
    return AlgorithmFacts(
        inputs=frozenset({"data"}),
        data_format="pairs",
        record_fields=(_called(config.fields, "chosen", "rejected"),),
        encode="whet_dpo.records:pair_encoder",
        records_per_step=config.batch_size,
        columns_written=frozenset(written),
        columns_essential=frozenset({"chosen"}),
        weights_needed=frozenset({"reference"} if chosen == "on-the-fly" else ()),
    )


def kto_facts(config: KtoConfig, model: ModelInfo) -> AlgorithmFacts:
    """Return what planning needs to know of the algorithm."""
    chosen = source(config, model)
    held = chosen == "on-the-fly" or reads_baseline(config, model)
    reference = {REFERENCE} if chosen != "none" else set()
    return AlgorithmFacts(
        inputs=frozenset({"data"}),
        data_format="labelled",
        record_fields=(
            _called(config.fields, "prompt", "completion", "label"),
            *([] if config.plain else [_called(config.fields, "messages", "label")]),
            _called(config.fields, "chosen", "rejected"),
        ),
        encode="whet_dpo.records:labelled_encoder",
        records_per_step=config.batch_size,
        columns_written=frozenset({"desirable", BASELINE, *reference, *whole_columns(config.loss)}),
        columns_essential=frozenset({"desirable"}),
        weights_needed=frozenset({"reference"} if held else ()),
    )
