"""What others compute, written again from their formulas in float64 on padded rows, and the options that give it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from whet.component import Spec
from whet.config.build import build, to_spec
from whet.config.structure import structure
from whet.data.batch import Batch, from_sequences
from whet.errors import DataError
from whet.plugins.registry import load_plugins
from whet_grpo.advantages import Gdpo, GroupMean, Opo, PassAtK, ReinforcePlusPlus, Remax, Rloo
from whet_grpo.config import (
    ClippedPgConfig,
    GdpoConfig,
    GroupMeanConfig,
    GrpoConfig,
    OpoConfig,
    PassAtKConfig,
    ReinforceConfig,
    ReinforcePlusPlusConfig,
    RemaxConfig,
    RlooConfig,
)
from whet_grpo.losses import ClippedPg, Reinforce
from whet_ops.algorithms.config import CorrectionSection, KlLossSection, KlOldSection, OverlongSection
from whet_ops.algorithms.minibatches import train_minibatches
from whet_ops.algorithms.policy_steps import correct_gap, penalise_overlong

REWARDS = [1.0, 0.0, 0.5, 2.0, 0.3, 1.7, 0.2]
FORMAT = [0.0, 1.0, 1.0, 0.0, 2.0, 2.0, 0.0]
GROUPS = [4, 4, 4, 9, 9, 9, 9]
ALONE = [4, 4, 4, 9, 9, 9, 1]
"""The same, the last one by itself."""
SIZES = [3, 1, 5, 2, 4, 1, 2]
LONGEST = max(SIZES)
KL = np.random.default_rng(1).normal(size=(7, LONGEST))
PADDED = np.arange(LONGEST) < np.array(SIZES)[:, None]


def batch(groups: Sequence[int] = GROUPS, **columns: Any) -> Batch:
    rows = [{"tokens": range(n + 1), "loss_mask": np.arange(n + 1) > 0} for n in SIZES]
    made = from_sequences(rows, prompt_lengths=[1] * len(rows), group=list(groups))
    return made.with_columns(reward=np.array(REWARDS, np.float32), **columns)


def ragged(padded: Any) -> Any:
    """Lay padded rows out as tokens, after a prompt of one token each."""
    return np.concatenate([[0.0, *row[:n]] for row, n in zip(np.asarray(padded), SIZES, strict=True)])


def penalised(groups: Sequence[int] = GROUPS, weight: float = 0.1) -> Batch:
    """Return the batch as a penalty in the reward leaves it."""
    made, costs = batch(groups), ragged(-weight * KL).astype(np.float32)
    totals = np.array([(-weight * row[:n]).sum() for row, n in zip(KL, SIZES, strict=True)], np.float32)
    columns = {"token_rewards": costs, "reward": made["reward"] + totals, "reward:kl": totals}
    return made.with_columns(task_reward=made["reward"], **columns)


def others(values: Sequence[float], groups: Sequence[int], i: int) -> np.ndarray:
    return np.array([v for j, (v, g) in enumerate(zip(values, groups, strict=True)) if g == groups[i] and j != i])


def own(values: Sequence[float], groups: Sequence[int], i: int) -> np.ndarray:
    return np.array([v for v, g in zip(values, groups, strict=True) if g == groups[i]])


def verl_whiten(values: np.ndarray) -> np.ndarray:
    """`masked_whiten`: the unbiased variance, to which the epsilon is added."""
    seen = values[PADDED]
    return (values - seen.mean()) / np.sqrt(seen.var(ddof=1) + 1e-8) * PADDED


TRAINED = ragged(PADDED).astype(bool)


def check(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("groups", [GROUPS, ALONE])
@pytest.mark.parametrize("by_deviation", [True, False])
def test_group_mean_of_verl(groups: list[int], by_deviation: bool) -> None:
    expected = []
    for i, reward in enumerate(REWARDS):
        mine = own(REWARDS, groups, i)
        mean, deviation = (mine.mean(), mine.std(ddof=1)) if len(mine) > 1 else (0.0, 1.0)
        expected.append((reward - mean) / (deviation + 1e-6 if by_deviation else 1.0))
    config = GroupMeanConfig(scale="group" if by_deviation else "none", epsilon=1e-6, singleton="reward")
    check(GroupMean(config)(batch(groups)), expected)


@pytest.mark.parametrize("groups", [GROUPS, ALONE])
def test_gpg_of_verl(groups: list[int]) -> None:
    """Its `alpha` counts rewards other than 0, and its loss is minus logprob times advantage."""
    made = batch(groups)
    alpha = 7 / np.count_nonzero(REWARDS)
    mean = [own(REWARDS, groups, i).mean() * (len(own(REWARDS, groups, i)) > 1) for i in range(7)]
    expected = alpha * (np.array(REWARDS) - mean)
    found = GroupMean(GroupMeanConfig(scale="none", rescale="nonzero", singleton="reward"))(made)
    check(found, expected)
    logprobs = torch.log(torch.rand(made.tokens, generator=torch.Generator().manual_seed(0)))
    mine, theirs = logprobs.clone().requires_grad_(), logprobs.double().requires_grad_()
    torched = made.with_columns(advantages=found, sampler_logprobs=logprobs.numpy() - 0.1).map(torch.from_numpy)
    loss = Reinforce(ReinforceConfig(max_weight=None))
    value = loss({"logprobs": mine}, torched).terms["policy"] / loss.counts(torched)["policy"]
    each = -theirs * torch.from_numpy(np.repeat(expected, np.array(SIZES) + 1))
    wanted = each[torch.from_numpy(TRAINED)].mean()
    check(value.detach(), wanted.detach())
    check(torch.autograd.grad(value, mine)[0], torch.autograd.grad(wanted, theirs)[0])


@pytest.mark.parametrize("by_deviation", [True, False])
def test_pass_at_k_of_verl_is_of_the_best_response_alone(by_deviation: bool) -> None:
    expected = []
    for i, reward in enumerate(REWARDS):
        best, second = sorted(own(REWARDS, GROUPS, i))[:-3:-1]
        deviation = own(REWARDS, GROUPS, i).std(ddof=1) + 1e-6 if by_deviation else 1.0
        expected.append((best - second) / deviation if reward == best else 0.0)
    check(PassAtK(PassAtKConfig(scale="group" if by_deviation else "none"))(batch()), expected)


@pytest.mark.parametrize("groups", [GROUPS, ALONE])
def test_group_mean_of_nemo_rl(groups: list[int]) -> None:
    expected = []
    for i, reward in enumerate(REWARDS):
        rest = others(REWARDS, groups, i)
        deviation = rest.std(ddof=1) if len(rest) > 1 else 0.0
        ahead = reward - rest.mean() if len(rest) else 0.0
        expected.append(ahead / (deviation + 1e-6) if deviation > 0 else ahead)
    check(GroupMean(GroupMeanConfig(leave_one_out=True, std_over="others", epsilon=1e-6))(batch(groups)), expected)


def test_leave_one_out_of_verl_keeps_the_reward_of_a_single_sample() -> None:
    rest = [others(REWARDS, ALONE, i) for i in range(7)]
    expected = [reward - (o.mean() if len(o) else 0.0) for reward, o in zip(REWARDS, rest, strict=True)]
    check(Rloo(RlooConfig(singleton="reward"))(batch(ALONE)), expected)
    check(Rloo(RlooConfig())(batch(ALONE)), [*expected[:-1], 0.0])


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_of_verl(gamma: float) -> None:
    rewards = -0.1 * KL * PADDED
    rewards[np.arange(7), np.array(SIZES) - 1] += REWARDS
    returns = np.zeros_like(rewards)
    for t in reversed(range(LONGEST)):
        returns[:, t] = rewards[:, t] + gamma * (returns[:, t + 1] if t + 1 < LONGEST else 0.0)
    config = ReinforcePlusPlusConfig(unbiased=True, epsilon_at="variance", gamma=gamma)
    check(ReinforcePlusPlus(config)(penalised())[TRAINED], ragged(verl_whiten(returns))[TRAINED])


def test_reinforce_plus_plus_with_baseline_of_verl() -> None:
    mean = [own(REWARDS, ALONE, i).mean() * (len(own(REWARDS, ALONE, i)) > 1) for i in range(7)]
    centred = (np.array(REWARDS) - mean)[:, None] * np.ones((1, LONGEST))
    config = ReinforcePlusPlusConfig(baseline=True, unbiased=True, epsilon_at="variance", singleton="reward")
    check(ReinforcePlusPlus(config)(batch(ALONE))[TRAINED], ragged(verl_whiten(centred))[TRAINED])


@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce_plus_plus_of_nemo_rl_charges_a_token_its_own_divergence(baseline: bool) -> None:
    mean = [own(REWARDS, GROUPS, i).mean() * baseline for i in range(7)]
    values = (np.array(REWARDS) - mean)[:, None] - 0.1 * KL
    seen = values[PADDED]
    expected = (values - seen.mean()) / np.sqrt(max(seen.var(), 1e-8)) * PADDED
    config = ReinforcePlusPlusConfig(baseline=baseline, kl_of="own")
    wanted = ragged(expected)[TRAINED]
    check(ReinforcePlusPlus(config)(penalised())[TRAINED], wanted)
    onwards = ReinforcePlusPlus(ReinforcePlusPlusConfig(baseline=baseline))(penalised())[TRAINED]
    assert not np.allclose(onwards, wanted)


def to_come(rewards: np.ndarray) -> np.ndarray:
    """Sum padded rewards of tokens from each token on, backwards as the peers do."""
    return np.flip(np.cumsum(np.flip(rewards, 1), 1), 1)


def test_reinforce_plus_plus_with_baseline_of_openrlhf_leaves_the_penalty_out_of_the_baseline() -> None:
    mean = np.array([own(REWARDS, GROUPS, i).mean() for i in range(7)])
    rewards = -0.1 * KL * PADDED
    rewards[np.arange(7), np.array(SIZES) - 1] += REWARDS - mean
    values = to_come(rewards)
    seen = values[PADDED]
    expected = (values - seen.mean()) / np.sqrt(max(seen.var(), 1e-8))
    config = ReinforcePlusPlusConfig(baseline=True, baseline_of="reward")
    check(ReinforcePlusPlus(config)(penalised())[TRAINED], ragged(expected)[TRAINED])


def test_reinforce_plus_plus_with_baseline_of_verl_compares_rewards_with_their_penalties() -> None:
    totals = np.array(REWARDS) - 0.1 * (KL * PADDED).sum(1)
    mean = np.array([own(list(totals), GROUPS, i).mean() for i in range(7)])
    expected = verl_whiten((totals - mean)[:, None] * np.ones((1, LONGEST)))[:, 0]
    config = ReinforcePlusPlusConfig(baseline=True, per_token=False, unbiased=True, epsilon_at="variance")
    check(ReinforcePlusPlus(config)(penalised()), expected)


@pytest.mark.parametrize("kl_of", ["own", "onwards"])
def test_groups_of_equal_rewards_leave_their_penalties_alone(kl_of: Any) -> None:
    """So a batch of equal rewards has the advantages of one in which all rewards are 0, to the last bit."""
    config = ReinforcePlusPlusConfig(baseline=True, kl_of=kl_of)

    def advantages(reward: float) -> Any:
        made, penalty = batch(), penalised()
        task = np.full(7, reward, np.float32)
        columns = {name: penalty[name] for name in ("token_rewards", "reward:kl")}
        return ReinforcePlusPlus(config)(
            made.with_columns(task_reward=task, reward=task + penalty["reward:kl"], **columns)
        )

    assert advantages(0.1).tolist() == advantages(0.0).tolist()
    assert advantages(1e6).tolist() == advantages(0.0).tolist()


@pytest.mark.parametrize("groups", [GROUPS, ALONE])
def test_opo_of_verl(groups: list[int]) -> None:
    """`compute_opo_outcome_advantage`: the baseline is the mean by length; of a single sample it is 0."""
    expected = []
    for i, reward in enumerate(REWARDS):
        mine = [(n, r) for n, r, g in zip(SIZES, REWARDS, groups, strict=True) if g == groups[i]]
        baseline = sum(n * r for n, r in mine) / sum(n for n, _ in mine) if len(mine) > 1 else 0.0
        expected.append(reward - baseline)
    check(Opo(OpoConfig(singleton="reward"))(batch(groups)), expected)


def test_opo_counts_tokens_that_are_masked() -> None:
    made = batch(version=np.where(batch()["loss_mask"], 0, -1).astype(np.int32))
    masked = made.with_columns(loss_mask=made["loss_mask"] & (np.repeat(np.arange(7), made["lengths"]) != 2))
    assert Opo(OpoConfig())(masked).tolist() == Opo(OpoConfig())(made).tolist()


GREEDY = np.array([0.4] * 3 + [1.1] * 4, np.float32)


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_remax_of_verl(weight: float) -> None:
    """`compute_remax_outcome_advantage`: what is to come at each token, less the reward of the greedy response."""
    rewards = -weight * KL * PADDED
    rewards[np.arange(7), np.array(SIZES) - 1] += REWARDS
    expected = to_come(rewards) - GREEDY[:, None]
    made = penalised(weight=weight) if weight else batch()
    found = Remax(RemaxConfig())(made.with_columns(greedy_reward=GREEDY))
    check(found[TRAINED], ragged(expected)[TRAINED])
    whole = Remax(RemaxConfig(per_token=False))(made.with_columns(greedy_reward=GREEDY))
    check(whole, expected[:, 0])


def test_remax_says_what_it_lacks() -> None:
    with pytest.raises(DataError, match="without a greedy response"):
        Remax(RemaxConfig())(batch())


def named() -> Batch:
    first, second = np.array(REWARDS, np.float32), np.array(FORMAT, np.float32)
    return batch(**{"reward:right": first, "reward:format": second})


WEIGHTS = {"right": 1.0, "format": 0.4}


@pytest.mark.parametrize("scale", ["group", "none"])
def test_gdpo_of_verl_is_whitened_over_tokens(scale: Any) -> None:
    total = np.zeros(7)
    for rewards, weight in ((REWARDS, 1.0), (FORMAT, 0.4)):
        mine = [own(rewards, GROUPS, i) for i in range(7)]
        by = [m.std(ddof=1) + 1e-6 if scale == "group" else 1.0 for m in mine]
        total += weight * (np.array(rewards) - [m.mean() for m in mine]) / by
    expected = verl_whiten(total[:, None] * np.ones((1, LONGEST)))[:, 0]
    config = GdpoConfig(
        weights=WEIGHTS, scale=scale, epsilon=1e-6, over="tokens", centre=True, batch_epsilon=1e-8,
        epsilon_at="variance",
    )  # fmt: skip
    check(Gdpo(config)(named()), expected)


def test_gdpo_of_nemo_rl_leaves_the_sample_itself_out() -> None:
    total = np.zeros(7)
    for rewards, weight in ((REWARDS, 1.0), (FORMAT, 0.4)):
        rest = [others(rewards, GROUPS, i) for i in range(7)]
        spread = np.array([r.std(ddof=1) for r in rest])
        by = np.where(spread > 0, spread + 1e-6, 1.0)
        total += weight * (np.array(rewards) - [r.mean() for r in rest]) / by
    config = GdpoConfig(
        weights=WEIGHTS, leave_one_out=True, std_over="others", epsilon=1e-6, centre=True, batch_epsilon=0.0
    )
    check(Gdpo(config)(named()), (total - total.mean()) / total.std(ddof=1))


def loss_of(batch: Batch, config: ClippedPgConfig) -> float:
    torched = batch.map(lambda column: torch.from_numpy(np.array(column)))
    loss = ClippedPg(config)
    result = loss({"logprobs": torched["new"]}, torched)
    return float(result.terms["policy"] / loss.counts(torched)["policy"])


def policy_batch() -> tuple[Batch, np.ndarray]:
    """Return a batch whose third sequence is masked whole, and the losses of its tokens as padded rows."""
    rng = np.random.default_rng(3)
    new, old = rng.normal(-1, 0.3, (7, LONGEST)), rng.normal(-1, 0.3, (7, LONGEST))
    advantages = rng.normal(size=7)
    ratio = np.exp(new - old)
    losses = -np.minimum(ratio * advantages[:, None], ratio.clip(0.8, 1.2) * advantages[:, None]) * PADDED
    losses[2] = 0.0
    made = batch()
    kept = made["loss_mask"] & np.repeat(np.arange(7) != 2, made["lengths"])
    columns = {"new": ragged(new), "old_logprobs": ragged(old), "sampler_logprobs": ragged(old)}
    columns = {name: values.astype(np.float32) for name, values in columns.items()}
    return made.with_columns(loss_mask=kept, advantages=advantages.astype(np.float32), **columns), losses


def far_away() -> Batch:
    """Return the batch of `policy_batch` with log-ratios up to 30 nats on both sides."""
    made, _ = policy_batch()
    old = made["new"] - 30 * np.sin(np.arange(made.tokens))
    return made.with_columns(old_logprobs=old.astype(np.float32))


def test_trl_and_nemo_rl_bound_no_log_ratio() -> None:
    made = far_away()
    mask, advantages = made["loss_mask"], np.repeat(made["advantages"], made["lengths"]).astype(np.float64)
    ratio = np.exp(made["new"].astype(np.float64) - made["old_logprobs"])
    losses = -np.minimum(ratio * advantages, ratio.clip(0.8, 1.2) * advantages)
    expected = losses[mask].mean()
    assert loss_of(made, ClippedPgConfig(clamp_log_ratio=0.0)) == pytest.approx(expected, rel=1e-4)
    assert abs(loss_of(made, ClippedPgConfig())) < abs(expected) / 10


def test_the_penalty_of_verls_dro_has_no_bound() -> None:
    """`compute_policy_loss_dro`: -(A log p - beta / 2 (log p - log old)^2)."""
    made = far_away()
    torched = made.map(lambda column: torch.from_numpy(np.array(column)))
    penalty = KlOldSection(weight=0.3, to="old", clamp_log_ratio=0.0)
    loss = Reinforce(ReinforceConfig(max_weight=None, kl_old=penalty))
    terms, counts = loss({"logprobs": torched["new"]}, torched).terms, loss.counts(torched)
    found = sum(loss.weights[name] * float(terms[name] / counts[name]) for name in terms)
    mask, advantages = made["loss_mask"], np.repeat(made["advantages"], made["lengths"]).astype(np.float64)
    new, old = made["new"].astype(np.float64), made["old_logprobs"].astype(np.float64)
    assert found == pytest.approx(-(new * advantages - 0.15 * (new - old) ** 2)[mask].mean(), rel=1e-5)


def test_averages_of_trl_count_masked_sequences() -> None:
    made, losses = policy_batch()
    sizes = np.array(SIZES)
    grpo = (losses.sum(1) / sizes.clip(1)).mean()
    config = ClippedPgConfig(aggregation="sequence", count_empty=True)
    assert loss_of(made, config) == pytest.approx(grpo, rel=1e-5)
    constant = losses.sum() / (7 * 10)
    assert loss_of(made, ClippedPgConfig(aggregation="constant", max_length=10, count_empty=True)) == pytest.approx(
        constant, rel=1e-5
    )
    assert loss_of(made, ClippedPgConfig(aggregation="constant", max_length=10)) == pytest.approx(constant * 7 / 6)


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({}, 5),
        ({"count_empty": True}, 7),  # TRL, and verl where the size of the batch is given
        ({"count_empty": True, "count_masked": False}, 6),  # NeMo RL, whose sample mask takes the masked one out
        ({"count_masked": True}, 6),
    ],
)
@pytest.mark.parametrize("aggregation", ["sequence", "constant"])
def test_empty_and_masked_sequences_are_told_apart(aggregation: Any, options: dict[str, Any], number: int) -> None:
    """The third sequence was masked, the fourth has no token of the model's."""
    made, losses = policy_batch()
    owner = np.repeat(np.arange(7), made["lengths"])
    version = np.where(batch()["loss_mask"] & (owner != 3), 0, -1).astype(np.int32)
    made = made.with_columns(loss_mask=made["loss_mask"] & (owner != 3), version=version)
    losses[3] = 0.0
    total = (losses.sum(1) / SIZES).sum() if aggregation == "sequence" else losses.sum() / 10
    config = ClippedPgConfig(aggregation=aggregation, max_length=10, **options)
    assert loss_of(made, config) == pytest.approx(total / number, rel=1e-5)


