"""Conflicts between settings of the shared config sections, which planning shows before a run.

Needs no torch.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from whet.component import Problem
from whet_ops.algorithms.config import (
    AverageConfig,
    CorrectionSection,
    CovarianceSection,
    KlRewardSection,
    OverlongSection,
    PolicyLossConfig,
    TopEntropySection,
    choose_old_logprobs,
    terms_of,
)

if TYPE_CHECKING:
    from whet.config.sections import Config, RolloutSection

_LARGEST_CHANGE = 5
"""A step must have fewer episodes than this times `KlControlSection.horizon`, so that the weight stays above 0.

The relative error counts as at most 0.2, so a step of 5 horizons can change the weight to 0."""


def policy_problems(policy: Any, config: "Config") -> Iterator[Problem]:
    """Yield conflicts between the settings of an algorithm that extends `PolicyConfig`, with paths below `algorithm`.

    It also has `group_size` and `loss`. The loss may be offered by any plugin.
    """
    yield from minibatch_problems(policy, config)
    yield from _shaping_problems(policy.overlong, policy.correction, config)
    yield from _kl_reward_problems(policy.kl_reward, policy.prompts_per_step, max(_group_sizes(policy, config)))
    if policy.correction.wanted and policy.old_logprobs == "sampler":
        yield Problem(
            "algorithm.correction",
            "compares the trainer's logprobs with the sampler's, and with algorithm.old_logprobs: sampler the trainer "
            "gives none; choose `auto` or `trainer`",
        )
    staleness, terms = config.rollout.max_staleness, list(terms_of(policy.loss, "algorithm.loss"))
    old = choose_old_logprobs(policy.old_logprobs, True, policy.correction.wanted, staleness)
    moves = policy.minibatches * policy.epochs > 1 or old == "sampler"
    yield from _covariance_problems(policy.covariance, [term.config for _, term in terms], moves)
    for path, term in terms:
        yield from _top_entropy_problems(policy.top_entropy, path, term.config)
        if not moves:
            yield from _unmoved_problems(path, term.config)


def minibatch_problems(algorithm: Any, config: "Config") -> Iterator[Problem]:
    """Yield that the smallest step has fewer responses than `minibatches`, or that `count_over` has no effect."""
    prompts, least = algorithm.prompts_per_step, min(_group_sizes(algorithm, config))
    if algorithm.minibatches > prompts * least:
        words = f"is {algorithm.minibatches}, more than the {prompts} x {least} responses of a step"
        smaller = "; an environment has a group_size of its own" if least < algorithm.group_size else ""
        yield Problem("algorithm.minibatches", words + smaller)
    if algorithm.count_over == "batch" and algorithm.minibatches == 1:
        words = "is batch, which has no effect on a single minibatch; set algorithm.minibatches, or leave it out"
        yield Problem("algorithm.count_over", words)


def _group_sizes(algorithm: Any, config: "Config") -> list[int]:
    """Return the group size of each environment."""
    return [entry.group_size or algorithm.group_size for entry in config.environments] or [algorithm.group_size]


def _unmoved_problems(path: str, loss: Any) -> Iterator[Problem]:
    """Yield settings of the loss that compare with the old policy, which is the policy itself."""
    off_policy, kl_old = getattr(loss, "off_policy", None), getattr(loss, "kl_old", None)
    compared = {
        "off_policy.since": off_policy is not None and off_policy.threshold is not None and off_policy.since == "old",
        "kl_old.to": kl_old is not None and kl_old.weight and kl_old.to == "old",
    }
    for name in (name for name, is_set in compared.items() if is_set):
        yield Problem(
            f"{path}.{name}",
            "has no effect with one optimizer step for each batch: the old logprobs are the policy's own; choose "
            "`sampler`, or several minibatches or epochs",
        )


def _shaping_problems(overlong: OverlongSection, correction: CorrectionSection, config: "Config") -> Iterator[Problem]:
    """Yield conflicts between settings of these sections and the config, with paths below `algorithm`."""
    rollout = config.rollout
    longest = overlong.length or rollout.max_tokens
    own = [entry.sampling.max_tokens for entry in config.environments if entry.sampling.max_tokens]
    if overlong.penalty and not overlong.length and any(tokens != longest for tokens in own):
        yield Problem(
            "algorithm.overlong.length",
            f"is 0, so the penalty is for the {longest} tokens of rollout.max_tokens, and an environment has a "
            f"sampling.max_tokens of {next(tokens for tokens in own if tokens != longest)}; set the length",
        )
        return
    if overlong.penalty and overlong.buffer > longest:
        yield Problem(
            "algorithm.overlong.buffer", f"is {overlong.buffer}, more than the {longest} tokens of a response"
        )
    if overlong.penalty and not overlong.buffer and not overlong.length:
        yield Problem(
            "algorithm.overlong.penalty",
            f"is for responses longer than the {longest} tokens of rollout.max_tokens, and no turn is longer; set "
            "algorithm.overlong.buffer, for a penalty that rises, or algorithm.overlong.length, for that of all turns",
        )
    if overlong.buffer and not overlong.penalty:
        yield Problem("algorithm.overlong.buffer", "has no effect without a penalty; set algorithm.overlong.penalty")
    if not overlong.bounded and not (overlong.penalty and overlong.buffer):
        words = "has an effect only on a penalty that rises over a buffer; set algorithm.overlong.penalty and .buffer"
        yield Problem("algorithm.overlong.bounded", words)
    yield from _correction_problems(correction)


def _kl_reward_problems(section: KlRewardSection, prompts: int, samples: int) -> Iterator[Problem]:
    """Yield conflicts between settings of a penalty in the reward, with paths below `algorithm`.

    A step has at most `prompts` x `samples` episodes.
    """
    control = section.adaptive
    if control.target and section.weight and prompts * samples >= _LARGEST_CHANGE * control.horizon:
        yield Problem(
            "algorithm.kl_reward.adaptive.horizon",
            f"is {control.horizon:g}, and a step has {prompts} x {samples} episodes: one of "
            f"{_LARGEST_CHANGE * control.horizon:g} or more can turn the weight to 0 or below; wanted more than "
            f"{prompts * samples / _LARGEST_CHANGE:g}, better many times that",
        )
    if section.adaptive.target and not section.weight:
        words = "has no effect on a weight of 0, which it multiplies; set algorithm.kl_reward.weight"
        yield Problem("algorithm.kl_reward.adaptive.target", words)


def policy_loss_problems(path: str, loss: PolicyLossConfig, rollout: "RolloutSection") -> Iterator[Problem]:
    """Yield conflicts between settings of a loss of a policy, with paths below `path`, the path of the loss."""
    yield from average_problems(path, loss, rollout)
    dual, high = getattr(loss, "clip_dual", 0.0), getattr(loss, "clip_high", 0.0)
    if dual and dual <= 1 + high:
        yield Problem(f"{path}.clip_dual", f"is {dual:g}, wanted more than 1 + clip_high, or 0 for none")
    kl = loss.kl
    if kl.straight_through and kl.estimator == "k2":
        yield Problem(f"{path}.kl.straight_through", "changes nothing for k2, whose own gradient it takes")
    if kl.importance == "none":
        return
    if kl.straight_through:
        words = f"takes a gradient that is right by itself, and kl.importance: {kl.importance} counts it twice"
        yield Problem(f"{path}.kl.straight_through", f"{words}; choose one of the two")
    elif kl.estimator == "k2":
        words = f"is {kl.importance}, and the gradient of k2 is right without; choose none, or k1 or k3"
        yield Problem(f"{path}.kl.importance", words)


def _top_entropy_problems(section: TopEntropySection, path: str, loss: object) -> Iterator[Problem]:
    """Yield conflicts with settings of a loss that need all tokens of a response.

    The loss mask keeps only the tokens of the highest entropy if `share` is below 1 and `count_rest` is false.
    """
    if section.share >= 1 or section.count_rest:
        return
    kl, off_policy = getattr(loss, "kl", None), getattr(loss, "off_policy", None)
    taken = {
        f"{path}.kl.importance: sequence": kl is not None and kl.weight and kl.importance == "sequence",
        f"{path}.off_policy": off_policy is not None and off_policy.threshold is not None,
        "the ratio of a sequence": getattr(loss, "level", "") == "token" and hasattr(loss, "ratio"),
    }
    for what in (name for name, is_set in taken.items() if is_set):
        words = f"is false, which takes tokens out of the loss mask, and {what} is a mean over a response's tokens"
        yield Problem("algorithm.top_entropy.count_rest", f"{words}; choose true")


def _covariance_problems(section: CovarianceSection, losses: Iterable[object], moves: bool) -> Iterator[Problem]:
    """Yield conflicts between settings of this section, with paths below `algorithm`.

    `losses`: the loss, or the terms of a sum. `moves`: whether the policy may differ from the old one when the loss is
    computed.
    """
    own = {"clip-cov": {"low", "high"}, "kl-cov": {"weight"}, "none": set[str]()}
    for name in ("share", "low", "high", "weight"):
        used = section.method != "none" if name == "share" else name in own[section.method]
        if not used and getattr(section, name) != getattr(CovarianceSection(), name):
            words = f"has no effect with method: {section.method}; choose another method, or leave it out"
            yield Problem(f"algorithm.covariance.{name}", words)
    if section.method == "clip-cov" and section.low >= section.high:
        yield Problem("algorithm.covariance.low", f"is {section.low:g}, not below `high`, which is {section.high:g}")
    if section.method != "kl-cov":
        return
    if not moves:
        yield Problem(
            "algorithm.covariance.method",
            "is kl-cov, which has no effect with one optimizer step for each batch: the old policy is the policy "
            "itself; choose several minibatches or epochs, old_logprobs: sampler, or clip-cov",
        )
    if not any(isinstance(loss, PolicyLossConfig) for loss in losses):
        words = "is kl-cov, and this loss has no penalty for the distance to the old policy; choose clip-cov"
        yield Problem("algorithm.covariance.method", words)


def average_problems(path: str, loss: AverageConfig, rollout: "RolloutSection") -> Iterator[Problem]:
    """Yield conflicts between settings of a loss's average, with paths below `path`, the path of the loss."""
    if loss.aggregation == "constant" and not loss.max_length:
        hint = f"e.g. to rollout.max_tokens, which is {rollout.max_tokens}"
        yield Problem(f"{path}.max_length", f"is 0, and the aggregation `constant` divides by it; set it, {hint}")
    if loss.aggregation != "constant" and loss.max_length:
        words = f"has no effect on the aggregation `{loss.aggregation}`; leave it out, or choose `constant`"
        yield Problem(f"{path}.max_length", words)
    if loss.aggregation == "token":
        for name in ("count_empty", "count_masked"):
            if getattr(loss, name):
                yield Problem(f"{path}.{name}", "has no effect on the aggregation `token`, which counts tokens")


def _correction_problems(correction: CorrectionSection) -> Iterator[Problem]:
    if correction.normalise and correction.weights == "none":
        yield Problem(
            "algorithm.correction.normalise", "has no effect without weights; set algorithm.correction.weights"
        )
    if correction.measure != "ratio" and correction.mask == "none":
        yield Problem("algorithm.correction.measure", "has no effect without a mask; set algorithm.correction.mask")
    if 0 < correction.max_mean_error < 1:
        words = (
            f"is {correction.max_mean_error:g}, and no mean factor is below 1; choose a larger one, or 0 for no bound"
        )
        yield Problem("algorithm.correction.max_mean_error", words)
    if correction.floor > correction.cap:
        yield Problem("algorithm.correction.floor", f"is {correction.floor:g}, above the cap of {correction.cap:g}")
    if correction.measure == "ratio" and correction.low > correction.high:
        yield Problem("algorithm.correction.low", f"is {correction.low:g}, above `high`, which is {correction.high:g}")
