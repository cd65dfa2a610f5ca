"""Advantages where rewards have an address: of agents, of sequences, of turns."""

from typing import Any

import numpy as np
import pytest

from whet.data.batch import Batch
from whet.errors import PluginError
from whet_grpo.advantages import Gdpo, GroupMean, Opo, ReinforcePlusPlus, Remax, Rloo, RoleBaseline, TurnReturns
from whet_grpo.config import (
    GdpoConfig,
    GroupMeanConfig,
    OpoConfig,
    ReinforcePlusPlusConfig,
    RemaxConfig,
    RlooConfig,
    RoleBaselineConfig,
    TurnReturnsConfig,
)
from whet_ops.members import by_conversation, members_of, placed_rewards
from whet_ops.reductions import of_tokens

ENV = [-1, -1]


def batch_of(sequences: list[list[float]], group: list[int], **columns: Any) -> Batch:
    """Return a batch in which each sequence has a prompt of two tokens and turns of two tokens with these rewards.

    Two tokens of the environment follow each turn but the last one.
    """
    turn, spans, lengths = [], [], []
    for rewards in sequences:
        own, placed = list(ENV), [0.0, 0.0]
        for number, reward in enumerate(rewards):
            own += [number, number, *(ENV if number < len(rewards) - 1 else [])]
            placed += [0.0, reward, *([0.0, 0.0] if number < len(rewards) - 1 else [])]
        turn, spans, lengths = [*turn, *own], [*spans, *placed], [*lengths, len(own)]
    turns = np.array(turn, np.int32)
    reward = np.array([sum(rewards) for rewards in sequences], np.float32) + np.array(
        columns.pop("final", [0.0] * len(sequences)), np.float32
    )
    return Batch(
        {"tokens": np.zeros(len(turns), np.int64), "loss_mask": turns >= 0, "turn": turns,
         "span_rewards": np.array(spans, np.float32)},
        {"lengths": np.array(lengths), "prompt_lengths": np.full(len(lengths), 2), "unit": np.arange(len(lengths)),
         "group": np.array(group), "episode": np.arange(len(sequences)), "reward": reward,
         **{name: np.array(column) for name, column in columns.items()}},
    )  # fmt: skip


def at_turns(batch: Batch, advantages: Any) -> list[list[float]]:
    """Return the advantage of each turn of each sequence, after a check that all its tokens have it."""
    found, start = [], 0
    for length in batch["lengths"]:
        own, values = batch["turn"][start : start + length], advantages[start : start + length]
        start += length
        assert (values[own < 0] == 0).all()
        found.append([float(values[own == number][0]) for number in range(own.max() + 1)])
        assert all(len(set(values[own == number])) == 1 for number in range(own.max() + 1))
    return found


def test_a_turn_is_compared_with_the_same_turn_of_the_others() -> None:
    batch = batch_of([[1.0, 2.0], [0.0, 4.0], [5.0]], [0, 0, 0], final=[0.0, 8.0, 0.0])
    gamma = 0.5
    returns = [[1 + gamma * 2, 2], [0 + gamma * 12, 12], [5]]
    found = at_turns(batch, TurnReturns(TurnReturnsConfig(gamma=gamma))(batch))
    assert found[0] == pytest.approx([2 - (6 + 5) / 2, 2 - 12])
    assert found[1] == pytest.approx([6 - (2 + 5) / 2, 12 - 2])
    assert found[2] == pytest.approx([5 - (2 + 6) / 2])
    plain = at_turns(batch, TurnReturns(TurnReturnsConfig(gamma=gamma, baseline="none"))(batch))
    assert plain == [pytest.approx(own) for own in returns]
    first = np.array([2, 6, 5.0])
    scaled = TurnReturns(TurnReturnsConfig(gamma=gamma, baseline="group-mean", scale="group", epsilon=0.0))(batch)
    assert [own[0] for own in at_turns(batch, scaled)] == pytest.approx((first - first.mean()) / first.std(ddof=1))
    alone = batch_of([[1.0], [2.0]], [0, 1])
    assert at_turns(alone, TurnReturns(TurnReturnsConfig())(alone)) == [[0.0], [0.0]]
    kept = TurnReturns(TurnReturnsConfig(singleton="reward"))(alone)
    assert at_turns(alone, kept) == [[1.0], [2.0]]


