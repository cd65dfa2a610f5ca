"""The contracts of losses, advantages and filters hold for good ones, and each rule catches one that breaks it."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from whet.data import metrics
from whet.data.batch import Batch
from whet.data.records import Group
from whet.interfaces.loss import LossResult
from whet_ops.reductions import expand, segment_sum
from whet_testing.batches import token_advantages
from whet_testing.contracts.advantages import AdvantagesContract
from whet_testing.contracts.filter import FilterContract
from whet_testing.contracts.loss import LossContract


class PolicyGradient:
    """A clipped policy gradient whose log-ratio is bounded."""

    columns: tuple[str, ...] = ("advantages", "old_logprobs")
    outputs: tuple[str, ...] = ("logprobs",)
    weights: Mapping[str, float] = {"policy": 1.0}

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        return {"policy": batch["loss_mask"].sum()}

    def live(self, batch: Batch) -> Any:
        return batch["advantages"] != 0

    def per_token(self, outputs: Mapping[str, Any], batch: Batch) -> Any:
        ratio = (outputs["logprobs"] - batch["old_logprobs"]).clamp(-20, 20).exp()
        return -ratio * expand(batch["advantages"], batch["lengths"])

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        kept = torch.where(batch["loss_mask"], self.per_token(outputs, batch), 0.0)
        return LossResult({"policy": kept.sum()}, {"kept": metrics.mean(kept.detach().sum(), batch["loss_mask"].sum())})


class Likelihood(PolicyGradient):
    columns = ()

    def live(self, batch: Batch) -> Any:
        return batch["lengths"] > 0

    def per_token(self, outputs: Mapping[str, Any], batch: Batch) -> Any:
        return -outputs["logprobs"]


class Pairs(PolicyGradient):
    """A preference loss: units are pairs, counted by unit."""

    columns = ("reference_logprobs",)

    def counts(self, batch: Batch) -> Mapping[str, Any]:
        return {"policy": torch.tensor(batch.sequences // 2)}

    def live(self, batch: Batch) -> Any:
        return torch.ones(batch.sequences, dtype=torch.bool)

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        kept = torch.where(batch["loss_mask"], outputs["logprobs"] - batch["reference_logprobs"], 0.0)
        margin = segment_sum(kept, batch["lengths"]).view(-1, 2)
        return LossResult({"policy": -torch.nn.functional.logsigmoid(margin[:, 0] - margin[:, 1]).sum()})


class Policy(LossContract):
    def make(self) -> Any:
        return PolicyGradient()


class TestOfAPolicyGradient(Policy):
    pass


class TestOfALikelihood(LossContract):
    def make(self) -> Any:
        return Likelihood()


class TestOfPreferences(LossContract):
    unit_size = 2

    def make(self) -> Any:
        return Pairs()


class MeanOfTheMicroBatch(PolicyGradient):
    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        kept = torch.where(batch["loss_mask"], self.per_token(outputs, batch), 0.0)
        return LossResult({"policy": kept.mean() * 40})


class Unmasked(PolicyGradient):
    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        return LossResult({"policy": self.per_token(outputs, batch).sum()})


class MaskedByProduct(PolicyGradient):
    def per_token(self, outputs: Mapping[str, Any], batch: Batch) -> Any:
        ratio = (outputs["logprobs"] - batch["old_logprobs"]).exp()
        return -ratio * expand(batch["advantages"], batch["lengths"])


class Detached(PolicyGradient):
    def per_token(self, outputs: Mapping[str, Any], batch: Batch) -> Any:
        return super().per_token(outputs, batch).detach()


class CountsTokens(PolicyGradient):
    def counts(self, batch: Batch) -> Mapping[str, Any]:
        return {"tokens": batch["loss_mask"].sum()}


class CountsAtLeastOne(PolicyGradient):
    def counts(self, batch: Batch) -> Mapping[str, Any]:
        return {"policy": batch["loss_mask"].sum().clamp(min=1)}


class CountsSquares(PolicyGradient):
    def counts(self, batch: Batch) -> Mapping[str, Any]:
        return {"policy": batch["loss_mask"].sum() ** 2}


class DeadTooSoon(PolicyGradient):
    def live(self, batch: Batch) -> Any:
        return batch["advantages"] > 0


class LiveByToken(PolicyGradient):
    def live(self, batch: Batch) -> Any:
        return batch["loss_mask"]


class ReadsInSecret(PolicyGradient):
    columns = ("advantages",)


class Remembers(PolicyGradient):
    calls = 0

    def per_token(self, outputs: Mapping[str, Any], batch: Batch) -> Any:
        self.calls += 1
        return super().per_token(outputs, batch) * self.calls


class ChangesItsInput(PolicyGradient):
    def per_token(self, outputs: Mapping[str, Any], batch: Batch) -> Any:
        batch["advantages"].mul_(2)
        return super().per_token(outputs, batch)


class InOrder(PolicyGradient):
    def per_token(self, outputs: Mapping[str, Any], batch: Batch) -> Any:
        return super().per_token(outputs, batch) * torch.arange(batch.tokens)


class Flipped(PolicyGradient):
    """Learns the opposite."""

    def per_token(self, outputs: Mapping[str, Any], batch: Batch) -> Any:
        return -super().per_token(outputs, batch)


class PolicyOfTokens(PolicyGradient):
    def per_token(self, outputs: Mapping[str, Any], batch: Batch) -> Any:
        return -outputs["logprobs"] * batch["advantages"]


class PolicyOfTokensFlipped(PolicyOfTokens):
    def per_token(self, outputs: Mapping[str, Any], batch: Batch) -> Any:
        return -super().per_token(outputs, batch)


class PairsFlipped(Pairs):
    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        return LossResult({"policy": -super().__call__(outputs, batch).terms["policy"]})


class Unlikelihood(Likelihood):
    def per_token(self, outputs: Mapping[str, Any], batch: Batch) -> Any:
        return outputs["logprobs"]


class LeakyMetric(PolicyGradient):
    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        result = super().__call__(outputs, batch)
        return LossResult(result.terms, {"policy": metrics.mean(result.terms["policy"])})


class NamedAsARun(PolicyGradient):
    name = "reward/mean"

    def __call__(self, outputs: Mapping[str, Any], batch: Batch) -> LossResult:
        return LossResult(super().__call__(outputs, batch).terms, {self.name: metrics.mean(1.0)})


class NamedAsABackend(NamedAsARun):
    name = "grad_norm"


class CountsNothing(PolicyGradient):
    def counts(self, batch: Batch) -> Mapping[str, Any]:
        return {"policy": torch.tensor(0)}


MUTANTS: dict[type[PolicyGradient], str] = {
    NamedAsARun: "test_metrics_have_names_that_a_run_does_not_use",
    NamedAsABackend: "test_metrics_have_names_that_a_run_does_not_use",
    CountsNothing: "test_a_term_that_counts_nothing_is_0",
    MeanOfTheMicroBatch: "test_value_and_gradient_do_not_depend_on_micro_batches",
    InOrder: "test_value_and_gradient_do_not_depend_on_order",
    Unmasked: "test_masked_tokens_get_no_gradient",
    Detached: "test_a_term_is_one_number_with_gradient",
    CountsTokens: "test_terms_counts_and_weights_have_the_same_names",
    CountsAtLeastOne: "test_no_sequences_count_nothing",
    CountsSquares: "test_counts_add_up_over_micro_batches",
    DeadTooSoon: "test_dead_sequences_contribute_exactly_nothing",
    LiveByToken: "test_live_says_which_sequences_matter",
    ReadsInSecret: "test_a_term_is_one_number_with_gradient",
    Remembers: "test_the_result_is_the_same_every_time",
    ChangesItsInput: "test_its_input_is_left_as_it_was",
    LeakyMetric: "test_metrics_are_numbers_without_gradient",
}


@pytest.mark.parametrize(("kind", "rule"), MUTANTS.items())
def test_the_contract_catches(kind: type[PolicyGradient], rule: str) -> None:
    contract = Policy()
    contract.make = kind  # type: ignore[method-assign]
    with pytest.raises((AssertionError, KeyError)):
        getattr(contract, rule)()


@pytest.mark.parametrize(
    ("kind", "unit_size", "wanted"),
    [(Flipped, 1, "likelier"), (PairsFlipped, 2, "likelier"), (Unlikelihood, 1, "likelier")],
)
def test_the_contract_says_that_a_sign_is_flipped(kind: Any, unit_size: int, wanted: str) -> None:
    contract = Policy()
    contract.make, contract.unit_size = kind, unit_size  # type: ignore[method-assign]
    message = rf"learned tokens {wanted}, and moves their logprobs by -.* is a sign flipped.*override `goal`"
    with pytest.raises(AssertionError, match=message):
        contract.test_a_step_moves_probabilities_towards_the_goal()


def test_the_contract_catches_a_flipped_sign_of_token_advantages() -> None:
    contract = Policy()
    contract.makers = {"advantages": token_advantages}
    for kind in (PolicyOfTokens, PolicyOfTokensFlipped):
        contract.make = kind  # type: ignore[method-assign]
        with nullcontext() if kind is PolicyOfTokens else pytest.raises(AssertionError, match="move away from it"):
            contract.test_a_step_moves_probabilities_towards_the_goal()


def test_a_loss_may_have_another_goal() -> None:
    contract = Policy()
    contract.make = Unlikelihood  # type: ignore[method-assign]
    contract.goal = lambda batch: -np.ones(batch.sequences)  # type: ignore[method-assign]
    contract.test_a_step_moves_probabilities_towards_the_goal()
    contract.goal = lambda batch: None  # type: ignore[method-assign]
    with pytest.raises(pytest.skip.Exception):
        contract.test_a_step_moves_probabilities_towards_the_goal()


def test_the_contract_catches_influence_of_masked_tokens() -> None:
    contract = Policy()
    contract.make = Unmasked  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        contract.test_masked_tokens_have_no_influence()


def test_the_contract_catches_overflow() -> None:
    contract = Policy()
    contract.make = MaskedByProduct  # type: ignore[method-assign]
    contract.test_extreme_log_ratios_stay_finite(50.0)  # exp(50) is finite in float32
    with pytest.raises(AssertionError):
        contract.test_extreme_log_ratios_stay_finite(100.0)


def of_batch(estimate: Callable[..., Any]) -> Callable[[Batch], Any]:
    """Turn a function of rewards and groups into an estimator, which is called with the batch."""

    def estimator(batch: Batch) -> Any:
        _, first, episode = np.unique(batch["episode"], return_index=True, return_inverse=True)
        found = estimate(batch["reward"][first], batch["group"][first])
        return found[episode] if len(found) == len(first) else found

    return estimator


def group_mean(rewards: Any, group: Any) -> Any:
    _, owner = np.unique(group, return_inverse=True)
    size = np.maximum(np.bincount(owner), 1)
    return (rewards - (np.bincount(owner, rewards) / size)[owner]).astype(np.float32)


class GroupMean(AdvantagesContract):
    def make(self) -> Any:
        return of_batch(group_mean)


class TestOfTheGroupMean(GroupMean):
    pass


def normalised(rewards: Any, group: Any) -> Any:
    with np.errstate(all="ignore"):
        spread = np.array([rewards[group == g].std() for g in group])
        return (group_mean(rewards, group) / spread).astype(np.float32)


ESTIMATORS: dict[str, tuple[Callable[..., Any], str]] = {
    "divides by zero": (normalised, "test_a_group_of_one_is_finite"),
    "indexes by group": (
        lambda rewards, group: rewards - np.zeros(5, np.float32)[group],
        "test_groups_are_told_apart_by_identity_not_by_number",
    ),
    "neighbours": (
        lambda rewards, group: rewards - np.roll(rewards, 1),
        "test_the_order_of_sequences_does_not_matter",
    ),
    "one for each group": (
        lambda rewards, group: np.unique(group).astype(np.float32),
        "test_each_sequence_gets_a_finite_number",
    ),
    "zeros": (
        lambda rewards, group: np.zeros(len(rewards), np.float32),
        "test_unequal_rewards_of_a_group_get_unequal_advantages",
    ),
    "zeros unless rewards are continuous": (
        lambda rewards, group: group_mean(rewards, group) * (len(np.unique(rewards)) > 2),
        "test_unequal_rewards_of_a_group_get_unequal_advantages",
    ),
    "upside down": (lambda rewards, group: -rewards, "test_a_better_sample_of_a_group_never_gets_less"),
}


@pytest.mark.parametrize("what", ESTIMATORS)
def test_the_contract_catches_an_estimator_that(what: str) -> None:
    contract = GroupMean()
    estimator, rule = ESTIMATORS[what]
    contract.make = lambda: of_batch(estimator)  # type: ignore[method-assign]
    with pytest.raises((AssertionError, IndexError)):
        getattr(contract, rule)()


def test_the_contract_says_that_nothing_is_learned() -> None:
    contract = GroupMean()
    contract.make = lambda: lambda batch: np.zeros(batch.sequences, np.float32)  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match=r"in 5 of 5 groups of unequal rewards all advantages are equal.*learn"):
        contract.test_unequal_rewards_of_a_group_get_unequal_advantages()


class OfSummedForks(AdvantagesContract):
    """The baseline of an estimator that sums the rewards of an episode's forks."""

    def make(self) -> Any:
        def estimate(batch: Batch) -> Any:
            _, first, episode = np.unique(batch["episode"], return_index=True, return_inverse=True)
            return group_mean(np.bincount(episode, batch["reward"]), batch["group"][first])[episode]

        return estimate


