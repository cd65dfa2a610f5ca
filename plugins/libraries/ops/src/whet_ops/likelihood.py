"""The tokens of the likelihood term of a policy's loss. Needs torch."""

from torch import Tensor

from whet.data.batch import Batch
from whet_ops.algorithms.config import LikelihoodSection
from whet_ops.reductions import expand


def right_tokens(batch: Batch, section: LikelihoodSection) -> Tensor:
    """Return which trained tokens [N] belong to correct responses: those with a reward of at least `at_least`.

    The reward has no penalty for leaving the reference: it is the column `task_reward`, if the batch has it.
    """
    reward = batch["task_reward"] if "task_reward" in batch else batch["reward"]
    right: Tensor = batch["loss_mask"] & expand(reward >= section.at_least, batch["lengths"])
    return right
