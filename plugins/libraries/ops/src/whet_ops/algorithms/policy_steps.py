"""The stages between taking a batch of rollouts and training on it: small steps from batch to batch.

    take -> penalise_overlong -> clip_rewards -> scores -> mask_overlong -> penalise_kl -> advantages
         -> treat_covariance -> correct_gap -> keep_uncertain -> train

All stages run on the driver, on NumPy columns. A stage returns the batch unchanged if its config section is off. One
exception: some corrections run within the training pass instead; see `place_correction`.
"""

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import asdict, evolve
from numpy.typing import NDArray

from whet.component import Spec
from whet.data.batch import Batch
from whet.data.metrics import Metric, histogram, largest, mean, smallest
from whet.data.randomness import generator
from whet_ops import correction
from whet_ops.algorithms.config import (
    CorrectionSection,
    CovarianceSection,
    KlRewardSection,
    OldLogprobs,
    OverlongSection,
    TopEntropySection,
)
from whet_ops.kl import MOST_NATS, kl_estimate, log_ratio
from whet_ops.members import conversations, joined, members_of, of_members, produced, with_mask
from whet_ops.reductions import expand, of_tokens, segment_mean, segment_sum
from whet_ops.shaping import adapted_weight, cut_penalty, overlong_penalty

if TYPE_CHECKING:
    from whet.interfaces.algorithm import Step
    from whet.interfaces.backend import Backend

Metrics = dict[str, Metric]
ADVANTAGES = tuple(step / 4 for step in range(-16, 17))
"""Grid of the histogram of advantages, from -4 to 4."""
_KL_WEIGHT = "kl_reward.weight"
"""The key of an adaptive weight in the state that is carried from step to step."""


def place_correction(
    section: CorrectionSection, scored: bool, penalty: KlRewardSection, uncertain: TopEntropySection | None = None
) -> tuple[CorrectionSection, CorrectionSection]:
    """Return the correction before the training pass and the correction within the pass. One of the two is empty.

    The correction is within the pass if four conditions hold:

    - The batch gets only one pass (not `scored`), so the logprobs of the pass are those of the weights before the step.
    - The correction does not need the whole batch.
    - No penalty in the reward reads the logprobs earlier.
    - No token leaves the loss mask because of its low entropy: a correction reads all tokens of a response.
    """
    nothing = CorrectionSection()
    cut = uncertain is not None and uncertain.share < 1 and not uncertain.count_rest
    before = scored or section.whole or penalty.weight > 0 or cut
    return (section, nothing) if before else (nothing, section)


def with_correction(loss: Spec, section: CorrectionSection) -> Spec:
    """Return the loss with a correction within the training pass, or unchanged without one; see `corrected_loss`."""
    if not section.wanted:
        return loss
    return Spec(
        "whet_ops.algorithms.corrected_loss:Corrected", "", {"loss": asdict(loss), "correction": asdict(section)}
    )


def scored(batch: Batch, backend: "Backend", old: OldLogprobs, reference: bool) -> Batch:
    """Add the logprobs of the old policy and of the reference, if they are needed."""
    if reference:
        scores = backend.score(batch, ("logprobs",), "reference")
        batch = batch.with_columns(reference_logprobs=scores["logprobs"])
    if old == "score":
        batch = batch.with_columns(old_logprobs=backend.score(batch, ("logprobs",))["logprobs"])
    elif old == "sampler":
        batch = batch.with_columns(old_logprobs=batch["sampler_logprobs"])
    return evolve(batch, info={**batch.info, "old_logprobs": old})


def logged(step: "Step", made: tuple[Batch, Metrics]) -> Batch:
    """Log the metrics of a stage and return its batch."""
    batch, metrics = made
    step.log(metrics)
    return batch


def mask_overlong(batch: Batch, section: OverlongSection) -> tuple[Batch, Metrics]:
    """Remove truncated sequences from the loss, and return their share as a metric.

    A conversation of several sequences counts as one. It is truncated if its last response is.
    """
    if not section.mask:
        return batch, {}
    _, conversation = conversations(batch)
    cut = ~np.asarray(joined(batch)["stopped"])
    kept = batch["loss_mask"] & ~expand(cut[conversation], batch["lengths"])
    return with_mask(batch, kept), {"overlong/masked": mean(int(cut.sum()), len(cut))}


