"""What is added to rewards before advantages are taken, on NumPy."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from whet.ops.reductions import expand


def overlong_penalty(sizes: NDArray[Any], longest: int, buffer: int, bounded: bool = True) -> NDArray[np.float32]:
    """Give the soft penalty for long answers. sizes [E]: tokens of each answer -> [E], from 0 down to -1.

                 0                                       size <= longest - buffer
        R    =   ((longest - buffer) - size) / buffer    in between
                -1                                       size > longest

    DAPO: Yu et al. 2025, equation 13, section 3.4 (arXiv:2503.14476). A `buffer` of 0 is the hard bound. The size of an
    answer is that of the whole of it, all turns together. Without `bounded` it goes on falling below -1 beyond
    `longest`, as in verl and NeMo RL; that needs a buffer.
    """
    beyond = np.asarray(sizes, np.float64) - (longest - buffer)
    soft = -beyond / buffer if buffer else np.where(beyond > 0, -1.0, 0.0)
    return soft.clip(-1 if bounded else None, 0).astype(np.float32)


def rewards_to_come(totals: NDArray[Any], token_rewards: NDArray[Any], lengths: NDArray[Any]) -> NDArray[Any]:
    """Give what is still to come at each token: a total less what came before. -> [N] float64.

    totals [B] hold everything, the token rewards [N] of the sequence included. Discount 1, as in REINFORCE++
    (arXiv:2501.03262, section 3): r - weight * (sum of KL from t on).
    """
    before = np.cumsum(token_rewards, dtype=np.float64) - token_rewards
    starts = (np.cumsum(lengths) - lengths)[lengths > 0]
    offset = np.zeros(len(lengths))
    offset[lengths > 0] = before[starts]
    found: NDArray[Any] = expand(np.asarray(totals, np.float64) + offset, lengths) - before
    return found
