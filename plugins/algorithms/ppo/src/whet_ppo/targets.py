"""Turns rewards and values into the targets of critic and policy, on NumPy columns of a batch."""

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whet.data.batch import Batch
from whet.data.metrics import Metric, mean
from whet_ops.advantages import whiten
from whet_ops.algorithms.config import KlRewardSection
from whet_ops.algorithms.policy_steps import advantage_metrics, penalise_kl
from whet_ops.gae import adaptive_lambda, explained_variance, gae
from whet_ops.members import conversations, joined, placed_rewards
from whet_ops.reductions import segment_sum
from whet_ppo.config import GaeSection

if TYPE_CHECKING:
    from whet.interfaces.backend import Backend

Metrics = dict[str, Metric]


def place_rewards(
    batch: Batch, section: KlRewardSection, carried: MutableMapping[str, Any] | None = None
) -> tuple[Batch, Metrics]:
    """Add the reward of each token in the column `token_rewards` [N].

    The rewards of turns and spans are where they are; those of turns that are not trained are at the last trained token
    before them. All other rewards of a conversation are at its last trained token.
    The penalty for leaving the reference is at every trained token. `reward` [B] does not include this penalty. For
    `carried` see `policy_steps.penalise_kl`.
    """
    reward = np.asarray(batch["reward"])
    batch, metrics = penalise_kl(batch, section, carried)
    whole = joined(batch.with_columns(reward=reward))
    placed = placed_rewards(whole, whole["reward"], whole["loss_mask"])
    if section.weight:
        placed = placed + batch["token_rewards"]
    return batch.with_columns(reward=reward, token_rewards=placed.astype(np.float32)), metrics


def values_of(batch: Batch, critic: "Backend", bootstrap: bool) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return the critic's values [N], and the values after conversations that were cut [C], 0 after the others."""
    if not bootstrap:
        return critic.score(batch, ("values",))["values"], None
    first, _ = conversations(batch)
    last_parts, wanted = np.append(first[1:], batch.sequences) - 1, np.zeros(batch.sequences, np.bool_)
    wanted[last_parts] = ~np.asarray(joined(batch)["stopped"])
    longer, last = one_place_more(batch, wanted)
    values = np.asarray(critic.score(longer, ("values",))["values"])
    return np.delete(values, last), values[last][last_parts]


def one_place_more(batch: Batch, wanted: NDArray[Any]) -> tuple[Batch, NDArray[Any]]:
    """Append one token to each sequence. Its `values` are the value after the sequence; `wanted` [B] are scored.

    Return the batch with the columns that scoring reads, and the positions of the new tokens. See
    `whet.rollout.scorer.whole`.
    """
    lengths = np.asarray(batch["lengths"])
    ends = np.cumsum(lengths)
    per_token = {
        "tokens": np.insert(batch["tokens"], ends, 0),
        "loss_mask": np.insert(batch["loss_mask"], ends, wanted),
    }
    longer = Batch(per_token, {**batch.per_sequence, "lengths": lengths + 1}, batch.info)
    return longer, ends + np.arange(len(ends))


def estimate(
    batch: Batch, values: NDArray[Any], after: NDArray[Any] | None, section: GaeSection
) -> tuple[Batch, Metrics]:
    """Add `old_values`, `returns` and `advantages` [N], the targets of critic and policy.

    The parts of a conversation are one chain, which ends with the value `after` [C]. Metrics are over trained tokens,
    those of advantages before whitening.
    """
    mask, lengths = np.asarray(batch["loss_mask"]), np.asarray(joined(batch)["lengths"])
    sizes = segment_sum(mask.astype(np.int64), lengths)
    of_policy = adaptive_lambda(sizes, section.adaptive_alpha) if section.adaptive_alpha else section.lambda_policy

    rewards = (
        _whitened_rewards(batch["token_rewards"], mask, section) if section.whiten_rewards else batch["token_rewards"]
    )

    def advantages(lambda_: Any) -> NDArray[Any]:
        return gae(rewards, values, mask, lengths, gamma=section.gamma, lambda_=lambda_, after=after)

    returns = np.where(mask, advantages(section.lambda_value) + values, 0)
    found = advantages(of_policy)
    batch = batch.with_columns(
        old_values=np.where(mask, values, 0).astype(np.float32),
        returns=returns.astype(np.float32),
        advantages=found.astype(np.float32),
    )
    count = int(mask.sum())
    metrics = {
        "values/mean": mean(float(values[mask].sum()), count),
        "returns/mean": mean(float(returns[mask].sum()), count),
        "critic/explained_variance": mean(explained_variance(values[mask], returns[mask])),
        **advantage_metrics(batch),
    }
    if section.whiten != "none":
        found[mask] = _whiten(found[mask], section)
        batch = batch.with_columns(advantages=found.astype(np.float32))
    return batch, metrics


def _whitened_rewards(rewards: NDArray[Any], mask: NDArray[Any], section: GaeSection) -> NDArray[Any]:
    """Return rewards scaled to deviation 1 over trained tokens. rewards, mask [N] -> [N]. Equal rewards stay."""
    found = np.asarray(rewards, np.float64).copy()
    if mask.any() and np.ptp(found[mask]) > 0:
        found[mask] = _whiten(found[mask], section) + found[mask].mean()
    return found


def _whiten(values: NDArray[Any], section: GaeSection) -> NDArray[Any]:
    unbiased, epsilon, at = section.whiten != "biased", section.whiten_epsilon, section.whiten_epsilon_at
    return whiten(values, np.ones(len(values)), unbiased=unbiased, epsilon=epsilon, epsilon_at=at)
