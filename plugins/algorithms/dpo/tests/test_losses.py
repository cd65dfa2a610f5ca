"""Values, gradients and metrics against the formulas written out once more, in float64 and pair by pair."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from whet.data.batch import from_sequences
from whet_dpo import formulas, losses, unpaired, whole_losses
from whet_dpo import loss_config as config
from whet_dpo.loss_config import SftTerm
from whet_dpo.whole_config import BcoPairConfig

LENGTHS = ((3, 5), (1, 2), (6, 6), (4, 0))
"""Tokens to learn of each pair's responses; one response has none."""
PROMPT = 2
BETA = 0.3


class Case:
    """A batch of pairs, in an order that is not that of the pairs, with float64 logprobs of each response."""

    def __init__(self) -> None:
        rng = np.random.default_rng(4)
        order = [(1, True), (0, False), (3, False), (2, True), (2, False), (1, False), (0, True), (3, True)]
        rows = [self._row(LENGTHS[unit][0 if chosen else 1]) for unit, chosen in order]
        self.batch = from_sequences(rows, prompt_lengths=[PROMPT] * len(rows), unit=[unit for unit, _ in order])
        mask = self.batch["loss_mask"]
        self.policy, self.reference = (np.where(mask, -rng.exponential(2.0, len(mask)), 0.0) for _ in range(2))
        self.order = order
        self.batch = self.batch.with_columns(
            chosen=np.array([chosen for _, chosen in order]), reference_logprobs=self.reference.astype(np.float32)
        )

    @staticmethod
    def _row(learned: int) -> dict[str, Any]:
        # a token between, as of a tool, is not learned
        mask = np.array([False] * PROMPT + [True] * learned + [False])
        return {"tokens": np.arange(len(mask)), "loss_mask": mask}

    def of(self, logprobs: Any, unit: int, chosen: bool) -> Any:
        """Return the logprobs of the tokens to learn of one response."""
        at = self.order.index((unit, chosen))
        ends = np.cumsum(self.batch["lengths"])
        part = slice(ends[at] - self.batch["lengths"][at], ends[at])
        return logprobs[part][self.batch["loss_mask"][part]]


@pytest.fixture
def case() -> Case:
    return Case()


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return math.exp(log_sigmoid(x))


def log_odds(x: float) -> float:
    bounded = min(x, -1e-6)
    return bounded - math.log(1 - math.exp(bounded))


def divergence_of_bernoullis(mine: float, wanted: float) -> float:
    """KL(mine || wanted), EXO's loss of two responses."""
    return mine * math.log(mine / wanted) + (1 - mine) * math.log((1 - mine) / (1 - wanted))


def log_ratio_modulated(reward: float, temperature: float) -> float:
    """DiscoPOP's equation 5."""
    blend = sigmoid(reward / temperature)
    return -(1 - blend) * log_sigmoid(reward) + blend * math.exp(-reward)


def nothing(case: Case, policy: Any) -> float:
    return 0.0


def chosen_tokens(case: Case, policy: Any) -> list[Any]:
    return [case.of(policy, unit, True) for unit in range(len(LENGTHS))]


def nll_by_token(case: Case, policy: Any) -> float:
    return -sum(t.sum() for t in chosen_tokens(case, policy)) / sum(len(t) for t in chosen_tokens(case, policy))


def nll_by_sequence(case: Case, policy: Any) -> float:
    return float(np.mean([-t.mean() for t in chosen_tokens(case, policy)]))


def nll_summed(case: Case, policy: Any) -> float:
    return float(np.mean([-t.sum() for t in chosen_tokens(case, policy)]))