def test_the_mean_of_sums_of_verl() -> None:
    made, losses = policy_batch()
    config = ClippedPgConfig(aggregation="constant", max_length=1)
    assert loss_of(made, config) == pytest.approx(losses.sum() / 6, rel=1e-5)


class Objectives:
    """Computes the objective of each minibatch and its gradient by the logprobs, as a backend does."""

    def __init__(self) -> None:
        self.found: list[tuple[Batch, float, Any]] = []

    def train(self, batch: Batch, loss: Spec, count_over: Batch | None = None) -> dict[str, Any]:
        made, torched = build(loss), batch.map(lambda column: torch.from_numpy(np.array(column)))
        whole = (count_over or batch).map(lambda column: torch.from_numpy(np.array(column)))
        logprobs = torched["new"].clone().requires_grad_()
        terms, counts = made({"logprobs": logprobs}, torched).terms, made.counts(whole)
        value = sum(made.weights[name] * term / counts[name] for name, term in terms.items())
        self.found.append((batch, float(value.detach()), torch.autograd.grad(value, logprobs)[0].numpy()))
        return {}


def trl_tokens(kind: str, new: Any, old: Any, advantage: Any) -> Any:
    """Return TRL's losses of the tokens of one response."""
    ratio = torch.exp(new - old)
    if kind == "clipped-pg":  # dapo
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    if kind == "cispo":
        return -ratio.clamp(max=5.0).detach() * advantage * new
    weight = (new - old).sum().exp().detach()
    power, decay = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
    return -(weight**power) * torch.exp(decay * (1 - weight)) * advantage * new


