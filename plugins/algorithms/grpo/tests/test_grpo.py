"""The loop: what it does in which order, and that it learns a bandit whose optimum is known."""

import itertools
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from whet.component import AdvantagesFacts, Component, LossFacts, Selection
from whet.config.build import build, build_selection, to_spec
from whet.config.sections import RolloutSection
from whet.config.structure import structure
from whet.data.batch import from_sequences
from whet.data.metrics import Metric, merge
from whet.data.model_info import ModelInfo
from whet.data.records import Completion, Request, Task
from whet.interfaces.environment import SingleTurn
from whet.plan.plan import facts_of
from whet.plugins.registry import load_plugins
from whet.rollout.routing import Route
from whet.rollout.stream import RolloutStream
from whet_grpo.config import GrpoConfig, UnequalRewardsConfig
from whet_grpo.grpo import Grpo, choose_old_logprobs
from whet_testing.fakes import ByteChat

LETTERS = b"abcd"


class Step:
    """A step that keeps what it is told."""

    def __init__(self, number: int, said: list[str]) -> None:
        self.number, self.seed, self.said = number, number, said
        self.metrics: dict[str, Metric] = {}
        self.trained = 0
        """Tokens of its batch."""

    def log(self, metrics: Mapping[str, Metric]) -> None:
        self.metrics = merge([self.metrics, metrics])

    def finish(self, batch: Any) -> None:
        self.said.append("finish")
        self.trained = int(batch["loss_mask"].sum())


class Steps(list[Step]):
    """The steps of a run, and what is carried from one to the next."""

    def __init__(self, steps: Iterable[Step]) -> None:
        super().__init__(steps)
        self.state: dict[str, Any] = {}


class Table:
    """A policy over four letters, as backend and generator in one: real gradients, real sampling."""

    def __init__(self, learning_rate: float, said: list[str]) -> None:
        self.logits = torch.zeros(4, requires_grad=True)
        self.acting = self.logits.detach().clone()
        self.version = 0
        self._optimizer = torch.optim.SGD([self.logits], lr=learning_rate)
        self._said = said
        self.advantages: list[Any] = []
        """Of each batch trained on."""

    async def generate(self, request: Request) -> Completion:
        logprobs = torch.log_softmax(self.acting, 0)
        draw = np.random.default_rng(request.seed)
        letter = int(draw.choice(4, p=torch.softmax(self.acting.double(), 0).numpy()))
        if request.sampling.temperature == 0:
            letter = int(self.acting.argmax())
        tokens = np.array([LETTERS[letter], 256])
        return Completion(
            request.id, tokens, np.array([logprobs[letter], 0.0], np.float32), "stop", ((0, self.version),)
        )

    def _outputs(self, batch: Any) -> dict[str, Any]:
        tokens = torch.as_tensor(batch["tokens"])
        chosen = tokens.clamp(LETTERS[0], LETTERS[-1]) - LETTERS[0]
        kept = torch.as_tensor(batch["loss_mask"]) & (tokens != 256)
        logprobs = torch.log_softmax(self.logits, 0)
        # The token that ends a response is certain; that of the letter has the entropy of the policy.
        entropy = torch.where(kept, -(logprobs.exp() * logprobs).sum(), 0.0)
        return {"logprobs": torch.where(kept, logprobs[chosen], 0.0), "entropy": entropy}

    def train(self, batch: Any, loss: Any, count_over: Any = None) -> Mapping[str, Metric]:
        self._said.append("train")
        self.advantages.append(batch["advantages"])
        torched, loss = batch.map(torch.as_tensor), build(loss)
        result, counts = loss(self._outputs(torched), torched), loss.counts(torched)
        self._optimizer.zero_grad()
        sum(loss.weights[name] * term / counts[name] for name, term in result.terms.items()).backward()
        self._optimizer.step()
        return dict(result.metrics)

    def score(self, batch: Any, outputs: tuple[str, ...], weights: str = "policy") -> dict[str, Any]:
        self._said.append("score" if weights == "policy" else weights)
        found = {name: values.detach().numpy() for name, values in self._outputs(batch).items()}
        uniform = np.where(np.asarray(batch["loss_mask"]) & (batch["tokens"] != 256), np.float32(np.log(1 / 4)), 0)
        return found if weights == "policy" else {"logprobs": uniform.astype(np.float32)}

    def sync_weights(self, version: int) -> None:
        self._said.append("sync_weights")
        self.acting, self.version = self.logits.detach().clone(), version