Formula = Callable[[float, float], float]
CASES: dict[str, tuple[Any, bool, bool, Formula, Any]] = {
    # loss, whether relative to the reference, whether averaged, the loss of a pair, the second term
    "dpo": (
        losses.Dpo(config.DpoLossConfig(beta=BETA)),
        True, False, lambda c, r: -log_sigmoid(BETA * (c - r)), nothing,
    ),
    "conservative": (
        losses.Dpo(config.DpoLossConfig(beta=BETA, label_smoothing=0.2)),
        True, False, lambda c, r: -0.8 * log_sigmoid(BETA * (c - r)) - 0.2 * log_sigmoid(BETA * (r - c)), nothing,
    ),
    "averaged": (
        losses.Dpo(config.DpoLossConfig(beta=BETA, average_logprobs=True)),
        True, True, lambda c, r: -log_sigmoid(BETA * (c - r)), nothing,
    ),
    "with likelihood": (
        losses.Dpo(config.DpoLossConfig(beta=BETA, sft=SftTerm(0.5))),
        True, False, lambda c, r: -log_sigmoid(BETA * (c - r)), lambda *a: 0.5 * nll_by_token(*a),
    ),
    "with likelihood by sequence": (
        losses.Hinge(config.HingeConfig(beta=BETA, sft=SftTerm(0.5, "sequence"))),
        True, False, lambda c, r: max(0.0, 1 - BETA * (c - r)), lambda *a: 0.5 * nll_by_sequence(*a),
    ),
    "with likelihood summed": (
        losses.Dpo(config.DpoLossConfig(beta=BETA, sft=SftTerm(0.5, "none"))),
        True, False, lambda c, r: -log_sigmoid(BETA * (c - r)), lambda *a: 0.5 * nll_summed(*a),
    ),
    "robust": (
        losses.RobustDpo(config.RobustDpoConfig(beta=BETA, flip_probability=0.1)),
        True, False,
        lambda c, r: (-0.9 * log_sigmoid(BETA * (c - r)) + 0.1 * log_sigmoid(BETA * (r - c))) / 0.8, nothing,
    ),
    "ipo": (losses.Ipo(config.IpoConfig(beta=BETA)), True, True, lambda c, r: (c - r - 1 / (2 * BETA)) ** 2, nothing),
    "ipo of sums": (
        losses.Ipo(config.IpoConfig(beta=BETA, average_logprobs=False)),
        True, False, lambda c, r: (c - r - 1 / (2 * BETA)) ** 2, nothing,
    ),
    "apo-zero": (
        losses.ApoZero(config.ApoZeroConfig(beta=BETA)),
        True, False, lambda c, r: 1 - sigmoid(BETA * c) + sigmoid(BETA * r), nothing,
    ),
    "apo-down": (
        losses.ApoDown(config.ApoDownConfig(beta=BETA)),
        True, False, lambda c, r: sigmoid(BETA * c) + 1 - sigmoid(BETA * (c - r)), nothing,
    ),
    "exo-pair": (
        losses.ExoPair(config.ExoPairConfig(beta=BETA, label_smoothing=0.05)),
        True, False, lambda c, r: divergence_of_bernoullis(sigmoid(BETA * (c - r)), 0.95), nothing,
    ),
    "discopop": (
        losses.Discopop(config.DiscopopConfig(beta=BETA, temperature=0.2)),
        True, False, lambda c, r: log_ratio_modulated(BETA * (c - r), 0.2), nothing,
    ),
    "nca-pair": (
        losses.NcaPair(config.NcaPairConfig(beta=BETA)),
        True, False,
        lambda c, r: -log_sigmoid(BETA * c) - 0.5 * (log_sigmoid(-BETA * c) + log_sigmoid(-BETA * r)), nothing,
    ),
    "sppo-hard": (
        losses.SppoHard(config.SppoHardConfig(beta=BETA)),
        # (log-ratio - eta (P - 1/2))^2 with eta = 1 / beta, and P 1 for the chosen response, 0 for the other
        True, False, lambda c, r: (c - (1 - 0.5) / BETA) ** 2 + (r - (0 - 0.5) / BETA) ** 2, nothing,
    ),
    "bco-pair without shift": (
        whole_losses.BcoPair(BcoPairConfig(beta=BETA, shift="none")),
        True, False, lambda c, r: -log_sigmoid(BETA * c) - log_sigmoid(-BETA * r), nothing,
    ),
    "cpo": (
        losses.Cpo(config.CpoConfig(beta=BETA, label_smoothing=0.1)),
        False, False, lambda c, r: -0.9 * log_sigmoid(BETA * (c - r)) - 0.1 * log_sigmoid(BETA * (r - c)), nll_by_token,
    ),
    # TRL's cpo_loss: relu(1 - beta * logits), and of mean logprobs (logits - 1 / (2 * beta)) ** 2
    "cpo, hinge": (
        losses.Cpo(config.CpoConfig(beta=BETA, loss_type="hinge")),
        False, False, lambda c, r: max(0.0, 1 - BETA * (c - r)), nll_by_token,
    ),
    "cpo, ipo": (
        losses.Cpo(config.CpoConfig(beta=BETA, loss_type="ipo")),
        False, True, lambda c, r: (c - r - 1 / (2 * BETA)) ** 2, nll_by_token,
    ),
    "cpo, ipo of sums": (
        losses.Cpo(config.CpoConfig(beta=BETA, loss_type="ipo", average_logprobs=False)),
        False, False, lambda c, r: (c - r - 1 / (2 * BETA)) ** 2, nll_by_token,
    ),
    "simpo": (
        losses.Simpo(config.SimpoConfig(beta=1.5, gamma=0.7)),
        False, True, lambda c, r: -log_sigmoid(1.5 * (c - r) - 0.7), nothing,
    ),
    "simpo with label smoothing": (
        losses.Simpo(config.SimpoConfig(beta=1.5, gamma=0.7, label_smoothing=0.1)),
        False, True,
        lambda c, r: -0.9 * log_sigmoid(1.5 * (c - r) - 0.7) - 0.1 * log_sigmoid(0.7 - 1.5 * (c - r)), nothing,
    ),
    "orpo": (
        losses.Orpo(config.OrpoConfig(beta=BETA)),
        False, True, lambda c, r: -BETA * log_sigmoid(log_odds(c) - log_odds(r)), nll_by_token,
    ),
}  # fmt: skip


