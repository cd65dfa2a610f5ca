"""Advantages of a batch from the rewards of its groups.

Rewards are compared between the members of a batch, within one agent of one group. Usually a member is an episode; see
`whet_ops.members`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whet.data.batch import Batch
from whet.errors import DataError
from whet_grpo.config import (
    GdpoConfig,
    GroupMeanConfig,
    OpoConfig,
    PassAtKConfig,
    ReinforcePlusPlusConfig,
    RemaxConfig,
    RlooConfig,
    RoleBaselineConfig,
    TurnReturnsConfig,
)
from whet_ops.advantages import gdpo, group_mean, length_weighted, less_group_mean, pass_at_k, whiten
from whet_ops.gae import at_last, gae
from whet_ops.members import members_of, of_members, placed_rewards, produced, turn_of
from whet_ops.reductions import expand, segment_sum
from whet_ops.shaping import reward_to_go

PREFIX = "reward:"
"""Prefix of the columns of named rewards."""


class GroupMean:
    """The reward minus the mean of its group, then scaled. See `whet_ops.advantages.group_mean`."""

    def __init__(self, config: GroupMeanConfig) -> None:
        self.config = config

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        """Return the advantage of each sequence [B]. All sequences of a member have the same advantage."""
        config, members = self.config, members_of(batch)
        advantages = group_mean(
            batch["reward"][members.first],
            members.cohort,
            scale=config.scale,
            unbiased=config.unbiased,
            epsilon=config.epsilon,
            leave_one_out=config.leave_one_out,
            std_over=config.std_over,
            singleton=config.singleton,
            rescale=config.rescale,
            task_rewards=batch["task_reward"][members.first] if "task_reward" in batch else None,
        )
        return np.asarray(advantages[members.owner])


class Rloo:
    """The reward minus the mean of the group's other rewards.

        advantage = reward - mean of the group's other rewards;    whiten: / (deviation over the batch + epsilon)

    Ahmadian et al. 2024 (arXiv:2402.14740). `whiten` is TRL's `normalize_advantages`. TRL also subtracts the mean over
    the batch, which is 0. If all rewards of a group are equal, its advantages are exactly 0. The advantage of a group
    of one is also 0, unless `singleton` is `reward`.
    """

    def __init__(self, config: RlooConfig) -> None:
        self.config = config

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        """Return the advantage of each sequence [B]. All sequences of a member have the same advantage."""
        config, members = self.config, members_of(batch)
        rewards, group = batch["reward"][members.first], members.cohort
        advantages = group_mean(rewards, group, scale="none", leave_one_out=True, singleton=config.singleton)
        if config.whiten and len(advantages) > 1:
            deviation = advantages.std(ddof=1 if config.unbiased else 0, dtype=np.float64) + config.epsilon
            advantages = np.divide(advantages, deviation, out=np.zeros_like(advantages), where=deviation > 0)
        return np.asarray(advantages[members.owner], np.float32)


class ReinforcePlusPlus:
    """Rewards normalised over the whole batch.

        A         = reward + token rewards (-weight * KL) from the token on;    baseline: - mean of the group
        advantage = (A - mean over the batch) / sqrt(max(variance over the batch, epsilon))

    Hu et al. 2025, section 3 (arXiv:2501.03262). Mean and variance are over trained tokens, as in OpenRLHF, verl and
    NeMo RL, or over members. Each token of a member with n sequences weighs 1 / n. verl uses the unbiased variance
    plus epsilon. OpenRLHF, NeMo RL and whet use the biased variance, at least epsilon. If all rewards of a batch are
    equal, the advantages are exactly 0. Rewards and penalties are added only at the end. So with a baseline, if all
    rewards of a group are equal, its advantages come exactly from its penalties.
    """

    def __init__(self, config: ReinforcePlusPlusConfig) -> None:
        self.config = config

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        """Return the advantage of each token [N], or, without `per_token`, of each sequence [B]."""
        config, members = self.config, members_of(batch)
        rewards, penalties, costs = apart(batch)
        own = config.kl_of == "own" and config.per_token
        if config.baseline:
            group = members.cohort
            rewards = less_group_mean(rewards[members.first], group, config.singleton)[members.owner]
            if config.baseline_of == "total" and not own:
                penalties = less_group_mean(penalties[members.first], group, config.singleton)[members.owner]
        lengths, mask = np.asarray(batch["lengths"]), np.asarray(batch["loss_mask"])
        trained = segment_sum(mask.astype(np.int64), lengths)
        share = 1.0 / members.sizes[members.owner]
        if config.over == "sequences":
            share = share / np.maximum(trained, 1)
        if not config.per_token:
            return self._whiten(rewards + penalties, share * trained)
        if own:
            values = self._to_come(rewards, np.zeros(batch.tokens), mask, lengths) + costs
        else:
            # The penalty of the member's other sequences, minus the group's mean.
            beside = penalties - segment_sum(costs, lengths)
            values = self._to_come(rewards + beside, costs, mask, lengths)
        return self._whiten(values, expand(share, lengths) * mask)

    def _to_come(
        self, rewards: NDArray[Any], costs: NDArray[Any], mask: NDArray[Any], lengths: NDArray[Any]
    ) -> NDArray[Any]:
        """Return the discounted return at each token [N]: rewards [B] at the end, costs at each token."""
        if self.config.gamma == 1:
            return reward_to_go(rewards, costs, lengths)
        placed = at_last(rewards, mask, lengths) + costs
        return gae(placed, np.zeros(len(mask)), mask, lengths, gamma=self.config.gamma, lambda_=1.0)

    def _whiten(self, values: NDArray[Any], weights: NDArray[Any]) -> NDArray[np.float32]:
        c = self.config
        found = whiten(values, weights, unbiased=c.unbiased, epsilon=c.epsilon, epsilon_at=c.epsilon_at)
        return found.astype(np.float32)


def apart(batch: Batch) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the rewards without the penalty `kl_reward` [B], the penalty per member [B] and per token [N].

    `policy_steps.penalise_kl` writes the columns that this function reads. If the penalty is off, both penalties are 0.
    Without the column `task_reward`, the penalty is subtracted from `reward`, which leaves rounding errors.
    """
    costs = np.asarray(batch["token_rewards"] if "token_rewards" in batch else np.zeros(batch.tokens), np.float64)
    penalties = of_members(batch, segment_sum(costs, batch["lengths"]))
    if "task_reward" in batch:
        return np.asarray(batch["task_reward"], np.float64), penalties, costs
    return np.asarray(batch["reward"], np.float64) - penalties, penalties, costs