@pytest.mark.parametrize("minibatches", [1, 2, 3])
@pytest.mark.parametrize("kind", ["clipped-pg", "cispo", "vespo"])
def test_trl_divides_each_minibatch_by_the_tokens_of_the_whole_batch(kind: str, minibatches: int) -> None:
    """`_compute_loss` divides by num_items_in_batch / steps_per_generation, with one micro-batch for each minibatch."""
    made, _ = policy_batch()
    made = made.with_columns(reference_logprobs=(made["old_logprobs"] - 0.3).astype(np.float32))
    registry, kl = load_plugins(), {"weight": 0.1}
    document = {"loss": {"use": kind, "kl": kl}, "minibatches": minibatches, "count_over": "batch"}
    config = structure(document, GrpoConfig, registry)
    backend: Any = Objectives()
    list(train_minibatches(backend, made, to_spec(config.loss), config, seed=1))
    assert len(backend.found) == minibatches
    for part, value, gradient in backend.found:
        new = torch.from_numpy(part["new"].astype(np.float64)).requires_grad_()
        old, reference = (torch.from_numpy(part[f"{who}_logprobs"].astype(np.float64)) for who in ("old", "reference"))
        total = torch.zeros((), dtype=torch.float64)
        for owned, advantage in zip(_owned(part), part["advantages"], strict=True):
            if owned.any():
                away = (reference - new)[owned]
                each = trl_tokens(kind, new[owned], old[owned], torch.tensor(float(advantage)))
                total = total + (each + kl["weight"] * (away.exp() - away - 1)).sum()
        expected = total / (made["loss_mask"].sum() / minibatches)
        assert value == pytest.approx(float(expected.detach()), rel=1e-4)
        (slope,) = torch.autograd.grad(expected, new)
        np.testing.assert_allclose(gradient, slope.numpy(), rtol=1e-4, atol=1e-7)