def test_a_single_turn_is_rloo_and_the_cost_of_a_token_belongs_to_its_turn() -> None:
    rewards = np.random.default_rng(0).normal(size=8).round(3)
    batch = batch_of([[0.0]] * 8, [0, 0, 0, 0, 1, 1, 1, 1], final=rewards)
    rloo = Rloo(RlooConfig())(batch)
    assert [own[0] for own in at_turns(batch, TurnReturns(TurnReturnsConfig())(batch))] == pytest.approx(rloo.tolist())
    costs = np.where(batch["turn"] == 0, -0.5, 0.0).astype(np.float32)
    two = batch_of([[1.0, 2.0], [0.0, 0.0]], [0, 0])
    costs = np.where(two["turn"] == 0, -0.5, 0.0).astype(np.float32)
    charged = two.with_columns(token_rewards=costs, task_reward=two["reward"], reward=two["reward"] - 1)
    found = at_turns(charged, TurnReturns(TurnReturnsConfig(baseline="none"))(charged))
    assert found == [[3 - 1, 2], [-1, 0]]


def test_agents_are_compared_with_themselves() -> None:
    reward = np.array([1, -1, -1, 1, 3, -3, 1, -1], np.float32)
    columns = {"final": reward, "agent": [0, 1] * 4, "member": np.arange(8), "episode": [0, 0, 1, 1, 2, 2, 3, 3]}
    batch = batch_of([[0.0]] * 8, [0] * 8, **columns)
    found = GroupMean(GroupMeanConfig(scale="none"))(batch)
    white = reward[::2] - reward[::2].mean()
    assert found[::2] == pytest.approx(white)
    assert found[1::2] == pytest.approx(-white)
    # Without agents the mean would be 0, and the advantage the reward.
    members = members_of(batch)
    assert len(set(members.cohort)) == 2
    assert len(members.first) == 8


def test_sequences_of_a_member_count_once() -> None:
    columns = {"final": [1.0, 1.0, 4.0], "episode": [0, 0, 1], "member": [0, 0, 1], "agent": [0, 0, 0]}
    batch = batch_of([[0.0]] * 3, [0] * 3, **columns)
    assert GroupMean(GroupMeanConfig(scale="none"))(batch).tolist() == [-1.5, -1.5, 1.5]
    apart = batch.with_columns(member=np.array([0, 1, 2]))
    assert GroupMean(GroupMeanConfig(scale="none"))(apart).tolist() == [-1, -1, 2]
    without = Batch(batch.per_token, {k: v for k, v in batch.per_sequence.items() if k not in ("member", "agent")})
    assert GroupMean(GroupMeanConfig(scale="none"))(without).tolist() == [-1.5, -1.5, 1.5]


def test_a_role_has_a_moving_baseline_that_resumes_to_the_last_bit() -> None:
    def step(number: int) -> Batch:
        reward = np.random.default_rng(number).normal(size=4)
        columns = {"final": reward, "agent": [0, 1, 0, 1], "env": [0, 0, 1, 1], "episode": [0, 0, 1, 1]}
        made = batch_of([[0.0]] * 4, [0, 0, 1, 1], **columns, member=np.arange(4))
        return Batch(made.per_token, made.per_sequence, {"environments": ("go", "chess"), "agents": ("w", "b")})

    config = RoleBaselineConfig(decay=0.9)
    whole = RoleBaseline(config)
    straight = [whole(step(i)).tolist() for i in range(4)]
    before = RoleBaseline(config)
    resumed = [before(step(i)).tolist() for i in range(2)]
    after = RoleBaseline(config)
    after.load(before.state())
    resumed += [after(step(i)).tolist() for i in (2, 3)]
    assert resumed == straight
    assert set(whole.state()) == {"go/w", "go/b", "chess/w", "chess/b"}
    own = [float(step(i)["reward"][0]) for i in range(3)]
    averages = [0.0]
    for reward in own:
        averages.append(0.9 * averages[-1] + 0.1 * reward)
    assert [row[0] for row in straight[:3]] == pytest.approx(
        [reward - average for reward, average in zip(own, averages, strict=False)]
    )


def test_a_role_baseline_discounts_from_the_last_turn() -> None:
    batch = batch_of([[0.0, 0.0, 0.0], [0.0]], [0, 0], final=[2.0, 3.0])
    found = at_turns(batch, RoleBaseline(RoleBaselineConfig(decay=1.0, gamma=0.5))(batch))
    assert found == [[0.5, 1.0, 2.0], [3.0]]