def run(steps: int, said: list[str], learning_rate: float = 4.0, staleness: int = 0, **changes: Any) -> Any:
    """Run GRPO on the bandit: `c` is right."""
    filters = changes.pop("filters", [])
    config: GrpoConfig = evolve(structure(changes, GrpoConfig, load_plugins()), filters=filters)
    policy = Table(learning_rate, said)
    environment = SingleTurn({"train": [Task("?")] * 10}, {"right": lambda text, data: float(text == "c")})
    section = RolloutSection(max_tokens=4, max_staleness=staleness)
    rollouts = RolloutStream(
        [Route("bandit", environment, "train")], policy, ByteChat(), section,  # type: ignore[arg-type]
        group_size=config.group_size, seed=0, filters=[build_selection(chosen) for chosen in filters],
        greedy=facts_of(config.advantages, ModelInfo(""), AdvantagesFacts).greedy_sample,
    )  # fmt: skip

    def sync_weights(version: int) -> None:
        policy.sync_weights(version)
        rollouts.set_version(version)

    numbers = Steps(Step(n, said) for n in range(1, steps + 1))
    parts = SimpleNamespace(
        config=SimpleNamespace(rollout=section), rollouts=rollouts, backend=policy, steps=numbers,
        sync_weights=sync_weights, loss=to_spec(config.loss), build=build_selection,
    )  # fmt: skip
    try:
        Grpo(config).run(parts)  # type: ignore[arg-type]
    finally:
        rollouts.close()
    return policy, numbers


def test_a_masked_response_pays_no_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    """RLOO of TRL: `completion_mask` is 0 where a response was cut, and the KL of a response is summed over it."""
    row = {"tokens": [0, LETTERS[0], LETTERS[2]], "loss_mask": [False, True, True]}
    away = [np.array([0, -1, -1], np.float32), np.array([0, -5, -5], np.float32)]
    rows = [{**row, "sampler_logprobs": logprobs} for logprobs in away]
    made = from_sequences(rows, prompt_lengths=[1] * 2, group=[0] * 2)
    batch = made.with_columns(reward=np.array([1, 1], np.float32), stopped=np.array([True, False]))
    monkeypatch.setattr(RolloutStream, "take", lambda self, groups: batch)
    changes = {"kl_reward": {"weight": 0.05, "clamp": 0.0}, "old_logprobs": "sampler", "advantages": "rloo"}
    policy, _ = run(1, [], group_size=2, overlong={"mask": True}, **changes)
    kl = np.array([2 * (-1 - np.log(1 / 4)), 0])
    rewards = 1 - 0.05 * kl
    assert policy.advantages[0].tolist() == pytest.approx((rewards - rewards[::-1]).tolist(), rel=1e-5)


def test_a_conversation_in_two_sequences_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"tokens": [0, LETTERS[0], LETTERS[2]], "loss_mask": [False, True, True]}
    rows = [{**row, "sampler_logprobs": np.zeros(3, np.float32)}] * 3
    made = from_sequences(rows, prompt_lengths=[1] * 3, group=[0] * 3, episode=[0, 0, 1])
    columns = {"reward": np.array([1, 1, 0], np.float32), "conversation": np.array([0, 0, 1])}
    batch = made.with_columns(share=np.array([0.5, 0.5, 1], np.float32), **columns)
    monkeypatch.setattr(RolloutStream, "take", lambda self, groups: batch)
    advantages = {"use": "reinforce-plus-plus", "over": "sequences", "per_token": False}
    policy, _ = run(1, [], advantages=advantages, group_size=2)
    assert policy.advantages[0].tolist() == pytest.approx([1, 1, -1])


def chance(policy: Table) -> float:
    """Probability of the right letter."""
    return float(torch.softmax(policy.logits.detach(), 0)[2])


@pytest.mark.parametrize(
    ("staleness", "changes"),
    [
        (0, {}),
        (0, {"minibatches": 2}),
        (2, {}),
        (2, {"minibatches": 2}),
        (0, {"old_logprobs": "sampler"}),
        (0, {"epochs": 2}),
        (0, {"loss": "gspo"}),
        (0, {"loss": "cispo", "minibatches": 2}),
        (2, {"loss": "reinforce", "advantages": "rloo"}),
        (0, {"advantages": "gdpo"}),
        (0, {"advantages": "reinforce-plus-plus", "group_size": 1, "prompts_per_step": 32}),
        (0, {"advantages": "reinforce-plus-plus", "kl_reward": {"weight": 0.01}}),
        (2, {"correction": {"weights": "token", "mask": "sequence", "low": 0.1, "high": 10.0}}),
        (0, {"loss": {"use": "clipped-pg", "kl": {"weight": 0.01}}}),
        (0, {"loss": "sapo", "minibatches": 2}),
        (2, {"loss": "gmpo"}),
        (0, {"advantages": "opo"}),
        (0, {"advantages": "remax", "group_size": 1, "prompts_per_step": 32}),
        (0, {"advantages": "remax", "kl_reward": {"weight": 0.01, "adaptive": {"target": 0.5}}}),
        (0, {"top_entropy": {"share": 0.5}}),
        (0, {"top_entropy": {"share": 0.5, "count_rest": False}}),
        (2, {"loss": {"use": "clipped-pg", "off_policy": {"threshold": 0.2}}}),
        (0, {"loss": {"use": "clipped-pg", "likelihood": {"weight": 0.1}}}),
        (0, {"loss": {"use": "clipped-pg", "kl": {"weight": 0.01, "importance": "sampler"}}, "minibatches": 2}),
    ],
)
def test_it_learns_what_is_right(staleness: int, changes: Any) -> None:
    policy, _ = run(25, [], staleness=staleness, **{"prompts_per_step": 4, **changes})
    assert chance(policy) > 0.9


