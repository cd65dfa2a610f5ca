"""Megatron's router of a mixture of experts, with a place where its choices are seen, replayed and trained.

logits [T, E] -> the k chosen experts [T, k] -> probabilities [T, E]
                 |                              |
                 Watch.get_replay_topk          Watch.end: sums, and the losses that the router gets
"""

from typing import Any, Protocol

from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class Watch(Protocol):
    """What sees the passes of one router."""

    def begin(self) -> None:
        """Prepare the pass that begins."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, default_compute_topk: Any
    ) -> tuple[Tensor, Tensor]:
        """Return scores and numbers of the experts that compute. Megatron calls it where it would choose."""

    def end(self, logits: Tensor, probs: Tensor) -> Tensor:
        """Return the probabilities, to which losses may be attached."""


class WatchedRouter(TopKRouter):  # type: ignore[misc]  # Megatron has no types
    """Megatron's router. It does nothing else until it is watched."""

    watch: Watch | None = None

    def watch_by(self, watch: Watch) -> None:
        """Show all further passes to `watch`."""
        self.watch = self.router_replay = watch

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
        """Return the probabilities of the chosen experts and which they are [T, E]."""
        if self.watch is None:
            return super().routing(logits, padding_mask)
        self.watch.begin()
        probs, chosen = super().routing(logits, padding_mask)
        return self.watch.end(logits.view(-1, logits.shape[-1]), probs), chosen
