"""The sections of DPO and KTO and of their losses, and what planning needs to know of them. Imports no torch."""

from typing import Any, Literal

from attrs import Factory, field, frozen, validators

from whet.component import Facts, Selection
from whet.config.sections import selection
from whet.data.pairs import PAIR_FIELDS
from whet.model import ModelInfo
from whet.plan import facts_of

Source = Literal["auto", "precomputed", "on-the-fly", "none"]
REFERENCE = "reference_logprobs"
ANSWER = "answer_mask"
"""Column [N] of the tokens of an answer, where the prompt before it is learned as well."""
LABELLED_FIELDS = ("prompt", "completion", "label", "chosen", "rejected")
"""What a record of KTO may have: `prompt`, `completion` and `label`, or those of a pair."""


def _known(*names: str) -> Any:
    def check(instance: object, attribute: Any, value: dict[str, str]) -> None:
        unknown = [name for name in value if name not in names]
        if unknown:
            raise ValueError(f"names {', '.join(unknown)}, wanted {', '.join(names)}: what a field is, then its name")

    return check


_POSITIVE = validators.gt(0.0)


@frozen
class DpoConfig:
    """Preference optimisation on pairs: make the chosen answer likelier than the rejected one."""

    batch_size: int = field(default=32, validator=validators.ge(1))
    """Pairs that one step consumes."""
    fields: dict[str, str] = field(factory=dict, validator=_known(*PAIR_FIELDS))
    """Names of the fields in the data where they are not `prompt`, `chosen` and `rejected`; e.g.
    `{prompt: question, chosen: better}`."""
    reference: Source = "auto"
    """Where the reference's logprobs come from. `precomputed`: of all data before the first step, with the weights that
    the run starts from, and kept in the run folder; no copy of them is held. `on-the-fly`: of each batch, which needs
    the backend to hold a copy (`backend.reference`). `none`: there are none. `auto`: `precomputed` where the loss reads
    them, else `none`."""
    loss: Selection = selection("losses", "dpo")
    """What is minimised."""
    validate_every: int = field(default=0, validator=validators.ge(0))
    """Steps between validations; 0: only before the first and after the last step."""


@frozen
class KtoConfig:
    """Preference optimisation on single answers that are called desirable or not."""

    batch_size: int = field(default=64, validator=validators.ge(2))
    """Records that one step consumes; at least two, since each borrows another's answer for the baseline."""
    fields: dict[str, str] = field(factory=dict, validator=_known(*LABELLED_FIELDS))
    """Names of the fields in the data where they are not `prompt`, `completion` and `label`, or those of a pair:
    `prompt`, `chosen` and `rejected`."""
    reference: Literal["auto", "precomputed", "on-the-fly"] = "auto"
    """Where the reference's logprobs come from; see `dpo`. `auto`: `precomputed`. With a baseline, of the answers in
    their place only: those in another's are scored with each batch."""
    baseline: Literal["batch", "none"] = "batch"
    """What a reward is compared with. `batch`: the divergence of the policy from the reference, estimated over the
    whole batch from answers to other prompts; needs the backend to hold a copy of the weights that the run started
    from (`backend.reference`). `none`: 0."""
    loss: Selection = selection("losses", "kto")
    """What is minimised."""
    validate_every: int = field(default=0, validator=validators.ge(0))
    """Steps between validations; 0: only before the first and after the last step."""


@frozen
class SftTerm:
    """The negative log-likelihood of the chosen answers, as a second term of a loss."""

    weight: float = field(default=0.0, validator=validators.ge(0))
    """Its weight; 0: there is no such term."""
    average: Literal["token", "sequence", "none"] = "token"
    """`token`: the mean over all chosen tokens of the batch. `sequence`: the mean over answers of each one's mean over
    tokens. `none`: the mean over answers of each one's sum."""
    of: Literal["answer", "conversation"] = "answer"
    """Whose tokens: those of the `answer`, or of the whole `conversation`, its prompt included, as TRL's ORPO."""