def penalise_overlong(batch: Batch, section: OverlongSection, max_tokens: int) -> tuple[Batch, Metrics]:
    """Subtract the penalty for long responses from their reward. The penalty is also the named reward `overlong`.

    With a `factor`, the reward of a truncated response is multiplied by it first, and the penalty includes what that
    takes away. An episode is truncated if the last response of any of its conversations is. Its length counts all
    tokens that the model produced, trained or not.
    """
    if not section.shapes:
        return batch, {}
    penalty = np.zeros(batch.sequences, np.float32)
    if section.factor < 1:
        _, conversation = conversations(batch)
        cut = of_members(batch, ~np.asarray(joined(batch)["stopped"])[conversation]) > 0
        penalty = cut_penalty(batch["reward"], cut, section.factor)
    if section.penalty:
        sizes = of_members(batch, segment_sum(produced(batch).astype(np.int64), batch["lengths"]))
        longest = section.length or max_tokens
        penalty = penalty + section.penalty * overlong_penalty(sizes, longest, section.buffer, section.bounded)
    return add_reward(batch, "overlong", penalty), {"reward/overlong": mean(float(penalty.mean()), 1)}


def clip_rewards(batch: Batch, bounds: tuple[float, float] | None) -> tuple[Batch, Metrics]:
    """Clip the reward of each sequence, and that of the greedy response of its group. Named rewards stay as they are.

    The metric is the share of members whose reward is clipped.

    TRL's `reward_clip_range` of RLOO is the same. OpenRLHF's `reward.clip_range` is the same for its estimators `gae`
    and `reinforce`. The others subtract a baseline first.
    """
    if bounds is None:
        return batch, {}
    rewards = {name: np.asarray(batch[name]) for name in ("reward", "greedy_reward") if name in batch}
    clipped = {name: reward.clip(*bounds).astype(np.float32) for name, reward in rewards.items()}
    changed = (clipped["reward"] != rewards["reward"])[members_of(batch).first]
    return batch.with_columns(**clipped), {"clip_reward/share": mean(int(changed.sum()), len(changed))}


def penalise_kl(
    batch: Batch, section: KlRewardSection, carried: MutableMapping[str, Any] | None = None
) -> tuple[Batch, Metrics]:
    """Subtract the weighted divergence of the policy from the reference at each trained token from the reward.

    The column `token_rewards` [N] is -weight * KL. Its sum over an episode is added to the episode's reward, and is
    also the named reward `kl`. The column `task_reward` keeps the reward without the penalty, because a float32 sum of
    the two cannot be separated again. The policy is the one of `old_logprobs` if the batch has this column, else the
    sampler.

    `carried` is the state that an algorithm carries from step to step (`whet.run.steps.Steps.state`). An adaptive
    weight is read from `carried`. The weight of the next step is written to `carried`. A step without a trained token
    leaves it as it is.
    """
    if not section.weight:
        return batch, {}
    weight = _kl_weight(section, carried)
    kl, mask = _divergence(batch, section), batch["loss_mask"]
    costs = (-weight * kl).astype(np.float32)
    totals = of_members(batch, segment_sum(costs, batch["lengths"]))
    charged = add_reward(batch, "kl", totals.astype(np.float32))
    charged = charged.with_columns(token_rewards=costs, task_reward=np.asarray(batch["reward"], np.float32))
    metrics: Metrics = {"kl_reference/reward": mean(float(kl.sum()), int(mask.sum()))}
    if section.adaptive.target:
        metrics["kl_reward/weight"] = mean(weight)
        if carried is not None and mask.any():  # without a trained token nothing is measured
            carried[_KL_WEIGHT] = _adapted(weight, kl, batch, section)
    return charged, metrics


def _kl_weight(section: KlRewardSection, carried: MutableMapping[str, Any] | None) -> float:
    """Return the weight of this step: the adapted weight in `carried`, or the configured weight."""
    return float((carried or {}).get(_KL_WEIGHT, section.weight)) if section.adaptive.target else section.weight


def _divergence(batch: Batch, section: KlRewardSection) -> NDArray[Any]:
    """Estimate the divergence of the policy from the reference at each trained token, 0 elsewhere: [N]."""
    policy = batch["old_logprobs"] if "old_logprobs" in batch else batch["sampler_logprobs"]
    ratio = log_ratio(policy, batch["reference_logprobs"], section.clamp_log_ratio)
    return np.where(batch["loss_mask"], kl_estimate(ratio, section.estimator, section.clamp), np.float32(0))


