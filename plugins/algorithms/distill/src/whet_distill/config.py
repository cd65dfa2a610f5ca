"""The sections of distillation and its losses, and what planning needs to know of them."""

from collections.abc import Iterable
from typing import Any, Literal

from attrs import evolve, field, frozen, validators

from whet.component import AlgorithmFacts, LossFacts, RoleNeed, Selection
from whet.config.bounds import BATCH, FACTOR, GROUP, STEPS, above, between
from whet.config.sections import selection
from whet.data.model_info import ModelInfo
from whet.interfaces.chat import TrainOn
from whet.plan.plan import facts_of
from whet_data.demonstrations import FIELDS, known_fields, record_fields
from whet_ops.algorithms.config import AverageConfig, MinibatchConfig

TOPK_COLUMNS = frozenset({"topk_ids", "teacher_topk_logprobs"})
TOKEN_COLUMNS = frozenset({"teacher_logprobs", "advantages"})
"""The batch columns that losses read from a teacher: its logprobs of the likeliest tokens, or of the sampled tokens."""


@frozen(kw_only=True)
class TaughtConfig:
    """The keys that distillation from rollouts and from data share."""

    topk: int = field(default=64, validator=between(1, GROUP))
    """Number of tokens that teacher and student are compared on at each position, for losses that read them."""
    topk_of: Literal["teacher", "student"] = "teacher"
    """The model whose likeliest tokens are compared. `student` costs a forward pass of the student."""
    loss: Selection = selection("losses", "topk-kl")
    """The loss to minimise."""


@frozen(kw_only=True)
class DistillConfig(MinibatchConfig, TaughtConfig):
    """On-policy distillation: the student responds, and teachers say what they would have said."""

    prompts_per_step: int = field(default=32, validator=between(1, BATCH))
    """Number of groups of one step."""
    group_size: int = field(default=1, validator=between(1, GROUP))
    """Responses to each prompt."""
    old_logprobs: Literal["sampler", "trainer"] = "sampler"
    """For losses that read advantages: the logprobs that the teacher's are compared with, which are also the
    denominator of the ratio. `sampler`: those recorded while sampling. `trainer`: those of the student's weights before
    the step, as in NeMo RL, at the cost of a forward pass."""
    teachers: dict[str, str] = field(factory=dict)
    """The role of the teacher of each environment, by the environment's name. An environment that is not named has the
    role `teacher`."""


@frozen(kw_only=True)
class DistillDataConfig(TaughtConfig):
    """Off-policy distillation: a teacher says what it would have said in the place of a data set's responses."""

    batch_size: int = field(default=64, validator=between(1, BATCH))
    """Number of records of one step."""
    train_on: TrainOn = "all"
    """The turns of the assistant to train on: `all`, or only the `last`."""
    fields: dict[str, str] = field(factory=dict, validator=known_fields(FIELDS))
    """Names of the fields in the data where they are not `messages`, or `prompt` and `completion`, or `text`."""
    validate_every: int = field(default=0, validator=between(0, STEPS))
    """Number of steps between validation losses; 0: only before the first and after the last step."""


def _share(instance: object, attribute: Any, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"is {value:g}, wanted a share between 0 and 1")


def _inside(instance: object, attribute: Any, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"is {value:g}, wanted a number between 0 and 1; `divergence: mixed` has both ends")


@frozen
class DivergenceConfig(AverageConfig):
    """The keys of losses that compare whole distributions."""

    divergence: Literal["mixed", "jensen-shannon"] = "mixed"
    """`mixed`: a sum of the forward and the reverse divergence, weighted by `forward`. `jensen-shannon`: the
    divergences of both models from a mixture of both, weighted by `beta` (GKD)."""
    forward: float = field(default=1.0, validator=[_share, between(0, 1)])
    """For `mixed`: the share of the forward divergence KL(teacher || student); the rest is the reverse divergence. 1:
    forward alone, 0: reverse alone."""
    beta: float = field(default=0.5, validator=[_inside, above(0, 1)])
    """For `jensen-shannon`: the share of the teacher in the mixture. Towards 0 it becomes a forward divergence of
    little weight, towards 1 a reverse one."""

    @property
    def needed(self) -> frozenset[str]:
        """Return the outputs that hold the divergence over the whole vocabulary."""
        return frozenset({"jensen_shannon"} if self.divergence == "jensen-shannon" else {"kl_forward", "kl_reverse"})


@frozen
class TopkKlConfig(DivergenceConfig):
    """The divergence of student and teacher over a few tokens at each place."""

    outside: Literal["renormalise", "zero", "ignore", "rest"] = "renormalise"
    """How tokens that are not compared count; see Numerics."""
    likelihood: float = field(default=0.0, validator=between(0, FACTOR))
    """Weight of a second term: the negative log-likelihood of the trained tokens, averaged like the first."""


@frozen
class FullKlConfig(DivergenceConfig):
    """The divergence over the whole vocabulary. The student's workers must hold the teacher: `backend.teacher`."""

    likelihood: float = field(default=0.0, validator=between(0, FACTOR))
    """Weight of a second term: the negative log-likelihood of the trained tokens, averaged like the first."""


