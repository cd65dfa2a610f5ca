"""Columns that a loss needs from the whole batch. They are computed before the step, from the policy's scores.

    batch -> logprobs of the policy (one forward pass) -> scores [B] -> score_shift | margin_shift | matched_score

A loss sees only a micro-batch of one rank. So a mean or a sort over the whole batch is computed here, once, and value
and gradient do not depend on micro-batches, packing or ranks. The columns carry no gradient.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from whet.data.batch import Batch
from whet_dpo.loss_config import REFERENCE, RESPONSE
from whet_dpo.running import RunningTally, Tally
from whet_dpo.whole_config import (
    MARGIN_SHIFT,
    MATCHED,
    SHIFT,
    AotConfig,
    AotUnpairedConfig,
    BcoConfig,
    BcoPairConfig,
    columns_for,
)
from whet_ops.algorithms.config import terms_of
from whet_ops.pairs import pair_positions, shared_length_weights
from whet_ops.reductions import segment_sum

if TYPE_CHECKING:
    from whet.component import Selection
    from whet.interfaces.algorithm import Parts


@frozen(eq=False)
class Scores:
    """The scored responses of a batch, one for each sequence. NumPy float64."""

    policy: Any  # [B]
    reference: Any  # [B]
    tokens: Any  # [B] int64, those to learn

    @property
    def ratio(self) -> Any:
        """Return the score [B] of the losses: the log-ratio of policy and reference."""
        return self.policy - self.reference


def scores_of(batch: Batch, logprobs: Any, config: object) -> Scores:
    """Return the responses, with sums over tokens as in the loss with this section. logprobs [N] -> [B]."""
    mask, lengths = np.asarray(batch["loss_mask"]), batch["lengths"]
    mask = mask & batch[RESPONSE] if RESPONSE in batch else mask
    alpha = getattr(config, "ld_alpha", 1.0)
    weights = 1.0 if alpha == 1 else shared_length_weights(mask, lengths, batch["unit"], batch["chosen"], alpha)
    tokens = segment_sum(mask.astype(np.int64), lengths)
    by = np.maximum(tokens, 1) if getattr(config, "average_logprobs", False) else 1
    policy, reference = (
        segment_sum(np.where(mask, column, 0).astype(np.float64) * weights, lengths) / by
        for column in (logprobs, batch[REFERENCE])
    )
    return Scores(policy, reference, tokens)


def live_pairs(batch: Batch, scores: Scores) -> tuple[Any, Any]:
    """Return the positions of the chosen and the rejected response of each pair with trained tokens: [P], [P]."""
    chosen, rejected = pair_positions(np.asarray(batch["unit"]), np.asarray(batch["chosen"]))
    alive = scores.tokens[chosen] + scores.tokens[rejected] > 0
    return chosen[alive], rejected[alive]


def tally_of(batch: Batch, scores: Scores) -> Tally:
    """Return the sums of the scores of both kinds of responses. A response without trained tokens does not count."""
    desirable = np.asarray(batch["desirable" if "desirable" in batch else "chosen"])
    kinds = [(scores.tokens > 0) & of for of in (desirable, ~desirable)]
    ratios = [scores.ratio[of] for of in kinds]
    return Tally((float(ratios[0].sum()), float(ratios[1].sum())), (len(ratios[0]), len(ratios[1])))


def margin_shift(batch: Batch, scores: Scores) -> Any:
    """Return for each pair the reference's log-ratio of the pair minus the reference's log-ratio of the same rank: [B]
    float32; see `whole_losses.Aot`.
    """
    chosen, rejected = live_pairs(batch, scores)
    policy, reference = (of[chosen] - of[rejected] for of in (scores.policy, scores.reference))
    opposite = np.empty_like(reference)
    opposite[np.argsort(policy, kind="stable")] = np.sort(reference)
    column = np.zeros(batch.sequences, np.float32)
    column[chosen] = column[rejected] = reference - opposite
    return column


def matched_score(batch: Batch, scores: Scores) -> Any:
    """Return the score of the response of the other kind that has a response's rank: [B] float32."""
    chosen, rejected = (of[np.argsort(scores.ratio[of], kind="stable")] for of in live_pairs(batch, scores))
    column = np.zeros(batch.sequences, np.float32)
    column[chosen], column[rejected] = scores.ratio[rejected], scores.ratio[chosen]
    return column


class WholeBatch:
    """Adds the columns that a loss needs from the whole batch. If it needs none, nothing is scored."""

    def __init__(self, parts: "Parts", loss: "Selection") -> None:
        self._backend = parts.backend
        self._terms = [term.config for _, term in terms_of(loss) if columns_for(term.config)]
        running = any(getattr(config, "shift", "") == "running" for config in self._terms)
        self._running = RunningTally(parts.config.run.folder, parts.steps.done) if running else None

    def __call__(self, batch: Batch, step: int = 0) -> Batch:
        """Return the batch with the columns. `step` is the step that trains on the batch; 0: validation."""
        if not self._terms:
            return batch
        logprobs = self._backend.score(batch, ("logprobs",))["logprobs"]
        for config in self._terms:
            scores = scores_of(batch, logprobs, config)
            if isinstance(config, BcoPairConfig | BcoConfig):
                shift = self._tally(tally_of(batch, scores), config, step).mean(config.shift_mean)
                batch = batch.with_columns(**{SHIFT: np.full(batch.sequences, shift, np.float32)})
            else:
                name, column = _SORTED[type(config)]
                batch = batch.with_columns(**{name: column(batch, scores)})
        return batch

    def _tally(self, of_batch: Tally, config: BcoPairConfig | BcoConfig, step: int) -> Tally:
        """Return the tally of the mean: of this batch, or of all trained batches up to this one."""
        if config.shift == "batch" or self._running is None:
            return of_batch
        return self._running.add(of_batch, step) if step else self._running.tally


_SORTED: dict[type, tuple[str, Callable[[Batch, Scores], Any]]] = {
    AotConfig: (MARGIN_SHIFT, margin_shift),
    AotUnpairedConfig: (MATCHED, matched_score),
}
"""The column of each loss that sorts, and the function that computes it."""
