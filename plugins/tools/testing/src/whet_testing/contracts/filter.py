"""The rules that every filter must keep.

    class TestUnequalRewards(FilterContract):
        def make(self) -> UnequalRewards:
            return UnequalRewards(UnequalRewardsConfig())

A filter is a function of a group. It returns True if the run learns from the group, and False if the group is dropped.
"""

from typing import Any

import numpy as np
import pytest

from whet.data.records import Episode, Group, Trajectory
from whet.interfaces.state import Stateful
from whet_testing.resuming import assert_resumes


class FilterContract:
    """Inherit this class and override `make`."""

    def make(self) -> Any:
        """Build the filter under test."""
        raise NotImplementedError("override `make` to build the filter")

    def test_it_says_yes_or_no(self) -> None:
        for rewards in ([0.0, 1.0], [1.0, 1.0], [0.5]):
            assert isinstance(self.make()(group_of(rewards)), bool | np.bool_)

    def test_a_resumed_state_goes_on_as_if_nothing_had_happened(self) -> None:
        if not isinstance(self.make(), Stateful):
            pytest.skip("it has no state")
        groups = [group_of(np.random.default_rng(seed).integers(0, 2, 4), index=seed) for seed in range(20)]
        assert_resumes(self.make, lambda keep, group: bool(keep(group)), groups)

    def test_it_says_the_same_every_time(self) -> None:
        keep = self.make()
        if isinstance(keep, Stateful):
            pytest.skip("it has a state, so what it says may depend on earlier groups")
        groups = [group_of(np.random.default_rng(seed).integers(0, 2, 4), index=seed) for seed in range(20)]
        forwards = [bool(keep(group)) for group in groups]
        backwards = [bool(keep(group)) for group in reversed(groups)][::-1]
        assert forwards == backwards == [bool(self.make()(group)) for group in groups]

    def test_some_group_passes(self) -> None:
        keep = self.make()
        every = [np.linspace(0, high, size) for high in (0.0, 0.5, 1.0) for size in (2, 4, 8)]
        assert any(keep(group_of(rewards)) for rewards in every), "a filter that drops everything ends no run"

    def test_the_order_of_the_episodes_does_not_matter(self) -> None:
        keep = self.make()
        for rewards in ([0.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.2, 0.4, 0.9]):
            assert bool(keep(group_of(rewards))) == bool(keep(group_of(rewards[::-1])))


def group_of(rewards: Any, index: int = 0) -> Group:
    """Return a group with one episode for each reward."""
    episodes = tuple(
        Episode("made-up", index, sample, (_trajectory(sample),), {"correct": float(reward)}, float(reward), turns=1)
        for sample, reward in enumerate(rewards)
    )
    return Group(index, "made-up", index, episodes)


def _trajectory(sample: int) -> Trajectory:
    mask = np.arange(6) >= 3
    return Trajectory(
        tokens=np.arange(6) + sample,
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        prompt_length=3,
        stop="stop",
    )