@frozen
class PairMetrics:
    """How rewards and logprobs are reported. None of it changes what is learned."""

    ties: Literal["half", "wrong", "right"] = "half"
    """What a pair whose rewards are equal counts for in `rewards/accuracies`; in TRL and NeMo RL it is `wrong`."""
    rewards: Literal["compared", "summed"] = "compared"
    """`compared`: the score that the loss compares. `summed`: summed over tokens also where the loss takes means, as in
    TRL's DPO."""
    scaled: bool = True
    """Multiply rewards by `beta`; not so in NeMo RL."""
    logps: Literal["sum", "mean"] = "sum"
    """Sum an answer's logprobs in `logps/*`, or average them, as TRL does in SimPO and ORPO."""


@frozen
class _Preference:
    """What the losses against a reference have in common."""

    beta: float = field(default=0.1, validator=_POSITIVE)
    """How dear it is to move away from the reference: scales the log-ratio of policy and reference."""
    average_logprobs: bool = False
    """Divide an answer's log-ratio by its tokens, so that long answers weigh no more than short ones."""
    sft: SftTerm = Factory(SftTerm)
    """The likelihood of the chosen answers as a second term."""
    metrics: PairMetrics = Factory(PairMetrics)
    """How rewards and logprobs are reported."""


@frozen
class DpoLossConfig(_Preference):
    """DPO: the log-loss of telling the chosen answer from the rejected one by their log-ratios to a reference."""

    label_smoothing: float = field(default=0.0, validator=[validators.ge(0), validators.lt(0.5)])
    """Share of the pairs that are taken to be the wrong way round (conservative DPO)."""


@frozen
class RobustDpoConfig(_Preference):
    """DPO made unbiased against labels that are wrong with a known probability."""

    flip_probability: float = field(default=0.1, validator=[validators.ge(0), validators.lt(0.5)])
    """Probability that a pair is the wrong way round."""


@frozen
class IpoConfig(_Preference):
    """IPO: a squared loss that wants the log-ratios to differ by a fixed margin, so that sure pairs cannot run away."""

    average_logprobs: bool = True
    """Compare log-ratios per token, as the paper's authors did; `false`: of whole answers, as the paper's formula
    reads."""


@frozen
class HingeConfig(_Preference):
    """The hinge loss of SLiC on log-ratios: a pair that is right by a margin teaches nothing."""


@frozen
class ApoZeroConfig(_Preference):
    """APO-zero: make chosen answers likelier and rejected ones less likely, for answers better than the policy's."""


@frozen
class ApoDownConfig(_Preference):
    """APO-down: make both less likely, the rejected one more so, for answers worse than the policy's."""


@frozen
class SimpoConfig:
    """SimPO: compare mean logprobs per token, without a reference, by a margin."""

    beta: float = field(default=2.0, validator=_POSITIVE)
    """Scales the mean logprob of an answer."""
    gamma: float = field(default=1.0, validator=validators.ge(0))
    """Margin by which the chosen answer is to be ahead, after scaling."""
    label_smoothing: float = field(default=0.0, validator=[validators.ge(0), validators.lt(0.5)])
    """Share of the pairs that are taken to be the wrong way round."""
    sft: SftTerm = Factory(SftTerm)
    """The likelihood of the chosen answers as a second term."""
    metrics: PairMetrics = Factory(PairMetrics)
    """How rewards and logprobs are reported."""


@frozen
class OrpoConfig:
    """ORPO: the likelihood of the chosen answers, and the odds of chosen against rejected, without a reference."""

    beta: float = field(default=0.1, validator=_POSITIVE)
    """Weight of the odds ratio (the paper's lambda)."""
    sft: SftTerm = Factory(lambda: SftTerm(weight=1.0))
    """The likelihood of the chosen answers."""
    metrics: PairMetrics = Factory(PairMetrics)
    """How rewards and logprobs are reported."""


