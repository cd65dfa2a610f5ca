"""The stages between taking a batch of rollouts and training on it: small steps from batch to batch.

    take -> penalise_overlong -> scores -> penalise_kl -> mask_overlong -> advantages -> correct_gap
         -> keep_uncertain -> train

All of them run on the driver, on NumPy columns. Each returns the batch unchanged if its section asks for nothing. Only
a correction that needs nothing but the training pass runs there; see `place_correction`.
"""

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from attrs import asdict, evolve
from numpy.typing import NDArray

from whet.component import Spec
from whet.data.batch import Batch
from whet.data.metrics import Metric, largest, mean, smallest
from whet_ops import correction
from whet_ops.algorithms.config import CorrectionSection, KlRewardSection, OverlongSection, TopEntropySection
from whet_ops.kl import kl_estimate, log_ratio
from whet_ops.reductions import expand, of_tokens, segment_mean, segment_sum
from whet_ops.shaping import adapted_weight, overlong_penalty

if TYPE_CHECKING:
    from whet.interfaces.algorithm import Step
    from whet.interfaces.backend import Backend

Metrics = dict[str, Metric]
OldLogprobs = Literal["current", "score", "sampler"]
_KL_WEIGHT = "kl_reward.weight"
"""The key under which an adaptive weight is carried from step to step."""


def place_correction(
    section: CorrectionSection, scored: bool, penalty: KlRewardSection, uncertain: TopEntropySection | None = None
) -> tuple[CorrectionSection, CorrectionSection]:
    """Split a correction into the part before the training pass and the part within it. One of the two is empty.

    It is within the pass if four conditions hold. That pass is the only one (not `scored`), so that its logprobs are
    those of the weights before the step. The correction does not need the whole batch. No penalty in the reward reads
    the logprobs earlier. No token leaves the loss mask because of its low entropy: a correction reads all tokens of a
    response.
    """
    nothing = CorrectionSection()
    cut = uncertain is not None and uncertain.share < 1 and not uncertain.count_rest
    before = scored or section.whole or penalty.weight > 0 or cut
    return (section, nothing) if before else (nothing, section)


def with_correction(loss: Spec, section: CorrectionSection) -> Spec:
    """Return the loss with a correction within the training pass, if one is wanted; see `corrected_loss`."""
    if not section.wanted:
        return loss
    return Spec(
        "whet_ops.algorithms.corrected_loss:Corrected", "", {"loss": asdict(loss), "correction": asdict(section)}
    )


def choose_old_logprobs(
    wanted: Literal["auto", "trainer", "sampler"], scored: bool, corrected: bool, max_staleness: int
) -> OldLogprobs:
    """Return where the old policy's logprobs come from.

    `current`: the loss takes its own logprobs without gradient, so the ratio is exactly 1. `score`: a forward pass of
    the trainer before the first minibatch, for a batch that gets several optimizer steps or an earlier correction
    (`scored`). `sampler`: as recorded while sampling. `auto` takes the trainer's at staleness 0, and wherever the
    logprobs that are compared with the sampler's must be the trainer's (`corrected`).
    """
    if wanted == "sampler" or (wanted == "auto" and max_staleness > 0 and not corrected):
        return "sampler"
    return "score" if scored else "current"


def scored(batch: Batch, backend: "Backend", old: OldLogprobs, reference: bool) -> Batch:
    """Add the logprobs of the old policy and of the reference, if they are wanted."""
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
    """Remove sequences that were cut by their length from the loss, and return their share as a metric."""
    if not section.mask:
        return batch, {}
    cut = ~np.asarray(batch["stopped"])
    kept = batch["loss_mask"] & ~expand(cut, batch["lengths"])
    return batch.with_columns(loss_mask=kept), {"overlong/masked": mean(int(cut.sum()), len(cut))}


def penalise_overlong(batch: Batch, section: OverlongSection, max_tokens: int) -> tuple[Batch, Metrics]:
    """Subtract the penalty for long responses from their reward. It is also a named reward of its own, `overlong`."""
    if not section.penalty:
        return batch, {}
    sizes = of_episodes(batch, segment_sum(batch["loss_mask"].astype(np.int64), batch["lengths"]))
    penalty = section.penalty * overlong_penalty(sizes, section.length or max_tokens, section.buffer, section.bounded)
    return add_reward(batch, "overlong", penalty), {"reward/overlong": mean(float(penalty.mean()), 1)}


def penalise_kl(
    batch: Batch, section: KlRewardSection, carried: MutableMapping[str, Any] | None = None
) -> tuple[Batch, Metrics]:
    """Subtract the divergence from the reference from the reward, at each token.

    -weight * KL goes to the column `token_rewards` [N]; its sum over an episode goes to the episode's reward and to the
    named reward `kl`. The column `task_reward` keeps the reward without it, because a float32 sum of the two cannot be
    separated again. The policy is that of `old_logprobs` if the batch has them, else the sampler.

    `carried` is the state that an algorithm carries from step to step (`whet.run.steps.Steps.state`). An adaptive
    weight is read from it and, after its use, adapted in it for the next step.
    """
    if not section.weight:
        return batch, {}
    weight = _kl_weight(section, carried)
    kl, mask = _divergence(batch, section), batch["loss_mask"]
    costs = (-weight * kl).astype(np.float32)
    totals = of_episodes(batch, segment_sum(costs, batch["lengths"]))
    charged = add_reward(batch, "kl", totals.astype(np.float32))
    charged = charged.with_columns(token_rewards=costs, task_reward=np.asarray(batch["reward"], np.float32))
    metrics: Metrics = {"kl_reference/reward": mean(float(kl.sum()), int(mask.sum()))}
    if section.adaptive.target:
        metrics["kl_reward/weight"] = mean(weight)
        if carried is not None:
            carried[_KL_WEIGHT] = _adapted(weight, kl, batch, section)
    return charged, metrics