@frozen
class SampleKlConfig(AverageConfig):
    """A divergence of student and teacher, estimated at each token from the token alone.

    It needs one logprob of the teacher for each token. See Numerics for the gradient of each estimator.
    """

    estimator: Literal["k2", "k3", "abs"] = "k3"
    """The estimate, as verl's `loss_mode`. k1 is no choice: its gradient does not depend on the teacher, see
    `teacher-pg`."""
    clamp_log_ratio: float = field(default=20.0, validator=between(0, FACTOR))
    """Bound of log student - log teacher, in nats, beyond which a token gets no gradient; 0: no bound."""
    clamp: float = field(default=10.0, validator=between(0, FACTOR))
    """Bound of the estimate, in nats, beyond which a token gets no gradient; 0: no bound."""


@frozen
class TeacherPgConfig(AverageConfig):
    """A policy gradient. The advantage of a token is the teacher's logprob minus the student's."""

    clip_low: float = field(default=0.2, validator=[validators.ge(0), validators.le(1)])
    """A ratio below 1 minus this is no longer pushed down."""
    clip_high: float = field(default=0.2, validator=between(0, FACTOR))
    """A ratio above 1 plus this is no longer pushed up."""
    clip_advantages: float = field(default=0.0, validator=between(0, FACTOR))
    """Bound of the advantages in both directions, in nats; 0: no bound."""


def distill_facts(config: DistillConfig, model: ModelInfo) -> AlgorithmFacts:
    """Return what planning needs to know of the loop on rollouts."""
    read, wanted = facts_of(config.loss, model, LossFacts).columns_read, need(config, model)
    taught = dict.fromkeys(sorted({"teacher", *config.teachers.values()}), evolve(wanted, conversations=True))
    return AlgorithmFacts(
        inputs=frozenset({"rollouts"}),
        columns_written=TOPK_COLUMNS | TOKEN_COLUMNS | ({"old_logprobs"} if read & TOKEN_COLUMNS else set()),
        columns_essential=essential(config, model, {"teacher_topk_logprobs", *TOKEN_COLUMNS}),
        outputs_needed=own_outputs(config, model),
        token_advantages="advantages" in read,
        group_size=config.group_size,
        groups_per_step=config.prompts_per_step,
        optimizer_steps=lambda steps: {"backend": steps * config.minibatches},
        roles=taught if wanted.outputs else {},
    )


def distill_data_facts(config: DistillDataConfig, model: ModelInfo) -> AlgorithmFacts:
    """Return what planning needs to know of the loop on data."""
    wanted = need(config, model)
    return AlgorithmFacts(
        inputs=frozenset({"data"}),
        data_format="conversations",
        record_fields=record_fields(config.fields),
        encode="whet_distill.data:encoder",
        records_per_step=config.batch_size,
        columns_written=TOPK_COLUMNS | {"teacher_logprobs"},
        columns_essential=essential(config, model, {"teacher_topk_logprobs", "teacher_logprobs"}),
        outputs_needed=own_outputs(config, model),
        roles={"teacher": wanted} if wanted.outputs else {},
    )


def essential(config: TaughtConfig, model: ModelInfo, columns: Iterable[str]) -> frozenset[str]:
    """Return the columns of which the loss must read one: none if its outputs compare with a teacher already."""
    compared = facts_of(config.loss, model, LossFacts).outputs_needed & {"kl_forward", "kl_reverse", "jensen_shannon"}
    return frozenset(() if compared else columns)


def own_outputs(config: TaughtConfig, model: ModelInfo) -> frozenset[str]:
    """Return what the algorithm scores with the student: its likeliest tokens, where they are compared."""
    compared = facts_of(config.loss, model, LossFacts).columns_read & TOPK_COLUMNS
    return frozenset({"topk_ids"} if compared and config.topk_of == "student" else ())


def need(config: TaughtConfig, model: ModelInfo) -> RoleNeed:
    """Return what the loss wants of a teacher: nothing where the student's workers hold it."""
    read = facts_of(config.loss, model, LossFacts).columns_read
    outputs = set[str]()
    if read & TOPK_COLUMNS:
        outputs |= {"logprobs_at"} if config.topk_of == "student" else {"topk_ids", "topk_logprobs"}
    if read & TOKEN_COLUMNS:
        outputs.add("logprobs")
    return RoleNeed(frozenset(outputs))


def topk_kl_facts(config: TopkKlConfig, model: ModelInfo) -> LossFacts:
    """Return what planning needs to know of the loss."""
    entropy = {"entropy"} if wants_entropy(config) else set()
    return LossFacts(outputs_needed=frozenset({"logprobs", "logprobs_at", *entropy}), columns_read=TOPK_COLUMNS)


def wants_entropy(config: TopkKlConfig) -> bool:
    """Return whether the reverse divergence is wanted of tokens that are not compared."""
    return config.outside == "zero" and config.divergence == "mixed" and config.forward < 1


def full_kl_facts(config: FullKlConfig, model: ModelInfo) -> LossFacts:
    """Return what planning needs to know of the loss."""
    return LossFacts(outputs_needed=config.needed | {"logprobs"})


def sample_kl_facts(config: SampleKlConfig, model: ModelInfo) -> LossFacts:
    """Return what planning needs to know of the loss."""
    return LossFacts(outputs_needed=frozenset({"logprobs"}), columns_read=frozenset({"teacher_logprobs"}))


def teacher_pg_facts(config: TeacherPgConfig, model: ModelInfo) -> LossFacts:
    """Return what planning needs to know of the loss."""
    columns = frozenset({"advantages", "sampler_logprobs"})
    return LossFacts(outputs_needed=frozenset({"logprobs"}), columns_read=columns, token_advantages=True)