def score(case: Case, policy: Any, unit: int, chosen: bool, referenced: bool, averaged: bool) -> float:
    own = case.of(policy, unit, chosen) - (case.of(case.reference, unit, chosen) if referenced else 0.0)
    return float(own.sum() / max(len(own), 1) if averaged else own.sum())


def expected(case: Case, policy: Any, name: str) -> float:
    _, referenced, averaged, formula, second = CASES[name]
    pairs = [[score(case, policy, u, c, referenced, averaged) for c in (True, False)] for u in range(len(LENGTHS))]
    return float(np.mean([formula(*pair) for pair in pairs]) + second(case, policy))


def computed(loss: Any, batch: Any, policy: Any) -> tuple[float, Any, dict[str, float]]:
    torched = batch.map(torch.from_numpy)
    logprobs = torch.from_numpy(policy.astype(np.float32)).requires_grad_()
    result, counts = loss({"logprobs": logprobs}, torched), loss.counts(torched)
    value = sum(loss.weights[name] * term / counts[name] for name, term in result.terms.items())
    (gradient,) = torch.autograd.grad(value, logprobs)
    return float(value.detach()), gradient.numpy(), {name: metric.number() for name, metric in result.metrics.items()}


def computed_counts(loss: Any, batch: Any) -> dict[str, int]:
    return {name: int(count) for name, count in loss.counts(batch.map(torch.from_numpy)).items()}


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_the_formula(case: Case, name: str) -> None:
    value, gradient, _ = computed(CASES[name][0], case.batch, case.policy)
    assert value == pytest.approx(expected(case, case.policy, name), rel=1e-5)
    step = 1e-6
    for at in range(len(case.policy)):
        up, down = case.policy.copy(), case.policy.copy()
        up[at] += step
        down[at] -= step
        slope = (expected(case, up, name) - expected(case, down, name)) / (2 * step)
        wanted = slope if case.batch["loss_mask"][at] else 0.0
        assert gradient[at] == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_rewards_are_beta_times_what_is_compared(case: Case, name: str) -> None:
    loss, referenced, averaged, _, second = CASES[name]
    _, _, metrics = computed(loss, case.batch, case.policy)
    beta = loss.config.beta
    rewards = {
        chosen: [beta * score(case, case.policy, u, chosen, referenced, averaged) for u in range(len(LENGTHS))]
        for chosen in (True, False)
    }
    sums = {c: [case.of(case.policy, u, c).sum() for u in range(len(LENGTHS))] for c in (True, False)}
    wanted = {
        "rewards/chosen": np.mean(rewards[True]),
        "rewards/rejected": np.mean(rewards[False]),
        "rewards/margins": np.mean(rewards[True]) - np.mean(rewards[False]),
        "rewards/accuracies": np.mean(np.array(rewards[True]) > np.array(rewards[False])),
        "logps/chosen": np.mean(sums[True]),
        "logps/rejected": np.mean(sums[False]),
    }
    if second is not nothing:
        wanted["nll"] = nll_by_token(case, case.policy)
    assert metrics == pytest.approx(wanted, rel=1e-5)


