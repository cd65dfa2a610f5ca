import json
import threading
from contextlib import contextmanager

import numpy as np
import pytest

from whet.config.sections import DataFile, DataSection
from whet.data.messages import conversation
from whet.errors import DataError
from whet.plugins.features import chats
from whet_data.offline import OfflineData


@pytest.fixture(scope="module")
def chat(tiny_model_folder):
    return chats().ChatTokenizer(tiny_model_folder)


def encode(record, chat):
    """One unit of as many sequences as the record has answers."""
    if "answers" not in record:
        raise DataError("there is no field `answers`")
    unit = []
    for rank, answer in enumerate(record["answers"]):
        talk = conversation([{"role": "user", "content": record["n"]}, {"role": "assistant", "content": answer}])
        found = chat.training(talk)
        length = len(found.tokens)
        unit.append(
            {
                "tokens": found.tokens,
                "loss_mask": found.loss_mask,
                "prompt_length": found.prompt_length,
                "number": int(record["n"]),
                "rank": rank,
                "place": np.arange(length, dtype=np.float32),
            }
        )
    return unit


@pytest.fixture
def make(tmp_path, chat):
    def make(records, validation=(), seed=0, max_length=0, status=lambda text: None, epochs=None, **bounds):
        files = []
        for name, rows in (("train", records), ("validation", validation)):
            text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
            (tmp_path / f"{name}.jsonl").write_text(text)
            files.append([DataFile(str(tmp_path / f"{name}.jsonl"))] if rows else [])
        section = DataSection(*files, **bounds)
        return OfflineData(section, chat, seed, max_length, status, encode=encode, epochs=epochs)

    return make


def test_every_validation_file_has_a_name_of_its_own(tmp_path, chat):
    files, named = [], (("eval", ""), ("eval-2", ""), ("b/eval", ""), ("c/x", "eval"), ("c/y", "eval-1"))
    for rows, (path, name) in enumerate(named, 1):
        file = tmp_path / f"{path}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(record) + "\n" for record in numbered(rows)))
        files.append(DataFile(str(file), name=name))
    data = OfflineData(DataSection(files[:1], files), chat, 0, 0, encode=encode).prepare()
    found = {name: sum(batch.sequences for batch in batches) for name, batches in data.validation(4).items()}
    assert found == {"eval": 1, "eval-2": 2, "eval-2-2": 3, "eval-3": 4, "eval-1": 5}


def test_a_subset_of_a_folder_that_has_none_is_refused_before_its_records_are_read(make, tmp_path, chat):
    make(numbered(3))
    section = DataSection([DataFile(str(tmp_path), subset="main")])
    for use in (OfflineData.fingerprint, OfflineData.prepare):
        with pytest.raises(DataError, match="has no subsets, and `subset` is 'main'"):
            use(OfflineData(section, chat, 0, 0, encode=encode))


def numbered(count, answers=("yes",)):
    return [{"n": str(n), "answers": list(answers)} for n in range(count)]


def numbers(batch):
    return batch["number"].tolist()