def test_an_absolute_penalty_is_that_of_verl() -> None:
    made, _ = policy_batch()
    torched = made.with_columns(reference_logprobs=made["old_logprobs"]).map(lambda c: torch.from_numpy(np.array(c)))
    penalty = KlLossSection(weight=1.0, estimator="abs", clamp=0.0)
    loss = ClippedPg(ClippedPgConfig(kl=penalty))
    found = loss({"logprobs": torched["new"]}, torched).terms["kl"]
    expected = np.abs(made["new"] - made["old_logprobs"])[made["loss_mask"]].sum()
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


def test_a_penalty_weighed_by_the_ratio_of_its_sequence_is_that_of_trl() -> None:
    made, _ = policy_batch()
    reference = (made["old_logprobs"] + 0.2 * np.sin(np.arange(made.tokens))).astype(np.float32)
    made = made.with_columns(reference_logprobs=reference)
    torched = made.map(lambda column: torch.from_numpy(np.array(column)))
    config = ClippedPgConfig(aggregation="sequence", kl=KlLossSection(weight=0.3, importance="sequence", clamp=0.0))
    ours, theirs = (torched["new"].clone().requires_grad_() for _ in range(2))
    loss = ClippedPg(config)
    found = loss({"logprobs": ours}, torched).terms["kl"] / loss.counts(torched)["kl"]
    rows = [
        (theirs[part], torched["old_logprobs"][part], torched["reference_logprobs"][part])
        for part in map(np.flatnonzero, _owned(made))
        if len(part)
    ]
    each = []
    for new, old, other in rows:
        kl = (other - new).exp() - (other - new) - 1
        each.append((kl * (new - old).mean().exp()).mean())
    expected = torch.stack(each).mean()
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    slopes = [torch.autograd.grad(x, y)[0] for x, y in ((found, ours), (expected, theirs))]
    torch.testing.assert_close(*slopes, atol=1e-7, rtol=1e-4)