@pytest.mark.parametrize(
    "changes",
    [{"kl_reward": {"weight": 5.0}}, {"loss": {"use": "clipped-pg", "kl": {"weight": 5.0, "estimator": "k2"}}}],
)
def test_a_penalty_keeps_the_policy_near_its_reference(changes: Any) -> None:
    policy, steps = run(25, [], prompts_per_step=4, learning_rate=1.0, **changes)
    assert chance(policy) < 0.45
    assert any(name.startswith("kl_reference/") for name in steps[-1].metrics)


def test_advantages_are_clipped_and_reported() -> None:
    policy, steps = run(2, [], prompts_per_step=4, clip_advantages=0.5)
    assert max(abs(advantages).max() for advantages in policy.advantages) == 0.5
    assert steps[0].metrics["advantages/max"].number() == 0.5


def test_an_adaptive_penalty_follows_the_divergence_of_each_step() -> None:
    """32 responses change the weight by at most 0.2 x 32 / 8, as the horizon is 8. A response has one or two tokens."""
    control = {"target": 0.05, "horizon": 8.0}
    free, _ = run(25, [], prompts_per_step=4, learning_rate=1.0, kl_reward={"weight": 0.01})
    held, steps = run(25, [], prompts_per_step=4, learning_rate=1.0, kl_reward={"weight": 0.01, "adaptive": control})
    weights = [step.metrics["kl_reward/weight"].number() for step in steps]
    assert chance(held) < chance(free)
    assert weights[0] == 0.01
    assert max(weights) > 0.1
    weights.append(steps.state["kl_reward.weight"])
    for step, (before, after) in zip(steps, itertools.pairwise(weights), strict=True):
        divergence = step.metrics["kl_reference/reward"].number() * step.trained / 32
        error = min(max(divergence / 0.05 - 1, -0.2), 0.2)
        assert after == pytest.approx(before * (1 + error * 32 / 8), rel=1e-4)


def test_only_the_uncertain_tokens_teach() -> None:
    policy, steps = run(1, [], prompts_per_step=4, top_entropy={"share": 0.5})
    assert steps[0].metrics["top_entropy/share"].number() == 0.5
    (advantages,) = policy.advantages
    assert len(advantages) > 32 * 2
    assert 0 < np.count_nonzero(advantages) <= 32


@pytest.mark.parametrize(
    "changes",
    [
        {"covariance": {"method": "clip-cov", "share": 1.0, "low": 1e-6, "high": 99.0}, "minibatches": 2},
        {"covariance": {"method": "kl-cov", "share": 0.2, "weight": 10.0}, "epochs": 3},
    ],
)
def test_where_tokens_of_large_covariance_are_treated_the_policy_stays_uncertain(changes: Any) -> None:
    """What lowers the entropy of the bandit is the right letter, once it is likely."""
    entropies = []
    for section in (changes["covariance"], {}):
        policy, steps = run(15, [], prompts_per_step=8, learning_rate=1.0, **{**changes, "covariance": section})
        assert ("covariance/share" in steps[-1].metrics) == bool(section)
        logprobs = torch.log_softmax(policy.acting, 0)
        entropies.append(-float((logprobs.exp() * logprobs).sum()))
    assert entropies[0] > 1.5 * entropies[1]


def test_filtered_groups_are_replaced_so_that_every_group_teaches() -> None:
    component = Component("unequal-rewards", UnequalRewardsConfig, "whet_grpo.filters:UnequalRewards")
    unequal = Selection("filters", component, UnequalRewardsConfig())
    policy, _ = run(8, [], prompts_per_step=4, group_size=4, learning_rate=1.0, filters=[unequal])
    assert chance(policy) > 0.4
    assert all(advantages.all() for advantages in policy.advantages)
    assert all(len(advantages) == 16 for advantages in policy.advantages)