def _kl_weight(section: KlRewardSection, carried: MutableMapping[str, Any] | None) -> float:
    """Return the weight of this step: the one that the previous steps have left, or the first."""
    return float((carried or {}).get(_KL_WEIGHT, section.weight)) if section.adaptive.target else section.weight


def _divergence(batch: Batch, section: KlRewardSection) -> NDArray[Any]:
    """Estimate the divergence of the policy from the reference at each trained token, 0 elsewhere: [N]."""
    policy = batch["old_logprobs"] if "old_logprobs" in batch else batch["sampler_logprobs"]
    ratio = log_ratio(policy, batch["reference_logprobs"], section.clamp_log_ratio)
    return np.where(batch["loss_mask"], kl_estimate(ratio, section.estimator, section.clamp), np.float32(0))


def _adapted(weight: float, kl: NDArray[Any], batch: Batch, section: KlRewardSection) -> float:
    """Return the weight of the next step. kl [N]."""
    control, lengths, episodes = section.adaptive, batch["lengths"], len(np.unique(np.asarray(batch["episode"])))
    kl = kl.astype(np.float64)
    if control.per == "sequence":
        divergence = float(kl.sum()) / max(episodes, 1)
    else:
        divergence = float(segment_mean(kl, lengths, np.asarray(batch["loss_mask"])).mean()) if len(lengths) else 0.0
    return adapted_weight(weight, divergence, control.target, control.horizon, episodes)


def keep_uncertain(batch: Batch, backend: "Backend", section: TopEntropySection) -> tuple[Batch, Metrics]:
    """Train only on the tokens of the highest entropy: the section's share of them.

    The entropy is that of the weights before the step. Its quantile is over the trained tokens of the whole batch, so
    that it does not depend on micro-batches or ranks. The other tokens get the advantage 0, or leave the loss mask.
    Wang et al. 2025 (arXiv:2506.01939).
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
        return batch.with_columns(loss_mask=chosen), metrics
    advantages = of_tokens(batch, "advantages")
    return batch.with_columns(advantages=np.where(chosen, advantages, np.float32(0)).astype(np.float32)), metrics


def of_episodes(batch: Batch, values: NDArray[Any]) -> NDArray[Any]:
    """Return for each sequence the sum of values over its episode. values [B] -> [B]."""
    _, episode = np.unique(np.asarray(batch["episode"]), return_inverse=True)
    return np.asarray(np.bincount(episode, values)[episode])


def add_reward(batch: Batch, name: str, values: NDArray[Any]) -> Batch:
    """Add a reward to each sequence's reward, and keep it as a named reward too. values [B] float32."""
    reward = np.asarray(batch["reward"] + values, np.float32)
    return batch.with_columns(**{"reward": reward, f"reward:{name}": np.asarray(values, np.float32)})


def clip_advantages(advantages: NDArray[Any], bound: float, below: float | None = None) -> NDArray[Any]:
    """Clip advantages to plus or minus a bound; 0: no bound. `below` is another bound for negative ones."""
    least = bound if below is None else below
    return advantages.clip(-least if least else -np.inf, bound or np.inf) if least or bound else advantages


def advantage_metrics(batch: Batch) -> Metrics:
    """Return advantages/mean, /std, /min and /max over trained tokens, and the share of them whose advantage is 0."""
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
    }


def correct_gap(batch: Batch, section: CorrectionSection) -> tuple[Batch, Metrics]:
    """Correct for the gap between the sampler and the trainer, for any loss.

    Every loss of a policy is proportional to its advantage as long as the sign stays. So weights multiply advantages,
    and a masked token gets the advantage 0. A dropped sequence, and with `count_masked` false a masked token, leaves
    the loss mask, and with it every term and every mean. Compares `old_logprobs`, which must be the trainer's, with
    `sampler_logprobs`.
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
    return batch.with_columns(advantages=advantages, loss_mask=kept), metrics


def _tokens(values: NDArray[Any], lengths: NDArray[Any]) -> NDArray[Any]:
    """Return a column that is [B] or [N] as a column [N]."""
    return np.asarray(expand(values, lengths)) if len(values) == len(lengths) else values


def _product(one: NDArray[Any], other: NDArray[Any], lengths: NDArray[Any]) -> NDArray[Any]:
    """Return the product of two columns that are [B] or [N] each. It is [N] if one of them is."""
    if len(one) != len(other):
        one, other = _tokens(one, lengths), _tokens(other, lengths)
    return np.asarray(one * other)