def test_the_contract_catches_forks_that_are_summed_in_secret() -> None:
    with pytest.raises(AssertionError):
        OfSummedForks().test_an_episode_counts_once_however_many_sequences_it_has()


class TestOfAnEstimatorThatSumsForks(OfSummedForks):
    def of_episode(self, rewards: Any) -> float:
        return float(rewards.sum())


class TestOfAnEstimatorOfTokens(AdvantagesContract):
    """Every token gets the advantage of its sequence, and rows have several tokens to learn."""

    trained_tokens = 3

    def make(self) -> Any:
        def estimate(batch: Batch) -> Any:
            of_sequences = expand(of_batch(group_mean)(batch), batch["lengths"])
            return np.where(batch["loss_mask"], of_sequences, 0).astype(np.float32)

        return estimate


def test_the_contract_catches_an_estimator_of_one_token_a_sequence() -> None:
    contract = GroupMean()

    def estimate(batch: Batch) -> Any:
        found = np.zeros(batch.tokens, np.float32)
        found[batch["loss_mask"]] = of_batch(group_mean)(batch)
        return found

    contract.make = lambda: estimate  # type: ignore[method-assign]
    contract.test_each_sequence_gets_a_finite_number()
    with pytest.raises(ValueError, match="NumPy boolean array indexing assignment"):
        contract.test_sequences_may_have_any_number_of_tokens_to_learn()