def test_the_order_of_a_step() -> None:
    said: list[str] = []
    run(2, said, prompts_per_step=2)
    assert said == ["train", "sync_weights", "finish"] * 2
    said.clear()
    run(1, said, prompts_per_step=2, minibatches=3)
    assert said == ["score", "train", "train", "train", "sync_weights", "finish"]
    said.clear()
    run(1, said, prompts_per_step=2, epochs=2)
    assert said == ["score", "train", "train", "sync_weights", "finish"]
    said.clear()
    run(1, said, prompts_per_step=2, kl_reward={"weight": 0.1})
    assert said == ["reference", "train", "sync_weights", "finish"]
    said.clear()
    guard = {"max_token_gap": 5.0}
    run(1, said, prompts_per_step=2, correction=guard, loss={"use": "gspo", "kl": {"weight": 0.1}})
    assert said == ["reference", "score", "train", "sync_weights", "finish"]


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({"correction": {"weights": "token"}}, 1),
        ({"correction": {"weights": "sequence", "mask": "token"}}, 1),
        ({"correction": {"weights": "token"}, "staleness": 2}, 1),
        ({"correction": {"weights": "token"}, "minibatches": 2}, 3),
        ({"correction": {"mask": "token", "count_masked": False}}, 2),
        ({"correction": {"max_mean_gap": 1.0}}, 2),
        ({"correction": {"max_mean_error": 1.5}}, 2),
        ({"correction": {"weights": "token"}, "kl_reward": {"weight": 0.1}}, 2),
    ],
)
def test_a_correction_takes_a_forward_pass_of_its_own_only_where_it_must(changes: Any, passes: int) -> None:
    said: list[str] = []
    _, steps = run(1, said, prompts_per_step=2, **changes)
    assert sum(word in ("score", "train") for word in said) == passes
    assert "correction/masked" in steps[0].metrics


def test_on_policy_the_trainer_agrees_with_the_sampler_and_nothing_is_clipped() -> None:
    _, steps = run(3, [], prompts_per_step=4)
    for step in steps:
        assert step.metrics["logprob_gap/max"].number() < 1e-6
        assert step.metrics["ratio/mean"].number() == 1.0
        assert step.metrics["clip_fraction"].number() == 0.0


def test_stale_weights_are_corrected_for_by_the_samplers_logprobs() -> None:
    _, steps = run(6, [], prompts_per_step=4, staleness=2)
    assert max(step.metrics["logprob_gap/max"].number() for step in steps) > 0.01
    assert any(abs(step.metrics["ratio/mean"].number() - 1) > 1e-3 for step in steps)


@pytest.mark.parametrize(
    ("wanted", "minibatches", "staleness", "source"),
    [
        ("auto", 1, 0, "current"),
        ("auto", 2, 0, "score"),
        ("auto", 1, 1, "sampler"),
        ("auto", 2, 1, "sampler"),
        ("trainer", 1, 3, "current"),
        ("trainer", 4, 3, "score"),
        ("sampler", 1, 0, "sampler"),
        ("sampler", 4, 0, "sampler"),
    ],
)
def test_old_logprobs_follow_the_rule(wanted: Any, minibatches: int, staleness: int, source: str) -> None:
    config = structure({"old_logprobs": wanted, "minibatches": minibatches}, GrpoConfig, load_plugins())
    assert choose_old_logprobs(config, staleness) == source


@pytest.mark.parametrize(("staleness", "source"), [(0, "score"), (1, "sampler")])
def test_a_loss_that_reads_old_logprobs_always_gets_them(staleness: int, source: str) -> None:
    config = structure({}, GrpoConfig, load_plugins())
    component = evolve(config.loss.component, facts=f"{__name__}:reading_facts")
    changed = evolve(config, loss=evolve(config.loss, component=component))
    assert choose_old_logprobs(changed, staleness) == source


@pytest.mark.parametrize(("staleness", "source"), [(0, "score"), (1, "sampler")])
@pytest.mark.parametrize("method", ["clip-cov", "kl-cov"])
def test_a_covariance_always_gets_old_logprobs(method: str, staleness: int, source: str) -> None:
    config = structure({"covariance": {"method": method}}, GrpoConfig, load_plugins())
    assert choose_old_logprobs(config, staleness) == source


def reading_facts(config: object, model: ModelInfo) -> LossFacts:
    return LossFacts(columns_read=frozenset({"advantages", "old_logprobs"}))


@pytest.mark.parametrize(("staleness", "minibatches"), [(0, 1), (0, 4), (2, 1)])
def test_a_correction_has_the_trainer_score(staleness: int, minibatches: int) -> None:
    document = {"correction": {"max_token_gap": 5.0}, "minibatches": minibatches}
    config = structure(document, GrpoConfig, load_plugins())
    assert choose_old_logprobs(config, staleness) == "score"
