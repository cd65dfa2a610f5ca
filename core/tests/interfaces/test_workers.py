import numpy as np
import pytest

from whet.data.batch import from_sequences
from whet.interfaces.workers import RankArguments


def shards(sequences: int, parts: int):
    rows = [{"tokens": np.full(4, n), "loss_mask": np.ones(4, bool)} for n in range(sequences)]
    return from_sequences(rows, prompt_lengths=[1] * sequences).shard(parts)


def told(arguments):
    return [(batch["tokens"].tolist(), *rest) for batch, *rest in arguments]


def test_each_rank_gets_its_own_batch_and_the_same_of_all_else():
    arguments = RankArguments((shards(3, 3), "loss", None))
    assert len(arguments) == 3
    assert told(arguments) == [([n] * 4, "loss", None) for n in range(3)]
    assert told([arguments[1]]) == told(arguments)[1:2]
    assert told(arguments[1:]) == told(arguments)[1:]


def test_shards_of_unequal_numbers_of_ranks_are_refused():
    with pytest.raises(ValueError, match=r"shards for \[2, 3\] ranks"):
        RankArguments((shards(3, 3), shards(3, 2)))
    with pytest.raises(ValueError, match=r"shards for \[\] ranks"):
        RankArguments(("loss",))