class Opo:
    """The reward minus the length-weighted mean of its group. See `whet_ops.advantages.length_weighted`.

    The length of a member is the number of tokens that the model produced, divided by the number of its sequences.
    Tokens that `overlong.mask` removes from training count too.
    """

    def __init__(self, config: OpoConfig) -> None:
        self.config = config

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        """Return the advantage of each sequence [B]. All sequences of a member have the same advantage."""
        members = members_of(batch)
        tokens = segment_sum(produced(batch).astype(np.int64), batch["lengths"])
        sizes = np.bincount(members.owner, tokens, len(members.sizes)) / members.sizes
        rewards, group = batch["reward"][members.first], members.cohort
        return np.asarray(length_weighted(rewards, group, sizes, self.config.singleton)[members.owner])


class PassAtK:
    """What a sample adds to the best reward of k samples of its group. See `whet_ops.advantages.pass_at_k`."""

    def __init__(self, config: PassAtKConfig) -> None:
        self.config = config

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        """Return the advantage of each sequence [B]. All sequences of a member have the same advantage."""
        c, members = self.config, members_of(batch)
        rewards, group = batch["reward"][members.first], members.cohort
        found = pass_at_k(rewards, group, c.k, baseline=c.baseline, scale=c.scale, epsilon=c.epsilon)
        return np.asarray(found[members.owner])


