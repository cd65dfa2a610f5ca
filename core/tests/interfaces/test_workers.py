import numpy as np
import pytest

from whet.data.batch import from_sequences
from whet.interfaces.workers import RankArguments
from whet.runtime.wire import decode, encode


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


def test_they_cross_and_are_cut_on_the_other_side():
    arguments = RankArguments((shards(6, 4), ("a", 1)))
    assert told(decode([bytearray(buffer) for buffer in encode(arguments[1:3])])) == told(arguments)[1:3]


def test_shards_of_unequal_numbers_of_ranks_are_refused():
    with pytest.raises(ValueError, match=r"shards for \[2, 3\] ranks"):
        RankArguments((shards(3, 3), shards(3, 2)))
    with pytest.raises(ValueError, match=r"shards for \[\] ranks"):
        RankArguments(("loss",))