def test_a_policy_that_is_its_reference_is_right_by_halves(case: Case) -> None:
    value, _, metrics = computed(CASES["dpo"][0], case.batch, case.reference)
    assert value == pytest.approx(math.log(2))
    assert metrics["rewards/margins"] == 0
    assert metrics["rewards/accuracies"] == 0.5


@pytest.mark.parametrize(("ties", "accuracy"), [("half", 0.5), ("wrong", 0.0), ("right", 1.0)])
def test_a_tie_counts_as_it_is_told_to(case: Case, ties: Any, accuracy: float) -> None:
    how = config.PairMetrics(ties=ties)
    _, _, metrics = computed(losses.Dpo(config.DpoLossConfig(metrics=how)), case.batch, case.reference)
    assert metrics["rewards/accuracies"] == accuracy
    batch = case.batch.with_columns(desirable=case.batch["chosen"], kl_baseline=np.zeros(8, np.float32))
    _, _, metrics = computed(unpaired.Kto(config.KtoLossConfig(metrics=how)), batch, case.reference)
    assert metrics["rewards/accuracies"] == accuracy


def test_rewards_may_be_reported_as_trl_and_nemo_rl_do(case: Case) -> None:
    def reported(**how: Any) -> tuple[float, dict[str, float]]:
        loss = losses.Ipo(config.IpoConfig(beta=BETA, metrics=config.PairMetrics(**how)))
        value, _, metrics = computed(loss, case.batch, case.policy)
        return value, metrics

    value, ours = reported()
    sums, means = (
        np.mean([score(case, case.policy, u, True, True, averaged) for u in range(len(LENGTHS))])
        for averaged in (False, True)
    )
    trl, nemo = reported(rewards="summed", ties="wrong"), reported(scaled=False, ties="wrong")
    assert trl[0] == nemo[0] == value, "what is reported changes nothing that is learned"
    assert ours["rewards/chosen"] == pytest.approx(BETA * means, rel=1e-5)
    assert trl[1]["rewards/chosen"] == pytest.approx(BETA * sums, rel=1e-5)
    assert nemo[1]["rewards/chosen"] == pytest.approx(means, rel=1e-5)
    logps = [case.of(case.policy, u, True).mean() for u in range(len(LENGTHS))]
    assert reported(logps="mean")[1]["logps/chosen"] == pytest.approx(np.mean(logps), rel=1e-5)