class Remax:
    """The reward minus the reward of the likeliest response to the same prompt.

        A(t) = reward + token rewards (-weight * KL) from the token on - reward of the response at temperature 0

    Li et al. 2023, algorithm 2 (arXiv:2310.10505). One more response is sampled for each group at temperature 0. The
    loop does not train on it. Its reward has no penalties, as in verl. The advantages are not normalised.
    """

    def __init__(self, config: RemaxConfig) -> None:
        self.config = config

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        """Return the advantage of each token [N], or, without `per_token`, of each sequence [B]."""
        if "greedy_reward" not in batch:
            raise DataError(
                "the batch has no column 'greedy_reward': its groups were sampled without a greedy response"
            )
        rewards, penalties, costs = apart(batch)
        ahead = rewards - np.asarray(batch["greedy_reward"], np.float64)
        if not self.config.per_token:
            return np.asarray(ahead + penalties, np.float32)
        beside = penalties - segment_sum(costs, batch["lengths"])
        return reward_to_go(ahead + beside, costs, np.asarray(batch["lengths"])).astype(np.float32)


class Gdpo:
    """Each named reward is normalised in its group. The sum of the results is scaled over the batch.

    The penalties `overlong` and `kl` have weights of their own. They are added without normalisation, unless `weights`
    names them. See `whet_ops.advantages.gdpo` and `whiten`. Each token of a member with n sequences weighs 1 / n.
    """

    def __init__(self, config: GdpoConfig) -> None:
        self.config = config

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        """Return the advantage of each sequence [B]. All sequences of a member have the same advantage.

        Raises `DataError` if the environments do not return a reward that the config names.
        """
        config, members = self.config, members_of(batch)
        named = {name[len(PREFIX) :]: batch[name] for name in batch.per_sequence if name.startswith(PREFIX)}
        named = named or {"reward": batch["reward"]}
        penalties = [name for name in batch.info.get("penalties", ()) if name not in config.weights]
        weights: dict[str, Any] = dict(config.weights) or {
            name: weights_of(batch, name)[members.first] for name in named if name not in penalties
        }
        if unknown := sorted(set(weights) - set(named)):
            raise DataError(
                f"algorithm.advantages.weights names the reward {unknown[0]!r}, which no environment gives; there are "
                f"{', '.join(named)}"
            )
        lengths, mask = np.asarray(batch["lengths"]), np.asarray(batch["loss_mask"])
        trained = np.bincount(members.owner, segment_sum(mask.astype(np.int64), lengths), len(members.sizes))
        advantages = gdpo(
            {name: named[name][members.first] for name in weights},
            members.cohort,
            weights,
            penalty=np.sum([named[name][members.first] for name in penalties], axis=0) if penalties else None,
            scale=config.scale,
            unbiased=config.unbiased,
            epsilon=config.epsilon,
            leave_one_out=config.leave_one_out,
            std_over=config.std_over,
            singleton=config.singleton,
            tokens=trained / members.sizes if config.over == "tokens" else None,
            centre=config.centre,
            batch_epsilon=config.batch_epsilon,
            epsilon_at=config.epsilon_at,
        )
        return np.asarray(advantages[members.owner])


def weights_of(batch: Batch, name: str) -> NDArray[np.float64]:
    """Return the weight of a named reward in the environment of each sequence [B]. It is 1 where none is set."""
    environments, weights = batch.info.get("environments", ()), batch.info.get("reward_weights", {})
    own = np.array([weights.get(environment, {}).get(name, 1.0) for environment in environments], np.float64)
    return own[np.asarray(batch["env"])] if len(own) else np.ones(batch.sequences)


