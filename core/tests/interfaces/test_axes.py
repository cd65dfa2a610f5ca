from pathlib import Path

import numpy as np
import pytest

from whet.data import metrics
from whet.data.batch import from_sequences
from whet.interfaces.axes import ParallelAxes, RankCoordinates
from whet.runtime.local import LocalCluster

SHARING = f"file:{Path(__file__).with_name('sharing.py')}:SharingWorker"


class Recorded:
    """Workers that record what each rank is called with, and return their rank."""

    def __init__(self, places):
        self.places = places

    def call(self, method, *args, phase=""):
        assert method == "coordinates"
        return self.places

    def scatter(self, method, arguments, *, phase=""):
        self.arguments = arguments
        return list(range(len(arguments)))


def make(sequences: int):
    rows = [{"tokens": np.full(4, n), "loss_mask": np.ones(4, bool)} for n in range(sequences)]
    return from_sequences(rows, prompt_lengths=[1] * sequences)


def called_with(arguments):
    return [(None if shard is None else sorted(set(shard["tokens"])), *rest) for shard, *rest in arguments]


def test_each_data_parallel_rank_gets_its_own_shard_and_all_get_the_rest():
    workers = Recorded([RankCoordinates(data) for data in range(3)])
    axes = ParallelAxes.reported_by(workers)
    assert axes.data == 3
    assert axes.scatter(workers, "train", make(3).shard(3), "loss", None) == [0, 1, 2]
    assert called_with(workers.arguments) == [([n], "loss", None) for n in range(3)]


def test_shards_go_to_the_first_stage_and_results_come_from_the_last():
    places = [RankCoordinates(d, t, p, c) for p in (0, 1) for d in (0, 1) for t in (0, 1) for c in (0, 1)]
    workers = Recorded(places)
    results = ParallelAxes.reported_by(workers).scatter(workers, "train", make(2).shard(2), "loss")
    assert [places[rank] for rank in results] == [RankCoordinates(data, pipeline=1) for data in (0, 1)]
    sent = {rank: shard for rank, (shard, _) in enumerate(called_with(workers.arguments)) if shard is not None}
    assert {places[rank]: shard for rank, shard in sent.items()} == {RankCoordinates(0): [0], RankCoordinates(1): [1]}
    assert {loss for _, loss in workers.arguments} == {"loss"}


def test_shards_of_another_number_of_ranks_are_refused():
    axes = ParallelAxes((RankCoordinates(0), RankCoordinates(1)))
    with pytest.raises(ValueError, match="found 3 shards, wanted one for each of 2 data-parallel ranks"):
        axes.scatter(Recorded([]), "train", make(3).shard(3))


@pytest.mark.parametrize(
    "places",
    [
        [RankCoordinates(0), RankCoordinates(0)],
        [RankCoordinates(1), RankCoordinates(2)],
        [RankCoordinates(0, tensor=0), RankCoordinates(0, tensor=1), RankCoordinates(1, tensor=0)],
    ],
)
def test_coordinates_that_are_no_grid_are_refused(places):
    with pytest.raises(ValueError, match=r"wanted each place of a grid of \d x \d x 1 x 1 once"):
        ParallelAxes(tuple(places))


def test_two_tensor_parallel_ranks_get_a_shard_from_the_driver_once(tmp_path):
    batch = make(8)
    with LocalCluster(tmp_path) as cluster:
        workers = cluster.worker_group("backend", 4).spawn(SHARING, {"tensor": 2})
        axes = ParallelAxes.reported_by(workers)
        found = metrics.plain(metrics.merge(axes.scatter(workers, "train", batch.shard(axes.data), "loss")))
        assert found == {"tokens": batch.tokens, "sum": batch["tokens"].sum()}
        assert workers.call("received") == [1, 0, 1, 0]
        scored = axes.scatter(workers, "score", batch.shard(axes.data), "word")
    assert [word for word, _ in scored] == ["word"] * 2
    assert np.array_equal(np.concatenate([tokens for _, tokens in scored]), batch["tokens"])