@frozen
class KtoLossConfig:
    """KTO: desirable answers are to be worth more than a baseline, the others less."""

    beta: float = field(default=0.1, validator=_POSITIVE)
    """How dear it is to move away from the reference: scales the log-ratio of policy and reference."""
    desirable_weight: float = field(default=1.0, validator=validators.ge(0))
    """Weight of desirable answers."""
    undesirable_weight: float = field(default=1.0, validator=validators.ge(0))
    """Weight of the others. With unequal numbers, weights times numbers should be about the same."""
    average: Literal["answers", "kinds"] = "answers"
    """`answers`: the mean over all answers, as in the paper. `kinds`: the mean of two means, over the desirable answers
    of the batch and over the others, so that neither kind pulls more, however many there are of each."""
    metrics: PairMetrics = Factory(PairMetrics)
    """How rewards and logprobs are reported."""


def reads_reference(loss: Selection, model: ModelInfo) -> bool:
    """Say whether a loss reads the reference's logprobs."""
    return REFERENCE in facts_of(loss, model).columns_read


def reads_answers(loss: Selection | None, model: ModelInfo) -> bool:
    """Say whether a loss learns prompts, too, and reads which tokens are the answer's."""
    return loss is not None and ANSWER in facts_of(loss, model).columns_read


def source(config: DpoConfig | KtoConfig, model: ModelInfo) -> Source:
    """Say where the reference's logprobs come from, `auto` resolved."""
    if config.reference != "auto":
        return config.reference
    return "precomputed" if reads_reference(config.loss, model) else "none"


def _called(fields: dict[str, str], *names: str) -> tuple[str, ...]:
    """Say what fields are called in the data."""
    return tuple(fields.get(name, name) for name in names)


def dpo_facts(config: DpoConfig, model: ModelInfo) -> Facts:
    """Say what planning needs to know of the algorithm."""
    chosen = source(config, model)
    written = {"chosen", *({REFERENCE} if chosen != "none" else ())}
    if reads_answers(config.loss, model):
        written.add(ANSWER)
    return Facts(
        inputs=frozenset({"data"}),
        data_format="pairs",
        record_fields=(_called(config.fields, "chosen", "rejected"),),
        columns_written=frozenset(written),
        columns_essential=frozenset({"chosen"}),
        weights_needed=frozenset({"reference"} if chosen == "on-the-fly" else ()),
    )


def kto_facts(config: KtoConfig, model: ModelInfo) -> Facts:
    """Say what planning needs to know of the algorithm."""
    chosen = source(config, model)
    held = chosen == "on-the-fly" or config.baseline == "batch"
    return Facts(
        inputs=frozenset({"data"}),
        data_format="labelled",
        record_fields=(
            _called(config.fields, "prompt", "completion", "label"),
            _called(config.fields, "chosen", "rejected"),
        ),
        columns_written=frozenset({"desirable", "kl_baseline", *({REFERENCE} if chosen != "none" else ())}),
        columns_essential=frozenset({"desirable"}),
        weights_needed=frozenset({"reference"} if held else ()),
    )


def pair_columns(sft: SftTerm) -> tuple[str, ...]:
    """Give the columns that every loss on pairs reads."""
    return ("chosen", ANSWER) if sft.weight and sft.of == "conversation" else ("chosen",)


def referenced_facts(config: _Preference, model: ModelInfo) -> Facts:
    """Say what planning needs to know of a loss on pairs that has a reference."""
    read = frozenset({*pair_columns(config.sft), REFERENCE})
    return Facts(outputs_needed=frozenset({"logprobs"}), columns_read=read)


def reference_free_facts(config: SimpoConfig | OrpoConfig, model: ModelInfo) -> Facts:
    """Say what planning needs to know of a loss on pairs that has none."""
    return Facts(outputs_needed=frozenset({"logprobs"}), columns_read=frozenset(pair_columns(config.sft)))


def kto_loss_facts(config: KtoLossConfig, model: ModelInfo) -> Facts:
    """Say what planning needs to know of the loss."""
    return Facts(
        outputs_needed=frozenset({"logprobs"}), columns_read=frozenset({"desirable", "kl_baseline", REFERENCE})
    )
