"""Terms that are added to rewards before advantages are computed, on NumPy."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from whet_ops.gae import gae
from whet_ops.reductions import expand


def overlong_penalty(sizes: NDArray[Any], longest: int, buffer: int, bounded: bool = True) -> NDArray[np.float32]:
    """Return the soft penalty for long responses. sizes [E]: tokens of each response -> [E], from 0 down to -1.

                 0                                       size <= longest - buffer
        R    =   ((longest - buffer) - size) / buffer    in between
                -1                                       size > longest

    DAPO: Yu et al. 2025, equation 13, section 3.4 (arXiv:2503.14476). A `buffer` of 0 is the hard bound. The size of a
    response counts all turns together. Without `bounded` the penalty keeps falling below -1 beyond `longest`, as in
    verl and NeMo RL; that needs a buffer.
    """
    beyond = np.asarray(sizes, np.float64) - (longest - buffer)
    soft = -beyond / buffer if buffer else np.where(beyond > 0, -1.0, 0.0)
    return soft.clip(-1 if bounded else None, 0).astype(np.float32)


def cut_penalty(rewards: NDArray[Any], cut: NDArray[Any], factor: float) -> NDArray[np.float32]:
    """Return what multiplying the rewards of cut responses by a factor adds to them. rewards, cut [E] -> [E].

        (factor - 1) * reward    where the response was cut, else 0

    NeMo RL's `stop_properly_penalty_coef`. A factor of 0 leaves nothing of the reward. A reward below 0 comes closer to
    0 too, so this is a penalty only for rewards above 0.
    """
    return np.where(cut, (factor - 1.0) * np.asarray(rewards, np.float64), 0.0).astype(np.float32)


def reward_to_go(rewards: NDArray[Any], token_rewards: NDArray[Any], lengths: NDArray[Any]) -> NDArray[Any]:
    """Return the reward to go at each token: the sequence's reward, plus the token rewards from t on. -> [N] float64.

    rewards [B] do not include the token rewards [N]. Each sequence is summed by itself, and its reward is added last,
    so that rewards which cancelled before leave nothing behind. Discount 1, as in REINFORCE++ (arXiv:2501.03262,
    section 3): r - weight * (sum of KL from t on).
    """
    everywhere, nothing = np.ones(len(token_rewards), np.bool_), np.zeros(len(token_rewards))
    onwards = gae(token_rewards, nothing, everywhere, lengths, gamma=1.0, lambda_=1.0)
    return np.asarray(expand(np.asarray(rewards, np.float64), lengths) + onwards)


def adapted_weight(weight: float, divergence: float, target: float, horizon: float, episodes: int) -> float:
    """Return the weight of a penalty after a step with this many episodes and this mean divergence.

        weight * max(0, 1 + clip(divergence / target - 1, -0.2, 0.2) * episodes / horizon)

    Ziegler et al. 2019, section 2.2 (arXiv:1909.08593), as in their code, TRL and verl: `horizon` in episodes.
    The bound of 0 is ours.
    """
    error = min(max(divergence / target - 1.0, -0.2), 0.2)
    return weight * max(0.0, 1.0 + error * episodes / horizon)
