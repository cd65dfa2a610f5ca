"""The rules that every advantage estimator must keep.

    class TestGroupMean(AdvantagesContract):
        def make(self) -> GroupMean:
            return GroupMean(GroupMeanConfig())

An estimator is a function of a batch of rollouts. It returns an advantage for each sequence [B] or for each token [N].
The batches of the tests have the columns of every batch of rollouts. An estimator that reads others, such as
`greedy_reward` or `reward:NAME`, adds them in `called`.
"""

import functools
import time
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from whet.data.batch import Batch, from_sequences
from whet.interfaces.state import Stateful
from whet_testing.deadline import deadline
from whet_testing.resuming import assert_resumes


class AdvantagesContract:
    """Inherit this class and override `make`."""

    trained_tokens: int = 1
    """Number of tokens to learn of each sequence."""
    moving: bool = False
    """Whether the baseline moves from one sample to the next, so that the order of the samples matters."""

    def make(self) -> Any:
        """Build the estimator under test."""
        raise NotImplementedError("override `make` to build the estimator")

    def of_episode(self, rewards: Any) -> float:
        """Return the reward of an episode from the rewards of its sequences [K], which are equal here.

        Override it where the estimator sums them: `return float(rewards.sum())`.
        """
        return float(rewards[0])

    def call(self, rewards: Any, group: Any) -> Any:
        """Return advantages for episodes of one sequence each. rewards [B] float32, group [B] int64 -> [B]."""
        return self.called(_batch(rewards, group, np.arange(len(rewards)), [self.trained_tokens] * len(rewards)))

    def called(self, batch: Batch) -> Any:
        """Return the advantage of each sequence [B]: if advantages are per token, the mean over tokens to learn."""
        found = np.asarray(self.make()(batch))
        if len(found) != batch.tokens or not batch.tokens:
            return found
        owner = np.repeat(np.arange(batch.sequences), batch["lengths"])[batch["loss_mask"]]
        summed = np.bincount(owner, found[batch["loss_mask"]], batch.sequences)
        return (summed / np.bincount(owner, minlength=batch.sequences)).astype(found.dtype)

    def test_each_sequence_gets_a_finite_number(self) -> None:
        advantages = np.asarray(self.call(*_rewards(5, 4)))
        assert advantages.shape == (20,)
        assert advantages.dtype == np.float32
        assert np.isfinite(advantages).all()

    def test_no_sequences_get_no_advantages(self) -> None:
        assert np.asarray(self.call(np.zeros(0, np.float32), np.zeros(0, np.int64))).shape == (0,)

    def test_equal_rewards_are_finite(self) -> None:
        for reward in (0.0, 0.1, 1.0, -3.0):
            advantages = self.call(np.full(8, reward, np.float32), np.repeat([0, 1], 4))
            assert np.isfinite(advantages).all()

    def test_a_group_of_one_is_finite(self) -> None:
        assert np.isfinite(self.call(np.array([1.0, 0.0], np.float32), np.array([0, 1]))).all()

    def test_huge_and_tiny_rewards_are_finite(self) -> None:
        for scale in (1e-30, 1e-12, 1e12, 1e30):
            rewards = np.array([0, 1, 2, 3], np.float32) * np.float32(scale)
            assert np.isfinite(self.call(rewards, np.zeros(4, np.int64))).all(), f"rewards times {scale}"

    def test_the_order_of_sequences_does_not_matter(self) -> None:
        if self.moving:
            pytest.skip("its baseline moves from one sample to the next")
        rewards, group = _rewards(5, 4)
        order = np.random.default_rng(1).permutation(len(rewards))
        expected = np.asarray(self.call(rewards, group))[order]
        np.testing.assert_allclose(self.call(rewards[order], group[order]), expected, rtol=1e-5, atol=1e-6)

    def test_groups_are_told_apart_by_identity_not_by_number(self) -> None:
        rewards, group = _rewards(5, 4)
        names = np.array([70, -3, 2**40, 0, 12])[group]
        np.testing.assert_allclose(self.call(rewards, names), self.call(rewards, group), rtol=1e-5, atol=1e-6)

    def test_an_episode_counts_once_however_many_sequences_it_has(self) -> None:
        rewards, group = _rewards(3, 4)
        copies = np.array([1, 3, 1, 2, 1, 1, 1, 1, 4, 1, 1, 1])
        trained = np.full(12, self.trained_tokens)
        found = self.called(_batch(*(np.repeat(each, copies) for each in (rewards, group, np.arange(12), trained))))
        whole = np.array([self.of_episode(np.full(k, r)) for k, r in zip(copies, rewards, strict=True)], np.float32)
        np.testing.assert_allclose(found, np.repeat(self.call(whole, group), copies), rtol=1e-5, atol=1e-6)

    def test_sequences_may_have_any_number_of_tokens_to_learn(self) -> None:
        rewards, group = _rewards(3, 4)
        batch = _batch(rewards, group, np.arange(12), 1 + np.arange(12) % 4)
        found = np.asarray(self.make()(batch))
        assert found.shape in ((batch.sequences,), (batch.tokens,)), "wanted a number for each sequence or each token"
        assert np.isfinite(found if len(found) == batch.sequences else found[batch["loss_mask"]]).all()

    def test_unequal_rewards_of_a_group_get_unequal_advantages(self) -> None:
        rewards, group = _rewards(5, 4)
        for given in (rewards, np.array([0, 0, 0, 1] * 2 + [0, 1, 1, 1] * 3, np.float32)):
            found = np.asarray(self.call(given, group))
            equal = [name for name in range(5) if np.ptp(found[group == name]) == 0]
            assert 2 * len(equal) < 5, (
                f"in {len(equal)} of 5 groups of unequal rewards all advantages are equal, so that nothing tells good "
                f"samples from bad ones to learn from. Rewards {given[group == equal[0]]}, advantages "
                f"{found[group == equal[0]]}"
            )

    def test_a_better_sample_of_a_group_never_gets_less(self) -> None:
        if self.moving:
            pytest.skip("its baseline moves from one sample to the next")
        rewards, group = _rewards(5, 4)
        advantages = np.asarray(self.call(rewards, group))
        for name in range(5):
            mine = advantages[group == name][np.argsort(rewards[group == name])]
            assert (np.diff(mine) >= -1e-6).all(), f"group {name}: {mine} in order of reward"

    def test_a_resumed_state_goes_on_as_if_nothing_had_happened(self) -> None:
        if not isinstance(self.make(), Stateful):
            pytest.skip("it has no state")

        def step(estimator: Any, number: int) -> Any:
            rewards = np.random.default_rng(number).normal(size=8).astype(np.float32)
            return estimator(_batch(rewards, np.repeat([0, 1], 4), np.arange(8), [self.trained_tokens] * 8))

        assert_resumes(self.make, step, range(6))

    def test_its_input_is_left_as_it_was(self) -> None:
        rewards, group = _rewards(5, 4)
        self.call(rewards, group)
        assert np.array_equal(rewards, _rewards(5, 4)[0])
        assert np.array_equal(group, _rewards(5, 4)[1])

    def test_many_groups_do_not_take_long(self) -> None:
        batch = _many_groups(self.trained_tokens)
        begin = time.process_time()  # other programs may use the processor meanwhile
        with deadline(60, "estimating the advantages of 100,000 sequences"):
            self.called(batch)
        assert time.process_time() - begin < 5, "100,000 sequences took more than 5 seconds of the processor"


