"""Which tokens the likelihood term of a policy's loss is over. Needs torch."""

from torch import Tensor

from whet.config.policy import LikelihoodSection
from whet.data.batch import Batch
from whet.ops.reductions import expand


def right_tokens(batch: Batch, section: LikelihoodSection) -> Tensor:
    """Return which trained tokens [N] are of right answers: of a reward of at least `at_least`.

    The reward is that without a penalty for leaving the reference: the column `task_reward`, where there is one.
    """
    reward = batch["task_reward"] if "task_reward" in batch else batch["reward"]
    right: Tensor = batch["loss_mask"] & expand(reward >= section.at_least, batch["lengths"])
    return right