def _adapted(weight: float, kl: NDArray[Any], batch: Batch, section: KlRewardSection) -> float:
    """Return the weight of the next step. kl [N]. Episodes and sequences without a trained token do not count."""
    control, episode, mask = section.adaptive, np.asarray(batch["episode"]), np.asarray(batch["loss_mask"])
    kl, lengths = kl.astype(np.float64), joined(batch)["lengths"]
    if control.per == "sequence":
        divergence = float(kl.sum()) / len(np.unique(expand(episode, batch["lengths"])[mask]))
    else:
        paying = segment_sum(mask.astype(np.int64), lengths) > 0
        divergence = float(segment_mean(kl, lengths, mask).sum()) / int(paying.sum())
    return adapted_weight(weight, divergence, control.target, control.horizon, len(np.unique(episode)))


def keep_uncertain(batch: Batch, backend: "Backend", section: TopEntropySection) -> tuple[Batch, Metrics]:
    """Restrict training to the `share` of the tokens with the highest entropy.

    The entropy is computed with the weights before the step. Its quantile is over the trained tokens of the whole
    batch, so it does not depend on micro-batches or ranks. The other tokens get the advantage 0, or leave the loss
    mask. Wang et al. 2025 (arXiv:2506.01939).
    """
    if section.share >= 1:
        return batch, {}
    entropy, mask = backend.score(batch, ("entropy",))["entropy"], np.asarray(batch["loss_mask"])
    if not mask.any():
        return batch, {}
    threshold = float(np.quantile(entropy[mask], 1.0 - section.share))
    chosen = mask & (entropy >= np.float32(threshold))
    metrics: Metrics = {
        "top_entropy/threshold": mean(threshold),
        "top_entropy/share": mean(int(chosen.sum()), int(mask.sum())),
    }
    if not section.count_rest:
        return with_mask(batch, chosen), metrics
    advantages = of_tokens(batch, "advantages")
    return batch.with_columns(advantages=np.where(chosen, advantages, np.float32(0)).astype(np.float32)), metrics


def treat_covariance(batch: Batch, section: CovarianceSection, seed: int) -> tuple[Batch, Metrics]:
    """Treat the tokens whose logprob and advantage are together far above their means.

        covariance = (A - mean of A) * (log q - mean of log q)                  q: the old policy, at each trained token

        clip-cov   floor(share * tokens) tokens, drawn at random where low < covariance < high: their advantage is 0
        kl-cov     floor(share * tokens) tokens of the largest covariance above 0: the loss gets
                   weight * KL(q || policy), by the column `old_kl_weight` [N]

    Cui et al. 2025 (arXiv:2505.22617). Their covariance is that of the policy, which is the old policy at the first
    optimizer step. Here all minibatches and epochs of a step use the same tokens, so that the choice needs no forward
    pass of its own, and depends on no micro-batch. Each token has its own random number, which depends on `seed` and
    on its place in the batch of rollouts. It also decides between equal covariances, of which there are many: a token
    that is certain has the logprob 0. At least one token is chosen where one qualifies.
    """
    mask = np.asarray(batch["loss_mask"])
    if section.method == "none" or not mask.any():
        return batch, {}
    advantages = np.asarray(of_tokens(batch, "advantages"), np.float64)
    logprobs = np.asarray(batch["old_logprobs"], np.float64).clip(-MOST_NATS, None)  # of a token that cannot occur
    covariance = np.where(mask, _centred(advantages, mask) * _centred(logprobs, mask), 0.0)
    number, draws = max(int(section.share * mask.sum()), 1), _draws(batch, seed)
    if section.method == "clip-cov":
        chosen = _first(mask & (covariance > section.low) & (covariance < section.high), number, draws)
    else:
        chosen = _first(mask & (covariance > 0), number, -covariance, draws)
    metrics: Metrics = {
        "covariance/mean": mean(float(covariance.sum()), int(mask.sum())),
        "covariance/share": mean(int(chosen.sum()), int(mask.sum())),
    }
    if section.method == "kl-cov":
        return batch.with_columns(old_kl_weight=np.where(chosen, section.weight, 0.0).astype(np.float32)), metrics
    return batch.with_columns(advantages=np.where(chosen, 0.0, advantages).astype(np.float32)), metrics


