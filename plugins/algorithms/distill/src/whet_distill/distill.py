"""On-policy distillation: the student responds, and teachers say token by token what they would have said.

Agarwal et al. 2024, "On-policy distillation of language models" (arXiv:2306.13649), with the student's data alone. With
advantages from the teacher: Lu et al. 2025, "On-policy distillation" (thinkingmachines.ai/blog/on-policy-distillation).
Left out on purpose: rewards, which are reported and teach nothing here.
"""

from typing import TYPE_CHECKING, Any

from attrs import evolve

from whet.data.batch import Batch
from whet.data.model_info import read_model
from whet_distill.config import DistillConfig
from whet_distill.teaching import Teaching
from whet_ops.algorithms.config import reads
from whet_ops.algorithms.minibatches import train_minibatches

if TYPE_CHECKING:
    from whet.interfaces.algorithm import OnlineParts


class Distill:
    """The loop: sample, ask the teachers, learn, hand the weights over."""

    def __init__(self, config: DistillConfig) -> None:
        self.config = config

    def run(self, parts: "OnlineParts") -> None:
        """Run from the first step that is left to the last."""
        config, rollouts, backend = self.config, parts.rollouts, parts.backend
        teach = Teaching(config, parts, read_model(parts.chat.folder), config.teachers)
        moves = config.minibatches > 1 or parts.config.rollout.max_staleness > 0
        moves = moves or reads(config.loss, "old_logprobs")

        for step in parts.steps:
            batch = teach(rollouts.take(config.prompts_per_step))
            own = backend.score(batch, ("logprobs",))["logprobs"] if self._scores(batch) else None
            batch = with_advantages(batch, moves, own)
            for metrics in train_minibatches(backend, batch, parts.loss, config, step.seed):
                step.log(metrics)
            parts.sync_weights(version=step.number)
            step.finish(batch)

    def _scores(self, batch: Batch) -> bool:
        return self.config.old_logprobs == "trainer" and "teacher_logprobs" in batch


def with_advantages(batch: Batch, moves: bool, own: Any = None) -> Batch:
    """Add as advantages by how many nats the teacher likes a token more than who sampled it did.

    Who sampled it are the student's weights of before the step where their logprobs are given, `own` [N]. `moves`: the
    student is no longer who sampled, at least from the second minibatch on, so the ratio is against `old_logprobs`;
    else it is 1 by construction. A loss that reads `old_logprobs` always has the column. `info["old_logprobs"]` names
    the source, as in `whet_ops.algorithms.policy_steps`.
    """
    if "teacher_logprobs" not in batch:
        return batch
    old = batch["sampler_logprobs"] if own is None else own
    batch = batch.with_columns(advantages=batch["teacher_logprobs"] - old)
    batch = evolve(batch, info={**batch.info, "old_logprobs": "sampler" if own is None else "score"})
    return batch.with_columns(old_logprobs=old) if moves else batch