def test_the_prompt_may_be_learned_beside_the_response(case: Case) -> None:
    """TRL's ORPO: the odds are the response's, the likelihood is of prompt and response."""
    starts = np.cumsum(case.batch["lengths"]) - case.batch["lengths"]
    place = np.arange(case.batch.tokens) - np.repeat(starts, case.batch["lengths"])
    chosen = np.repeat(case.batch["chosen"], case.batch["lengths"])
    mask = np.where(chosen, place > 0, case.batch["loss_mask"])
    batch = case.batch.with_columns(loss_mask=mask, response_mask=case.batch["loss_mask"])
    policy = np.where(mask & ~case.batch["loss_mask"], -0.7, case.policy)
    loss = losses.Orpo(config.OrpoConfig(beta=BETA, sft=SftTerm(1.0, of="conversation")))
    value, gradient, metrics = computed(loss, batch, policy)
    nll = -policy[mask & chosen].sum() / (mask & chosen).sum()
    odds = expected(case, case.policy, "orpo") - nll_by_token(case, case.policy)
    assert value == pytest.approx(odds + nll, rel=1e-5)
    assert metrics["nll"] == pytest.approx(nll, rel=1e-5)
    plain = computed(CASES["orpo"][0], case.batch, case.policy)[2]
    assert {n: v for n, v in metrics.items() if n != "nll"} == pytest.approx(
        {n: v for n, v in plain.items() if n != "nll"}, rel=1e-5
    )
    prompts = mask & ~case.batch["loss_mask"]
    assert gradient[prompts] == pytest.approx(-1 / (mask & chosen).sum(), rel=1e-5)


def test_a_single_pair_is_enough_and_one_without_tokens_counts_nothing(case: Case) -> None:
    one = case.batch.where(case.batch["unit"] == 3)
    assert math.isfinite(computed(losses.Dpo(config.DpoLossConfig()), one, np.zeros(one.tokens))[0])
    empty = one.with_columns(loss_mask=np.zeros(one.tokens, bool)).map(torch.from_numpy)
    loss = losses.Dpo(config.DpoLossConfig(sft=SftTerm(0.1)))
    assert {name: float(count) for name, count in loss.counts(empty).items()} == {"preference": 0, "sft": 0}
    assert not loss.live(empty).any()


def test_units_that_are_no_pairs_are_refused(case: Case) -> None:
    torn = case.batch.take(np.arange(1, case.batch.sequences))
    with pytest.raises(ValueError, match="one chosen and one rejected sequence in each unit"):
        computed(losses.Dpo(config.DpoLossConfig()), torn, case.policy[int(case.batch["lengths"][0]) :])


def test_kto_weighs_both_kinds_against_the_baseline(case: Case) -> None:
    desirable = case.batch["chosen"]
    baseline = np.full(case.batch.sequences, 0.4, np.float32)
    batch = case.batch.with_columns(desirable=desirable, kl_baseline=baseline)
    loss = unpaired.Kto(config.KtoLossConfig(beta=BETA, desirable_weight=1.5, undesirable_weight=0.5))

    def kto(policy: Any) -> float:
        total, count = 0.0, 0
        for unit, chosen in case.order:
            if LENGTHS[unit][0 if chosen else 1]:
                ahead = score(case, policy, unit, chosen, True, False) - 0.4
                total += (1.5 * (1 - sigmoid(BETA * ahead))) if chosen else (0.5 * (1 - sigmoid(-BETA * ahead)))
                count += 1
        return total / count

    value, gradient, metrics = computed(loss, batch, case.policy)
    assert value == pytest.approx(kto(case.policy), rel=1e-5)
    at = int(np.flatnonzero(case.batch["loss_mask"])[3])
    up, down = case.policy.copy(), case.policy.copy()
    up[at] += 1e-6
    down[at] -= 1e-6
    assert gradient[at] == pytest.approx((kto(up) - kto(down)) / 2e-6, rel=1e-4)
    assert metrics["kl"] == pytest.approx(0.4)
    scores = [[score(case, case.policy, unit, chosen, True, False) for chosen in (True, False)] for unit in range(4)]
    assert metrics["rewards/accuracies"] == pytest.approx(np.mean([one > other for one, other in scores]))