def _centred(values: NDArray[Any], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return values [N] minus their mean over a mask [N]."""
    return np.asarray(values - values[mask].mean())


def _draws(batch: Batch, seed: int) -> NDArray[np.float64]:
    """Return a random number for each token [N], whatever the order of the batch's units."""
    order = np.argsort(expand(np.asarray(batch["unit"]), batch["lengths"]), kind="stable")
    draws = np.empty(batch.tokens)
    draws[order] = generator(seed, "covariance").random(batch.tokens)
    return draws


def _first(wanted: NDArray[np.bool_], number: int, *keys: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which of the wanted tokens [N] are the first ones by the keys [N], this many. Later keys break ties."""
    places = np.flatnonzero(wanted)
    chosen = np.zeros_like(wanted)
    chosen[places[np.lexsort([key[places] for key in reversed(keys)])[:number]]] = True
    return chosen


def add_reward(batch: Batch, name: str, values: NDArray[Any]) -> Batch:
    """Add values to the reward of each sequence, and store them as a named reward. values [B] float32.

    `info["penalties"]` has the names of the rewards that the algorithm added.
    """
    reward = np.asarray(batch["reward"] + values, np.float32)
    batch = evolve(batch, info={**batch.info, "penalties": (*batch.info.get("penalties", ()), name)})
    return batch.with_columns(**{"reward": reward, f"reward:{name}": np.asarray(values, np.float32)})


def clip_advantages(advantages: NDArray[Any], bound: float, below: float | None = None) -> NDArray[Any]:
    """Clip advantages to plus or minus `bound`. `below` is the bound of negative advantages, if given. 0: no bound."""
    least = bound if below is None else below
    return advantages.clip(-least if least else -np.inf, bound or np.inf) if least or bound else advantages


def advantage_metrics(batch: Batch) -> Metrics:
    """Return advantages/mean, /std, /min and /max over trained tokens, /zero, the share of advantages of 0, and the
    histogram `advantages`.
    """
    mask = np.asarray(batch["loss_mask"])
    values = np.asarray(of_tokens(batch, "advantages"), np.float64)[mask]
    if not len(values):
        return {}
    return {
        "advantages/mean": mean(float(values.sum()), len(values)),
        "advantages/std": mean(float(values.std())),
        "advantages/min": smallest(float(values.min())),
        "advantages/max": largest(float(values.max())),
        "advantages/zero": mean(int((values == 0).sum()), len(values)),
        "advantages": histogram(values, ADVANTAGES),
    }


def correct_gap(batch: Batch, section: CorrectionSection) -> tuple[Batch, Metrics]:
    """Correct for the gap between the sampler and the trainer, for any loss.

    Every loss of a policy is proportional to its advantage as long as the sign stays the same. So weights multiply
    advantages, and a masked token gets the advantage 0. A dropped sequence leaves the loss mask, and therefore every
    term and every mean. If `count_masked` is false, a masked token leaves the loss mask too. The gap is between
    `old_logprobs`, which must be the trainer's, and `sampler_logprobs`.
    """
    if not section.wanted:
        return batch, {}
    lengths, mask = np.asarray(batch["lengths"]), np.asarray(batch["loss_mask"])
    gaps = correction.gap(batch["old_logprobs"], batch["sampler_logprobs"], mask)
    weights = correction.importance_weights(gaps, lengths, section.weights, section.floor, section.cap)
    inside = correction.within(gaps, lengths, mask, section.mask, section.low, section.high, section.measure)
    guard = section.max_token_gap, section.max_mean_gap, section.max_mean_error
    trusted = correction.trusted(gaps, lengths, mask, *guard)
    kept = mask & expand(trusted, lengths)
    if section.count_masked:
        weights = _product(weights, inside, lengths)
    else:
        kept = kept & _tokens(inside, lengths)
    if section.normalise:
        weights = correction.normalised(weights, lengths, mask, section.weights)
    advantages = _product(np.asarray(batch["advantages"]), weights, lengths).astype(np.float32)
    seen = _tokens(weights, lengths)[mask].astype(np.float64)
    metrics: Metrics = {
        "correction/masked": mean(int((mask & ~_tokens(inside, lengths)).sum()), int(mask.sum())),
        "correction/dropped": mean(int((~trusted).sum()), len(trusted)),
    }
    if len(seen):
        metrics |= {
            "correction/weight/mean": mean(float(seen.sum()), len(seen)),
            "correction/weight/max": largest(float(seen.max())),
        }
    return with_mask(batch.with_columns(advantages=advantages), kept), metrics


def _tokens(values: NDArray[Any], lengths: NDArray[Any]) -> NDArray[Any]:
    """Return a column [B] or [N] as a column [N]."""
    return np.asarray(expand(values, lengths)) if len(values) == len(lengths) else values


def _product(one: NDArray[Any], other: NDArray[Any], lengths: NDArray[Any]) -> NDArray[Any]:
    """Return the product of two columns, each [B] or [N]. The product is [N] if one of the columns is [N]."""
    if len(one) != len(other):
        one, other = _tokens(one, lengths), _tokens(other, lengths)
    return np.asarray(one * other)