def _owned(made: Batch) -> list[Any]:
    """Return the mask [N] of the trained tokens of each sequence."""
    owner = np.repeat(np.arange(made.sequences), made["lengths"])
    return [made["loss_mask"] & (owner == i) for i in range(made.sequences)]


def test_the_penalty_for_length_of_verl_and_nemo_rl_goes_on() -> None:
    section = OverlongSection(penalty=0.5, buffer=2, length=3, bounded=False)
    shaped, _ = penalise_overlong(batch(), section, 99)
    expected = [r + min(-(n - (3 - 2)) / 2 * 0.5, 0.0) for r, n in zip(REWARDS, SIZES, strict=True)]
    check(shaped["reward"], expected)
    bounded, _ = penalise_overlong(batch(), OverlongSection(penalty=0.5, buffer=2, length=3), 99)
    check(bounded["reward"], [r + max(e - r, -0.5) for r, e in zip(REWARDS, expected, strict=True)])


def corrected(**options: Any) -> tuple[Batch, np.ndarray]:
    """Correct a batch whose advantages are 1; gives it, and the padded log-ratios of trainer and sampler."""
    gaps = np.random.default_rng(5).normal(0, 0.6, (7, LONGEST))
    made = batch(
        advantages=np.ones(7, np.float32),
        old_logprobs=ragged(gaps - 1).astype(np.float32),
        sampler_logprobs=ragged(np.full((7, LONGEST), -1.0)).astype(np.float32),
    )
    return correct_gap(made, CorrectionSection(**options))[0], gaps