def test_the_contract_catches_an_estimator_that_works_in_place() -> None:
    contract = GroupMean()
    contract.make = lambda: lambda batch: np.negative(batch["reward"], batch["reward"])  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        contract.test_its_input_is_left_as_it_was()


def test_the_contract_catches_an_estimator_that_counts_sequences() -> None:
    contract = GroupMean()
    contract.make = lambda: lambda batch: group_mean(batch["reward"], batch["group"])  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        contract.test_an_episode_counts_once_however_many_sequences_it_has()


def differs(group: Group) -> bool:
    return bool(np.ptp(group.rewards) > 0)


class Differs(FilterContract):
    def make(self) -> Any:
        return differs


class TestOfDifferingRewards(Differs):
    pass


FILTERS: dict[str, tuple[Callable[[Group], Any], str]] = {
    "drops everything": (lambda group: False, "test_some_group_passes"),
    "says a number": (lambda group: float(group.rewards.sum()), "test_it_says_yes_or_no"),
    "looks at the first": (
        lambda group: bool(group.episodes[0].reward > 0),
        "test_the_order_of_the_episodes_does_not_matter",
    ),
}


@pytest.mark.parametrize("what", FILTERS)
def test_the_contract_catches_a_filter_that(what: str) -> None:
    contract = Differs()
    keep, rule = FILTERS[what]
    contract.make = lambda: keep  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        getattr(contract, rule)()
