"""Metrics of how far a policy has moved, computed within its loss over the tokens `seen` [N]. Needs torch."""

from torch import Tensor

from whet.data.batch import Batch
from whet.data.metrics import Metric, histogram, largest, mean, smallest
from whet_ops.kl import kl_estimate
from whet_ops.losses import PolicyGradient

GAPS = tuple(2.0**power for power in range(-20, 5))
"""Grid of the histogram of logprob gaps, in nats: from what rounding makes to what no correction saves."""


def ratio_metrics(found: PolicyGradient, seen: Tensor) -> dict[str, Metric]:
    """Return ratio/mean, /min and /max, and the shares of tokens that were clipped."""
    ratio = found.ratio[seen]
    metrics = {
        "ratio/mean": mean(ratio.sum(), seen.sum()),
        "clip_fraction": token_mean(found.clipped, seen),
        "clip_fraction/low": token_mean(found.clipped_low, seen),
        "clip_fraction/high": token_mean(found.clipped_high, seen),
    }
    if len(ratio):
        metrics |= {"ratio/min": smallest(ratio.min()), "ratio/max": largest(ratio.max())}
    return metrics


def kl_metrics(name: str, log_ratios: Tensor, seen: Tensor) -> dict[str, Metric]:
    """Return the estimates k1 and k3 of a divergence from the distribution that was sampled, e.g. KL(old || policy)."""
    return {
        f"{name}/k1": token_mean(kl_estimate(log_ratios, "k1"), seen),
        f"{name}/k3": token_mean(kl_estimate(log_ratios, "k3"), seen),
    }


def token_mean(values: Tensor, seen: Tensor) -> Metric:
    """Return the mean over tokens. values, seen [N]."""
    return mean(values[seen].sum(), seen.sum())


def logprob_gaps(logprobs: Tensor, old: Tensor, batch: Batch, seen: Tensor) -> dict[str, Metric]:
    """Return the distance of the sampler's logprobs from the trainer's before this batch was trained on, in nats: its
    mean, its largest value, and the histogram `logprob_gap`.

    `old` are the trainer's logprobs, unless they are the sampler's own. Then the policy's present logprobs take their
    place, which have moved from the second minibatch on.
    """
    trainer = logprobs.detach() if batch.info.get("old_logprobs") == "sampler" else old
    gap = (trainer - batch["sampler_logprobs"]).abs()[seen]
    most = gap.max() if len(gap) else gap.new_zeros(())
    return {
        "logprob_gap/mean": mean(gap.sum(), seen.sum()),
        "logprob_gap/max": largest(most),
        "logprob_gap": histogram(gap.detach(), GAPS),
    }