def test_an_epoch_shows_every_record_once_in_an_order_of_its_own(make):
    data = make(numbered(12)).prepare(encode)
    epochs = [[n for step in range(first, first + 3) for n in numbers(data.batch(step, 4))] for first in (1, 4)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 2
    assert epochs[0] != epochs[1]
    assert epochs[0] != list(range(12))


def test_a_batch_is_a_function_of_step_seed_and_size_alone(make):
    one, two = (make(numbered(50)).prepare(encode) for _ in range(2))
    forwards = [numbers(one.batch(step, 8)) for step in range(1, 20)]
    backwards = [numbers(two.batch(step, 8)) for step in range(19, 0, -1)]
    assert forwards == backwards[::-1]
    other = make(numbered(50), seed=1).prepare(encode)
    assert numbers(other.batch(1, 8)) != forwards[0]


def test_a_batch_may_cross_epochs(make):
    data = make(numbered(5)).prepare(encode)
    flowing = [n for step in range(1, 6) for n in numbers(data.batch(step, 3))]
    assert [sorted(flowing[i : i + 5]) for i in (0, 5, 10)] == [list(range(5))] * 3
    big = data.batch(1, 15)
    assert numbers(big) == flowing
    assert big["unit"].tolist() == list(range(15)), "a record that comes twice is two units"
    assert data.epoch(5, 3) == 3.0


def test_a_batch_of_more_records_than_there_are_is_told_once(make):
    told: list[str] = []
    data = make(numbered(5), status=told.append).prepare()
    for size in (5, 6, 6):
        data.batch(1, size)
    words = "algorithm.batch_size is 6, more than the 5 records of data.train: a step takes records several times"
    assert [line for line in told if "batch_size" in line] == [words]
    with_epochs = make(numbered(5), status=told.append, epochs=1).prepare()
    with_epochs.batch(1, 6)
    assert told.count(words) == 1


def test_batches_hold_what_the_records_say(make, chat):
    batch = make(numbered(9, ("yes", "no, never"))).prepare(encode).batch(1, 4)
    assert batch.sequences == 8
    assert batch["unit"].tolist() == batch["group"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert batch["rank"].tolist() == [0, 1] * 4
    at = 0
    for i, length in enumerate(batch["lengths"].tolist()):
        answer = ("yes", "no, never")[i % 2]
        talk = conversation(
            [{"role": "user", "content": str(batch["number"][i])}, {"role": "assistant", "content": answer}]
        )
        wanted = chat.training(talk)
        assert batch["tokens"][at : at + length].tolist() == wanted.tokens.tolist()
        assert batch["loss_mask"][at : at + length].tolist() == wanted.loss_mask.tolist()
        assert batch["place"][at : at + length].tolist() == list(range(length))
        assert batch["prompt_lengths"][i] == wanted.prompt_length
        at += length
    assert batch["tokens"].dtype == np.int64
    assert batch["loss_mask"].dtype == np.bool_


def test_validation_is_read_in_order(make):
    data = make(numbered(3), validation=numbered(7)).prepare(encode)
    (batches,) = data.validation(3).values()
    assert [numbers(batch) for batch in batches] == [[0, 1, 2], [3, 4, 5], [6]]
    assert make(numbered(3)).prepare(encode).validation(3) == {}


def test_longer_records_are_left_out_and_counted(make, chat):
    records = [*numbered(6), {"n": "99", "answers": ["yes", "yes " * 50]}]
    length = int(make(numbered(6)).prepare(encode).batch(1, 6)["lengths"].max())
    data = make(records, max_length=length).prepare(encode)
    assert len(data) == 6
    assert (data.report.records, data.report.too_long, data.report.malformed) == (7, 1, 0)
    with pytest.raises(DataError, match=r"no record is left of 7; 7 are longer than 2 tokens \(data\.max_length\)"):
        make(records, max_length=2).prepare(encode)


def test_data_most_of_which_is_too_long_is_refused(make):
    records = [{"n": "1", "answers": ["yes"]}, *({"n": f"{n}", "answers": ["yes " * 50]} for n in (2, 3))]
    length = int(make(records[:1]).prepare(encode).batch(1, 1)["lengths"].max())
    with pytest.raises(DataError, match=r"2 of 3 records are longer than \d+ tokens, more than the 50% that data\."):
        make(records, max_length=length).prepare(encode)
    assert len(make(records, max_length=length, max_too_long=1.0).prepare(encode)) == 1


def test_malformed_records_are_counted_and_quoted(make, caplog):
    data = make([*numbered(98), '{"n": ', {"n": "5"}], max_bad_records=0.02).prepare(encode)
    assert (len(data), data.report.malformed) == (98, 2)
    assert data.report.examples[0].startswith("train.jsonl:99: not JSON")
    assert data.report.examples[1] == "train.jsonl:100: there is no field `answers`"
    assert "100 records, 98 sequences" in caplog.text
    assert "left out: 2 malformed\n  train.jsonl:99: not JSON" in caplog.text


def test_too_many_malformed_records_are_refused_with_file_and_line(make):
    with pytest.raises(
        DataError, match=r"(?s)data\.train: 2 of 10 records.*1\.0%.*train\.jsonl:9: .*train\.jsonl:10: "
    ):
        make([*numbered(8), {}, []]).prepare(encode)
    with pytest.raises(DataError, match=r"data\.validation: 1 of 1"):
        make(numbered(8), validation=[{}]).prepare(encode)


def test_an_empty_file_is_refused(make, tmp_path, chat):
    (tmp_path / "empty.jsonl").write_text("\n")
    section = DataSection([DataFile(str(tmp_path / "empty.jsonl"))])
    with pytest.raises(DataError, match="no record is left of 0"):
        OfflineData(section, chat, 0, 0).prepare(encode)


def test_the_fingerprint_follows_contents_and_options(make, tmp_path):
    first = make(numbered(5)).fingerprint()
    assert make(numbered(5)).fingerprint() == first
    others = [
        make(numbered(6)).fingerprint(),
        make(numbered(5), max_length=9).fingerprint(),
        make(numbered(5), validation=numbered(1)).fingerprint(),
    ]
    assert len({first, *others}) == 4


def test_what_became_of_the_records_is_told(make):
    said = []
    make(numbered(5), status=said.append).prepare(encode)
    assert said[-1].startswith("train data: 5 records, 5 sequences, ")


def test_columns_can_be_added_to_each_part_and_travel_with_its_units(make):
    said = []
    data = make(numbered(7, ("yes", "no")), numbered(3), status=said.append).prepare(encode)
    names = []

    def compute(name, part):
        names.append(name)
        seen = [batch["number"] for batch in part.batches(2)]
        assert [len(batch) for batch in seen[:-1]] == [4 if name == "train" else 2] * (len(seen) - 1)
        return {"half": np.concatenate(seen) / 2, "copy": part.whole["place"]}

    more = data.with_columns(compute)
    assert names == ["train", "validation"]
    batch = more.batch(2, 3)
    assert np.array_equal(batch["half"], batch["number"] / 2)
    assert np.array_equal(batch["copy"], batch["place"])
    assert np.array_equal(batch["tokens"], data.batch(2, 3)["tokens"])
    (batches,) = more.validation(2).values()
    assert [part["half"].tolist() for part in batches] == [[0, 0.5], [1]]
    more.status("on")
    assert said[-1] == "on"


def test_a_part_without_data_gets_no_columns(make):
    data = make(numbered(2)).prepare(encode).with_columns(lambda name, part: {"one": np.ones(len(part))})
    assert data.batch(1, 2)["one"].tolist() == [1, 1]
    assert data.validation(4) == {}


@pytest.mark.parametrize(
    ("records", "epochs", "size", "sizes"),
    [(10, 1, 4, [4, 4, 2]), (10, 2, 5, [5] * 4), (5, 3, 4, [4, 4, 4, 3]), (10, 0.5, 3, [3, 2]), (3, 0.01, 4, [1])],
)
def test_epochs_end_with_the_records_that_are_left(make, records, epochs, size, sizes):
    data = make(numbered(records), epochs=epochs).prepare()
    assert data.steps(size) == len(sizes)
    batches = [numbers(data.batch(step, size)) for step in range(1, len(sizes) + 1)]
    assert [len(batch) for batch in batches] == sizes
    endless = make(numbered(records)).prepare()
    flowing = [n for step in range(1, len(sizes) + 1) for n in numbers(endless.batch(step, size))]
    assert [n for batch in batches for n in batch] == flowing[: sum(sizes)]
    assert data.epoch(len(sizes), size) == sum(sizes) / records
    if epochs >= 1:
        assert sorted(n for batch in batches for n in batch) == sorted(list(range(records)) * int(epochs))


@pytest.mark.parametrize(("epochs", "more"), [(1, 2), (1, 3), (0.5, 1), (1, None), (2, 1)])
def test_a_run_that_gets_more_epochs_goes_on_with_the_next_record(make, epochs, more):
    first = make(numbered(10), epochs=epochs)
    steps = first.prepare().steps(4)
    taken = [n for step in range(1, steps + 1) for n in numbers(first.prepare().batch(step, 4))]
    further = make(numbered(10), epochs=more)
    further.go_on(steps, first.position(steps, 4))
    data = further.prepare().with_columns(lambda name, part: {"one": np.ones(len(part))})
    assert data.until(steps, 4) == len(taken)
    total = steps + 3 if more is None else data.steps(4)
    taken += [n for step in range(steps + 1, total + 1) for n in numbers(data.batch(step, 4))]
    whole = make(numbered(10)).prepare()
    assert taken == numbers(whole.batch(1, len(taken)))
    assert len(taken) == (22 if more is None else 10 * max(epochs, more))
    assert further.position(total, 4)["records"] == len(taken), "where a later run attempt goes on"
    if more is None:
        with pytest.raises(ValueError, match="the run goes on after step 3; the batch of step 2 is of an earlier"):
            data.batch(2, 4)


@pytest.mark.parametrize("size", [2, 8])
def test_a_run_without_epochs_goes_on_with_the_next_record_when_its_steps_change_size(make, size):
    first = make(numbered(10))
    taken = [n for step in range(1, 4) for n in numbers(first.prepare().batch(step, 4))]
    further = make(numbered(10))
    further.go_on(3, first.position(3, 4))
    taken += [n for step in range(4, 7) for n in numbers(further.prepare().batch(step, size))]
    assert taken == numbers(make(numbered(10)).prepare().batch(1, len(taken)))
    assert further.position(6, size) == {"records": len(taken)}


def test_epochs_of_data_with_columns_end_in_the_same_place(make):
    data = make(numbered(5), epochs=1).prepare().with_columns(lambda name, part: {"one": np.ones(len(part))})
    assert (data.steps(4), len(data.batch(2, 4)["one"])) == (2, 1)


def test_a_batch_behind_the_end_is_whole(make):
    """A loop that takes more records than its facts state gets what it asks for."""
    assert len(numbers(make(numbered(5), epochs=1).prepare().batch(3, 4))) == 4


def test_data_is_prepared_once(make):
    said = []
    data = make(numbered(5), status=said.append)
    assert data.prepare() is data.prepare()
    assert len([words for words in said if words.startswith("train data: 5 records")]) == 1


def test_data_that_was_begun_is_read_once_on_another_thread(make):
    threads, said = [], []
    data = make(numbered(5), status=lambda words: said.append(words) or threads.append(threading.current_thread()))
    data.begin()
    data.begin()
    assert numbers(data.prepare().batch(1, 5)) == numbers(make(numbered(5)).prepare().batch(1, 5))
    data.begin()
    assert data.prepare() is data.prepare()
    assert len([words for words in said if words.startswith("train data: 5 records")]) == 1
    assert threading.current_thread() not in threads


def test_what_fails_after_the_beginning_is_raised_where_the_data_is_needed(make):
    data = make([{}, {}])
    data.begin()
    with pytest.raises(DataError, match="2 of 2 records are malformed"):
        data.prepare()


def test_data_without_an_end_has_no_number_of_steps(make):
    with pytest.raises(ValueError, match="no number of steps"):
        make(numbered(5)).prepare().steps(2)


def test_files_with_weights_are_mixed_by_them_and_told(tmp_path, chat, make):
    files = []
    for name, first, count, weight in (("large", 0, 30, 1.0), ("small", 100, 10, 3.0)):
        rows = ({"n": str(first + n), "answers": ["yes"]} for n in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files.append(DataFile(str(tmp_path / f"{name}.jsonl"), weight=weight))
    said = []
    made = OfflineData(DataSection(files), chat, 0, 0, said.append, encode=encode, epochs=2)
    data = made.prepare()
    epochs = [[n for step in range(first, first + 5) for n in numbers(data.batch(step, 8))] for first in (1, 6)]
    assert data.steps(8) == 10
    assert [sum(n >= 100 for n in epoch) for epoch in epochs] == [30, 30]
    assert [epoch.count(105) for epoch in epochs] == [3, 3]
    assert len({n for epoch in epochs for n in epoch if n < 100}) == 20
    assert said[-1].endswith("small.jsonl: 75.0% of the records, 3.00 times in an epoch of 40")
    without = OfflineData(DataSection([DataFile(file.path) for file in files]), chat, 0, 0).fingerprint()
    assert made.fingerprint() != without


def test_all_of_the_tokenising_is_timed(make, chat):
    told = []

    @contextmanager
    def timed():
        told.append("begin")
        yield
        told.append("end")

    data = make(numbered(3), numbered(2))
    data._timed = timed
    data.prepare(lambda record, chat: told.append("record") or encode(record, chat))
    assert told == ["begin", *["record"] * 5, "end"]