class TurnReturns:
    """The discounted return of each turn of the model, compared with the same turn of the group's other samples.

        R_k = rewards of turn k and of its tokens; the last turn also has all other rewards of its sequence
        G_k = R_k + gamma * G_(k+1)
        A_k = G_k - mean of G_k over the group's other sequences that have a turn k

    All tokens of a turn have the advantage of the turn. The sequences of a member share the mean of their returns.
    Leave-one-out as in RLOO (Ahmadian et al. 2024,
    arXiv:2402.14740), for each turn position. Rewards of turns are compared per turn position also in MT-GRPO (Zeng et
    al. 2025, arXiv:2505.11821); there, the advantage of the outcome has its own group. The penalty `kl_reward` of a
    turn's tokens belongs to the turn. With one turn per sequence, leave-one-out and without scale it is RLOO.
    """

    def __init__(self, config: TurnReturnsConfig) -> None:
        self.config = config

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        """Return the advantage of each token [N], 0 outside of turns."""
        config, members = self.config, members_of(batch)
        turn, lengths = turn_of(batch), np.asarray(batch["lengths"])
        rewards, _, costs = apart(batch)
        placed = placed_rewards(batch, rewards, turn >= 0) + costs
        owner = np.repeat(np.arange(len(lengths)), lengths)[turn >= 0]
        turns = int(turn.max(initial=-1)) + 1
        keys, at = np.unique(owner * turns + turn[turn >= 0], return_inverse=True)
        if not len(keys):
            return np.zeros(batch.tokens, np.float32)
        sequence, number = keys // turns, keys % turns
        returns: NDArray[Any] = np.bincount(at, placed[turn >= 0], len(keys))
        per_sequence = np.bincount(sequence, minlength=len(lengths))
        returns = gae(returns, np.zeros(len(keys)), np.ones(len(keys), np.bool_), per_sequence, gamma=config.gamma,
                      lambda_=1.0)  # fmt: skip
        member, of_member = np.unique(members.owner[sequence] * turns + number, return_inverse=True)
        returns = np.bincount(of_member, returns) / np.bincount(of_member)
        if config.baseline != "none":
            cohort = members.cohort[member // turns] * turns + member % turns
            returns = group_mean(
                returns, cohort, scale=config.scale, unbiased=config.unbiased, epsilon=config.epsilon,
                leave_one_out=config.baseline == "leave-one-out", singleton=config.singleton,
            )  # fmt: skip
        found = np.zeros(batch.tokens, np.float32)
        found[turn >= 0] = returns[of_member[at]]
        return found


class RoleBaseline:
    """The reward minus a moving average of the rewards of the same agent in the same environment.

        A = gamma^(turns to the end) * (R - b)        b <- decay * b + (1 - decay) * R, after A

    The role-conditioned advantage of SPIRAL, for self-play: Liu et al. 2025, section 3.3 (arXiv:2506.24119). There is
    one average for each environment and agent. It begins at 0. As in the authors' code, a reward is compared before it
    enters the average, one member after another, in the order of the batch. No group is needed. The averages are saved
    with each checkpoint.
    """

    def __init__(self, config: RoleBaselineConfig) -> None:
        self.config = config
        self._averages: dict[str, float] = {}

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        """Return the advantage of each token [N], 0 outside of turns; with gamma 1, of each sequence [B]."""
        members, rewards = members_of(batch), np.asarray(batch["reward"], np.float64)
        ahead = np.zeros(len(members.first))
        for member in np.argsort(members.first):
            name, reward = self._role(batch, int(members.first[member])), float(rewards[members.first[member]])
            average = self._averages.get(name, 0.0)
            ahead[member] = reward - average
            self._averages[name] = self.config.decay * average + (1 - self.config.decay) * reward
        advantages = ahead[members.owner]
        if self.config.gamma == 1:
            return np.asarray(advantages, np.float32)
        turn, lengths = turn_of(batch), np.asarray(batch["lengths"])
        last = np.maximum.reduceat(turn, np.cumsum(lengths) - lengths) if len(lengths) else np.zeros(0, np.int32)
        discount = self.config.gamma ** np.maximum(expand(last, lengths) - turn, 0).astype(np.float64)
        return np.where(turn >= 0, expand(advantages, lengths) * discount, 0.0).astype(np.float32)

    def state(self) -> dict[str, Any]:
        """Return the averages."""
        return dict(self._averages)

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue with these averages."""
        self._averages = {name: float(average) for name, average in state.items()}

    def _role(self, batch: Batch, sequence: int) -> str:
        """Return the name of a sequence's environment and agent."""
        env = int(batch["env"][sequence]) if "env" in batch else 0
        agent = int(batch["agent"][sequence]) if "agent" in batch else 0
        environments, agents = batch.info.get("environments", ()), batch.info.get("agents", ())
        return f"{environments[env] if environments else env}/{agents[agent] if agents else agent}"