def test_weights_of_verl_may_have_mean_1() -> None:
    found, gaps = corrected(weights="token", normalise=True)
    weights = np.exp(gaps).clip(max=2.0)
    check(found["advantages"][found["loss_mask"]], (weights / weights[PADDED].mean())[PADDED])
    found, gaps = corrected(weights="sequence", normalise=True)
    weights = np.exp((gaps * PADDED).sum(1)).clip(max=2.0)
    check(found["advantages"], weights / weights.mean())


def test_the_mean_of_icepops_weights_counts_what_is_out_as_0() -> None:
    found, gaps = corrected(weights="token", cap=9e9, mask="token", low=0.5, high=2.0, normalise=True)
    ratio = np.exp(gaps)
    weights = np.where((ratio >= 0.5) & (ratio <= 2.0), ratio, 0.0)
    check(found["advantages"][found["loss_mask"]], (weights / weights[PADDED].mean())[PADDED])


@pytest.mark.parametrize("measure", ["k2", "k3"])
@pytest.mark.parametrize("mask", ["token", "sequence", "product", "worst"])
def test_rejection_by_divergence_of_verl(measure: Any, mask: Any) -> None:
    high = 0.15 if mask != "product" else 0.5
    found, gaps = corrected(mask=mask, measure=measure, high=high, count_masked=False)
    each = (gaps**2 / 2 if measure == "k2" else np.exp(gaps) - 1 - gaps) * PADDED
    size = {"token": each, "sequence": each.sum(1) / SIZES, "product": each.sum(1), "worst": each.max(1)}[mask]
    stays = (size <= high) if mask == "token" else (size <= high)[:, None] * np.ones((1, LONGEST), bool)
    kept = ragged(stays & PADDED).astype(bool)
    assert found["loss_mask"].tolist() == kept.tolist()
    assert kept.any()
    assert not kept[batch()["loss_mask"]].all()


def test_the_guard_of_nemo_rl_is_the_mean_factor() -> None:
    found, gaps = corrected(max_mean_error=1.6)
    error = (np.exp(np.abs(gaps)) * PADDED).sum(1) / SIZES
    kept = np.repeat(error <= 1.6, found["lengths"]) & batch()["loss_mask"]
    assert found["loss_mask"].tolist() == kept.tolist()
    assert 0 < (error <= 1.6).sum() < 7