@functools.cache
def _many_groups(trained: int) -> Batch:
    """Return a batch of 25,000 groups of 4 sequences. Making it takes longer than an estimator needs for it."""
    rewards, group = _rewards(25_000, 4)
    return _batch(rewards, group, np.arange(len(rewards)), [trained] * len(rewards))


def _batch(rewards: Any, group: Any, episode: Any, trained: Any) -> Batch:
    """Return a batch of sequences of one prompt token and `trained` [B] tokens to learn, as rollouts have them."""
    rows = [
        {
            "tokens": np.ones(1 + n, np.int64),
            "loss_mask": np.arange(1 + n) > 0,
            "sampler_logprobs": np.where(np.arange(1 + n) > 0, -1.0, 0.0).astype(np.float32),
            "version": np.where(np.arange(1 + n) > 0, 0, -1).astype(np.int32),
        }
        for n in trained
    ]
    batch = from_sequences(rows, prompt_lengths=[1] * len(rows), group=group, episode=episode)
    alike = np.zeros(len(rows), np.int64)
    batch = batch.with_columns(
        reward=rewards, env=alike, agent=alike, member=batch["episode"],
        temperature=np.ones(len(rows), np.float32), stopped=alike == 0,
    )  # fmt: skip
    return evolve(batch, info={"environments": ("made-up",), "agents": ("",)})


def _rewards(groups: int, size: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.normal(size=groups * size).astype(np.float32), np.repeat(np.arange(groups), size)