def test_kto_by_kinds_is_the_mean_of_two_means_so_that_more_of_one_kind_pull_no_more(case: Case) -> None:
    desirable = np.arange(case.batch.sequences) < 2
    baseline = np.full(case.batch.sequences, 0.4, np.float32)
    batch = case.batch.with_columns(desirable=desirable, kl_baseline=baseline)
    weights = {"beta": BETA, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    value, gradient, _ = computed(unpaired.Kto(config.KtoLossConfig(average="kinds", **weights)), batch, case.policy)
    whole = unpaired.Kto(config.KtoLossConfig(**weights))
    means, gradients, owner = [], [], np.repeat(desirable, batch["lengths"])
    for kind in (True, False):
        mine = batch.with_columns(loss_mask=batch["loss_mask"] & (owner == kind))
        one, slope, _ = computed(whole, mine, case.policy)
        means.append(one)
        gradients.append(slope)
    assert value == pytest.approx(sum(means) / 2, rel=1e-6)
    np.testing.assert_allclose(gradient, sum(gradients) / 2, rtol=1e-5, atol=1e-9)
    only = batch.with_columns(desirable=np.ones(batch.sequences, bool))
    assert computed_counts(unpaired.Kto(config.KtoLossConfig(average="kinds")), only)["undesirable"] == 0


def test_kto_of_single_responses_has_no_accuracy(case: Case) -> None:
    batch = case.batch.with_columns(
        desirable=case.batch["chosen"],
        kl_baseline=np.zeros(case.batch.sequences, np.float32),
        unit=np.arange(case.batch.sequences),
    )
    _, _, metrics = computed(unpaired.Kto(config.KtoLossConfig()), batch, case.policy)
    assert "rewards/accuracies" not in metrics
    assert set(metrics) == {"kl", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("log_ratio", [-50.0, 50.0])
def test_tokens_50_nats_apart_stay_finite(case: Case, name: str, log_ratio: float) -> None:
    mask = case.batch["loss_mask"]
    high = np.where(mask, -1e-7, 0.0)
    far = np.where(mask & np.repeat(case.batch["chosen"], case.batch["lengths"]), high - abs(log_ratio), high)
    policy, reference = (far, high) if log_ratio < 0 else (high, far)
    value, gradient, metrics = computed(
        CASES[name][0], case.batch.with_columns(reference_logprobs=reference.astype(np.float32)), policy
    )
    assert math.isfinite(value)
    assert np.isfinite(gradient).all()
    assert all(map(math.isfinite, metrics.values()))


@pytest.mark.parametrize(
    ("formula", "value", "gradient"),
    [
        # ORPOTrainer.odds_ratio_loss, beta 0.3
        (lambda c, r: 0.3 * formulas.odds_ratio(c, r), 0.1558142, [-0.0667265, -0.0898201, -0.0107104]),
        # CPOTrainer.cpo_loss, loss_type="simpo", beta 1.5, simpo_gamma 0.7, label_smoothing 0.1
        (lambda c, r: formulas.simpo(c - r, 1.5, 0.7, 0.1), 0.8623624, [-0.2124896, -0.3549992, 0.0199567]),
        # the same with loss_type="hinge" and "ipo", beta 0.3
        (losses.Cpo(config.CpoConfig(beta=0.3, loss_type="hinge")).preference, 0.78, [-0.1, -0.1, -0.1]),
        (
            losses.Cpo(config.CpoConfig(beta=0.3, loss_type="ipo")).preference,
            2.2333333,
            [-0.8444445, -1.4444444, 0.4222222],
        ),
    ],
    ids=["orpo", "simpo", "cpo-hinge", "cpo-ipo"],
)
def test_formulas_give_the_numbers_that_trl_1_16_gave(formula: Any, value: float, gradient: list[float]) -> None:
    chosen = torch.tensor([-0.7, -1.4, -0.2], requires_grad=True)
    loss = formula(chosen, torch.tensor([-1.1, -0.9, -2.5])).mean()
    (slope,) = torch.autograd.grad(loss, chosen)
    assert float(loss.detach()) == pytest.approx(value, rel=1e-5)
    assert slope.tolist() == pytest.approx(gradient, abs=2e-6)


DIVERGENCES: dict[str, Callable[[float], float]] = {
    # f' of u = exp(log-ratio), Wang et al. 2023, table 1; constants cancel in a margin
    "reverse-kl": lambda s: s,
    "forward-kl": lambda s: -math.exp(-s),
    "jensen-shannon": lambda s: math.log(2 * math.exp(s) / (1 + math.exp(s))),
    "alpha": lambda s: (1 - math.exp(s) ** -0.3) / 0.3,
}
DIVERGENT: dict[str, tuple[Any, Any, Formula]] = {
    "dpo": (losses.Dpo, config.DpoLossConfig, lambda c, r: -log_sigmoid(BETA * (c - r))),
    "ipo": (losses.Ipo, config.IpoConfig, lambda c, r: (c - r - 1 / (2 * BETA)) ** 2),
    "exo-pair": (
        losses.ExoPair, config.ExoPairConfig,
        lambda c, r: divergence_of_bernoullis(sigmoid(BETA * (c - r)), 0.999),
    ),
}  # fmt: skip


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("name", DIVERGENT)
def test_a_divergence_turns_log_ratios_into_scores(case: Case, name: str, divergence: Any) -> None:
    loss, section, formula = DIVERGENT[name]
    made = loss(section(beta=BETA, average_logprobs=False, divergence=divergence, divergence_alpha=0.3))

    def wanted(policy: Any) -> float:
        transform = DIVERGENCES[divergence]
        pairs = [[score(case, policy, u, c, True, False) for c in (True, False)] for u in range(len(LENGTHS))]
        return float(np.mean([formula(*map(transform, pair)) for pair in pairs]))

    policy = case.reference + 0.3 * (case.policy - case.reference)
    value, gradient, metrics = computed(made, case.batch, policy)
    assert value == pytest.approx(wanted(policy), rel=1e-5)
    for at in np.flatnonzero(case.batch["loss_mask"])[::3]:
        up, down = policy.copy(), policy.copy()
        up[at] += 1e-6
        down[at] -= 1e-6
        assert gradient[at] == pytest.approx((wanted(up) - wanted(down)) / 2e-6, rel=1e-3, abs=1e-6)
    plain = computed(losses.Dpo(config.DpoLossConfig(beta=BETA)), case.batch, policy)[2]
    assert metrics["logps/chosen"] == plain["logps/chosen"]
    summed = loss(section(beta=BETA, divergence=divergence, metrics=config.PairMetrics(rewards="summed")))
    assert computed(summed, case.batch, policy)[2]["rewards/chosen"] == plain["rewards/chosen"]


def test_a_divergence_averaged_over_tokens_is_divided_after_it_is_taken(case: Case) -> None:
    made = losses.Dpo(config.DpoLossConfig(beta=BETA, average_logprobs=True, divergence="jensen-shannon"))
    transform = DIVERGENCES["jensen-shannon"]

    def one(unit: int, chosen: bool) -> float:
        tokens = LENGTHS[unit][0 if chosen else 1]
        return transform(score(case, case.policy, unit, chosen, True, False)) / max(tokens, 1)

    wanted = np.mean([-log_sigmoid(BETA * (one(u, True) - one(u, False))) for u in range(len(LENGTHS))])
    assert computed(made, case.batch, case.policy)[0] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("alpha", "same"), [(0.0, "reverse-kl"), (1.0, "forward-kl")])
def test_the_ends_of_alpha_are_the_two_kl_divergences(case: Case, alpha: float, same: Any) -> None:
    policy = case.reference + 0.3 * (case.policy - case.reference)
    one = losses.Dpo(config.DpoLossConfig(divergence="alpha", divergence_alpha=alpha))
    other = losses.Dpo(config.DpoLossConfig(divergence=same))
    assert computed(one, case.batch, policy)[0] == computed(other, case.batch, policy)[0]


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
def test_tokens_beyond_the_shared_length_weigh_less(case: Case, alpha: float) -> None:
    """LD-DPO, Liu et al. 2024, equation 9: the likelihood of the shared part times that of the rest to the alpha."""
    made = losses.Dpo(config.DpoLossConfig(beta=BETA, ld_alpha=alpha))

    def one(unit: int, chosen: bool) -> float:
        ratios = case.of(case.policy, unit, chosen) - case.of(case.reference, unit, chosen)
        shared = min(LENGTHS[unit])
        return float(ratios[:shared].sum() + alpha * ratios[shared:].sum())

    wanted = np.mean([-log_sigmoid(BETA * (one(u, True) - one(u, False))) for u in range(len(LENGTHS))])
    value, gradient, _ = computed(made, case.batch, case.policy)
    assert value == pytest.approx(wanted, rel=1e-5)
    first, last = case.of(gradient, 0, False)[0], case.of(gradient, 0, False)[-1]
    assert last == pytest.approx(alpha * first, rel=1e-5)


def test_a_hand_worked_pair() -> None:
    """Scores 2 and -1, beta 1/2: rewards 1 and -1/2, margin 3/2."""
    chosen, rejected = torch.tensor([2.0]), torch.tensor([-1.0])
    found = {
        "sppo-hard": formulas.sppo_hard(chosen, rejected, 0.5),  # (2 - 1)^2 + (-1 + 1)^2
        "bco": sum(
            formulas.bco(s, torch.tensor([d]), torch.tensor([0.5]), 0.5) for s, d in ((chosen, True), (rejected, False))
        ),  # -log sigmoid(3/4) - log sigmoid(3/4): both are 3/4 from the shift of 1/4, scaled
        "nca-pair": formulas.nca_pair(chosen, rejected, 0.5),
        "exo-pair": formulas.exo_pair(chosen - rejected, 0.5, 0.25),
        "discopop": formulas.discopop(chosen - rejected, 0.5, 1.0),
    }
    wanted = {
        "sppo-hard": 1.0,
        "bco": 2 * 0.3868710,
        "nca-pair": 0.3132617 + 0.5 * 1.3132617 + 0.5 * 0.4740770,
        "exo-pair": 0.8175745 * (-0.2014133 + 0.2876821) + 0.1824255 * (-1.7014133 + 1.3862944),
        "discopop": 0.1824255 * 0.2014133 + 0.8175745 * 0.2231302,
    }
    assert {name: float(value) for name, value in found.items()} == pytest.approx(wanted, abs=2e-6)


def test_discopop_of_a_pair_that_is_far_behind_is_its_log_loss() -> None:
    far = torch.tensor([-3000.0], requires_grad=True)
    loss = formulas.discopop(far, 0.1, 0.05)
    (slope,) = torch.autograd.grad(loss.sum(), far)
    assert (float(loss.detach()), float(slope)) == pytest.approx((300.0, -0.1))


@pytest.mark.parametrize(("temperature", "sign"), [(0.05, 1), (0.102, 1), (0.103, -1), (1.0, -1)])
def test_discopop_pushes_a_level_pair_the_wrong_way_at_low_temperature(temperature: float, sign: int) -> None:
    level = torch.zeros(1, requires_grad=True)
    (slope,) = torch.autograd.grad(formulas.discopop(level, 1.0, temperature).sum(), level)
    assert float(slope) == pytest.approx((1 - math.log(2)) / (4 * temperature) - 0.75, abs=1e-5)
    assert math.copysign(1, float(slope)) == sign