def rewritten(batch: Batch, cut: list[int]) -> Batch:
    """Return a batch in which some sequences continue in a second part from turn 1 on, after three context tokens."""
    places, owner, context = [], [], []
    ends = np.cumsum(batch["lengths"])
    for number, (begin, end) in enumerate(zip(ends - batch["lengths"], ends, strict=True)):
        at = begin + int(np.argmax(batch["turn"][begin:end] == 1)) if number in cut else end
        for part in ([*range(begin, at)], [begin] * 3 + [*range(at, end)])[: 1 + (number in cut)]:
            context += [bool(owner) and owner[-1] == number and i < 3 for i in range(len(part))]
            places, owner = [*places, part], [*owner, number]
    given, outside = np.concatenate(places), {"turn": -1, "version": -1}
    per_token = {
        name: np.where(context, np.asarray(outside.get(name, 0), column.dtype), column[given])
        for name, column in batch.per_token.items()
    }
    columns = {name: column[owner] for name, column in batch.per_sequence.items()}
    lengths = np.array([len(part) for part in places])
    return Batch(
        per_token,
        {**columns, "lengths": lengths, "unit": np.arange(len(owner)), "conversation": np.array(owner)},
        batch.info,
    )


def charged() -> Batch:
    """Return two groups of samples with rewards of turns and a penalty at each token."""
    random = np.random.default_rng(0)
    rewards = [random.normal(size=n).round(2).tolist() for n in (3, 1, 2, 2, 3, 2)]
    made = batch_of(rewards, [0, 0, 0, 1, 1, 1], final=random.normal(size=6), env=[0] * 6, agent=[0] * 6,
                    member=np.arange(6))  # fmt: skip
    costs = np.where(made["loss_mask"], random.normal(size=made.tokens), 0).astype(np.float32)
    totals = np.add.reduceat(costs, np.cumsum(made["lengths"]) - made["lengths"])
    named = {"reward:one": random.normal(size=6), "reward:two": random.normal(size=6)}
    return made.with_columns(
        token_rewards=costs, task_reward=made["reward"], reward=made["reward"] + totals,
        greedy_reward=random.normal(size=6).astype(np.float32),
        version=np.where(made["loss_mask"], 0, -1), **named,
    )  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        lambda: GroupMean(GroupMeanConfig()),
        lambda: Rloo(RlooConfig(whiten=True)),
        lambda: ReinforcePlusPlus(ReinforcePlusPlusConfig()),
        lambda: ReinforcePlusPlus(ReinforcePlusPlusConfig(over="sequences", gamma=0.9)),
        lambda: ReinforcePlusPlus(ReinforcePlusPlusConfig(over="sequences", per_token=False)),
        lambda: ReinforcePlusPlus(ReinforcePlusPlusConfig(baseline=True, kl_of="own")),
        lambda: Opo(OpoConfig()),
        lambda: Remax(RemaxConfig()),
        lambda: Remax(RemaxConfig(per_token=False)),
        lambda: Gdpo(GdpoConfig(over="tokens")),
        lambda: TurnReturns(TurnReturnsConfig()),
        lambda: TurnReturns(TurnReturnsConfig(gamma=0.5, baseline="none")),
        lambda: TurnReturns(TurnReturnsConfig(gamma=0.0, scale="group", baseline="group-mean")),
        lambda: RoleBaseline(RoleBaselineConfig()),
        lambda: RoleBaseline(RoleBaselineConfig(gamma=0.5)),
    ],
)
def test_a_conversation_in_parts_teaches_as_in_one_sequence(make: Any) -> None:
    whole = charged()
    parts = rewritten(whole, [0, 3, 4])
    expected = of_tokens(whole.with_columns(advantages=make()(whole)), "advantages")[whole["loss_mask"]]
    found = by_conversation(make(), parts)
    found = of_tokens(parts.with_columns(advantages=found), "advantages")[parts["loss_mask"]]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert expected.any()


def test_a_part_is_not_rewarded_for_the_turns_of_earlier_parts() -> None:
    whole = batch_of([[1.0, 2.0], [4.0]], [0, 0], final=[8.0, 16.0])
    parts = rewritten(whole, [0])
    placed = placed_rewards(parts, parts["reward"], parts["loss_mask"])
    assert placed[parts["loss_mask"]].tolist() == [0, 1 + 10, 0, 2 + 8, 0, 4 + 16]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (np.zeros(9), r"the shape \(9,\); wanted a finite number for each of 2 conversations"),
        (np.zeros((2, 1)), r"the shape \(2, 1\)"),
        (np.float64(1.0), r"the shape \(\)"),
        (None, "the type object"),
        (np.array([1.0, np.nan]), "numbers that are not finite"),
    ],
)
def test_advantages_of_another_shape_are_refused_with_their_estimator(found: Any, message: str) -> None:
    class Estimator:
        def __call__(self, batch: Batch) -> Any:
            return found

    with pytest.raises(PluginError, match=f"the advantages of Estimator have {message}"):
        by_conversation(Estimator(), batch_of([[1.0, 2.0], [4.0]], [0, 0]))
