import numpy as np

from whet.data.batch import from_sequences
from whet_grpo.advantages import GroupMean
from whet_grpo.config import GroupMeanConfig


def test_sequences_of_one_episode_count_once_and_share_its_advantage() -> None:
    sequences = [{"tokens": [1, 2], "loss_mask": [False, True]}] * 4
    batch = from_sequences(sequences, prompt_lengths=[1] * 4, group=[0] * 4, episode=[5, 5, 5, 9])
    batch = batch.with_columns(reward=np.array([1, 1, 1, 0], np.float32))
    assert GroupMean(GroupMeanConfig(scale="none"))(batch).tolist() == [0.5, 0.5, 0.5, -0.5]
