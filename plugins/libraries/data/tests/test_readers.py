import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from whet.config.sections import DataFile, DataSection
from whet.errors import DataError
from whet.interfaces.data import Look
from whet_data.reader import reader
from whet_data.readers import content_hash, find_file, format_words, read

RECORDS = [{"text": "one"}, {"text": "zwei \u65e5\u672c"}, {"text": "3", "n": [1, {"a": None}]}]


def lines(records) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def records_of(path: Path, **options) -> list:
    rows = list(read(DataFile(str(path), **options)))
    assert not [row.problem for row in rows if row.problem]
    return [row.record for row in rows]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", lines(RECORDS)),
        ("a.jsonl", lines(RECORDS).rstrip(b"\n")),
        ("a.jsonl", b"\xef\xbb\xbf" + lines(RECORDS)),
        ("a.jsonl", b"\n\n" + lines(RECORDS).replace(b"\n", b"\r\n  \r\n")),
        ("a.ndjson", lines(RECORDS)),
        ("a.jsonl.gz", gzip.compress(lines(RECORDS))),
        ("a.json", json.dumps(RECORDS, indent=1).encode()),
        ("a.json", b"\xef\xbb\xbf" + json.dumps(RECORDS).encode()),
        ("a.json", lines(RECORDS)),
        ("a.json.gz", gzip.compress(json.dumps(RECORDS).encode())),
    ],
    ids=[
        "lines",
        "no last newline",
        "BOM",
        "blank lines",
        "ndjson",
        "gzip",
        "list",
        "list BOM",
        "lines in json",
        "list gzip",
    ],
)
def test_every_format_gives_the_same_records(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert records_of(tmp_path / name) == RECORDS
    assert records_of(tmp_path / name, limit=2) == RECORDS[:2]


def test_parquet_is_read(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow reads Parquet files")
    pyarrow = pytest.importorskip("pyarrow")
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS[:2]), tmp_path / "a.parquet")
    assert records_of(tmp_path / "a.parquet") == RECORDS[:2]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([9 * 10**17], lambda arrow: arrow.timestamp("us")),
        ([5_000_000], lambda arrow: arrow.date32()),
        ([1], lambda arrow: arrow.timestamp("us", "No/Where")),
    ],
    ids=["time", "date", "zone"],
)
def test_a_column_of_parquet_with_a_value_that_python_lacks_is_named(tmp_path, values, kind):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow reads Parquet files")
    arrow = pytest.importorskip("pyarrow")
    when = arrow.array(values, arrow.int32() if kind(arrow) == arrow.date32() else arrow.int64()).cast(kind(arrow))
    parquet.write_table(arrow.table({"text": ["one"], "when": when}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: the column 'when' has a value that cannot be read: .*; cor"):
        records_of(tmp_path / "a.parquet")


def test_malformed_rows_are_given_with_file_line_and_reason(tmp_path):
    bad = [b"{", b"[1]", b'"text"', b'{"a": "\xff"}', b"[" * 100_000, b"{'a': 1}"]
    (tmp_path / "a.jsonl").write_bytes(lines(RECORDS[:1]) + b"\n".join(bad) + b"\n" + lines(RECORDS[1:]))
    rows = list(read(DataFile(str(tmp_path / "a.jsonl"))))
    assert [row.record for row in rows if not row.problem] == RECORDS
    assert [row.where for row in rows if row.problem] == [f"a.jsonl:{n}" for n in range(2, 8)]
    problems = [row.problem for row in rows if row.problem]
    wanted = ["not JSON", "a list, wanted an object", "a str, wanted", "not UTF-8 at byte 7", "nested", "not JSON"]
    assert all(part in problem for part, problem in zip(wanted, problems, strict=True))


def test_a_line_of_many_megabytes_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": "x" * 20_000_000}]))
    assert len(records_of(tmp_path / "a.jsonl")[0]["text"]) == 20_000_000


def test_a_damaged_archive_is_refused(tmp_path):
    packed = gzip.compress(lines(RECORDS * 1000))
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    (tmp_path / "none.jsonl.gz").write_bytes(b"no archive")
    for name in ("cut", "none"):
        with pytest.raises(DataError, match=rf"{name}\.jsonl\.gz is damaged or was cut off"):
            records_of(tmp_path / f"{name}.jsonl.gz")


def test_a_folder_holds_a_file_for_each_split(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(lines(RECORDS))
    (tmp_path / "test.json").write_bytes(json.dumps(RECORDS[:1]).encode())
    assert records_of(tmp_path) == RECORDS
    assert records_of(tmp_path, split="test") == RECORDS[:1]
    with pytest.raises(DataError, match=r"no file for the split 'validation'; it has test\.json, train\.jsonl"):
        records_of(tmp_path, split="validation")
    (tmp_path / "train.json").write_bytes(b"[]")
    with pytest.raises(DataError, match=r"has train\.jsonl and train\.json for the split 'train'"):
        records_of(tmp_path)


def test_what_cannot_be_read_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "a.json").write_text("[1, 2")
    (tmp_path / "a.parquet").write_text("hello")
    (tmp_path / "whole.json").write_text(json.dumps({"data": RECORDS}, indent=2))
    (tmp_path / "list.jsonl").write_text("\n" + json.dumps(RECORDS, indent=2))
    (tmp_path / "broken.jsonl").write_text('["note"\n' + json.dumps(RECORDS[0]))
    assert [row.problem[:8] for row in read(DataFile(str(tmp_path / "broken.jsonl")))] == ["not JSON", ""]
    (tmp_path / "rows.jsonl").write_text("[" + ",\n".join(map(json.dumps, RECORDS)) + "]")
    for name, complaint in [
        ("a.txt", "is no data file: wanted a file that ends in .jsonl"),
        ("gone.jsonl", "gone.jsonl cannot be read: No such file"),
        ("../../a b", "is no data file"),
        ("a.json", "cannot be read as a JSON list"),
        ("a.parquet", "cannot be read as Parquet"),
        ("whole.json", "is one JSON object over several lines; wanted a list of records, or a record on each line"),
        ("list.jsonl", r"is a JSON list over several lines; name it \.json, or set format: json"),
        ("rows.jsonl", "is a JSON list over several lines"),
    ]:
        with pytest.raises(DataError, match=complaint):
            records_of(tmp_path / name)


def test_a_name_that_is_no_file_is_asked_of_the_hub(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="datasets reads the hub")
    code = (
        "from whet_data.readers import read; from whet.config.sections import DataFile\n"
        "from whet.errors import DataError\n"
        "try: read(DataFile('nobody-at-all/no-such-data'))\n"
        "except DataError as error: print(error)"
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "'nobody-at-all/no-such-data' (split 'train') cannot be loaded from the hub" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "there is no file or folder 'data/trian' here, so it is a data set of the hub"),
        ({"format": "hub"}, "a data set of the hub"),
    ],
)
def test_a_check_says_what_it_takes_for_a_data_set_of_the_hub(options, words):
    assert reader.look(DataFile("data/trian", **options), (), {}) == Look("", words)


def test_a_hub_data_set_is_read(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets reads the hub")
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        return datasets.Dataset.from_list(RECORDS[:2]).with_format("numpy", columns=[])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = list(read(DataFile("openai/gsm8k", split="test", subset="main")))
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]  # and so no code of the data set's is allowed
    assert [(row.where, row.record) for row in rows] == [
        ("openai/gsm8k[test]:0", RECORDS[0]),
        ("openai/gsm8k[test]:1", RECORDS[1]),
    ]


def test_a_hub_data_set_is_validated_on_by_the_split_that_is_held_out(monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets reads the hub")
    one, two = (datasets.Dataset.from_list(records) for records in (RECORDS[:2], RECORDS[:1]))
    held = {"train": one, "test": two}
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, split: held if split is None else held[split])
    (file,) = DataSection([DataFile("openai/gsm8k")], [DataFile("openai/gsm8k")]).validation
    assert [(row.where, row.record) for row in read(file)] == [("openai/gsm8k[test]:0", RECORDS[0])]
    assert content_hash(file) == content_hash(DataFile("openai/gsm8k", split="test"))
    assert content_hash(DataFile("openai/gsm8k")) == content_hash(DataFile("openai/gsm8k", split="train"))
    held["validation"] = one
    with pytest.raises(DataError, match="gsm8k has the splits train, test, validation; wanted one of"):
        read(file)


def test_the_hash_follows_content_and_limit_but_not_the_place(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(lines(RECORDS))
    (tmp_path / "c.jsonl").write_bytes(lines(RECORDS[:2]))
    hashes = [content_hash(DataFile(str(tmp_path / f"{name}.jsonl"))) for name in "abc"]
    assert hashes[0] == hashes[1] != hashes[2]
    assert content_hash(DataFile(str(tmp_path / "a.jsonl"), limit=1)) != hashes[0]


def test_real_data_is_read(shared_data):
    rows = list(read(DataFile(str(shared_data / "gsm8k_test.jsonl"))))
    assert len(rows) == 1319
    assert rows[-1].where == "gsm8k_test.jsonl:1319"
    assert set(rows[0].record) == {"question", "answer"}
    assert len(list(read(DataFile(str(shared_data / "HumanEval.jsonl.gz"))))) == 164


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a data set and one with splits, as the library `datasets` saves them."""
    datasets = pytest.importorskip("datasets", reason="datasets reads what it saved")
    folder = tmp_path_factory.mktemp("saved")
    one, two = (datasets.Dataset.from_list(records) for records in (RECORDS[:2], RECORDS[:1]))
    one.save_to_disk(folder / "one")
    datasets.DatasetDict({"train": one, "test": two}).save_to_disk(folder / "splits")
    return folder


def test_a_data_set_that_was_saved_is_read(saved):
    assert records_of(saved / "one") == RECORDS[:2]
    assert records_of(saved / "one", format="saved", limit=1) == RECORDS[:1]
    assert [row.where for row in read(DataFile(str(saved / "one")))] == ["one:0", "one:1"]
    assert format_words(DataFile(str(saved / "one"))) == "a saved data set"


def test_a_format_that_a_data_set_was_saved_with_is_left_out(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets reads what it saved")
    datasets.Dataset.from_list([{"text": "a", "n": [1]}]).with_format("numpy", columns=["n"]).save_to_disk(
        tmp_path / "a"
    )
    assert records_of(tmp_path / "a") == [{"text": "a", "n": [1]}]


def test_a_split_of_saved_splits_is_read(saved):
    assert records_of(saved / "splits") == RECORDS[:2]
    assert records_of(saved / "splits", split="test") == RECORDS[:1]
    with pytest.raises(DataError, match="has no split 'validation'; it has test, train"):
        records_of(saved / "splits", split="validation")
    with pytest.raises(DataError, match=r"has no split '\.\./one'"):
        records_of(saved / "splits", split="../one")


def held_out(path, **options):
    """Return a validation file as a config makes it."""
    (file,) = DataSection([DataFile("a.jsonl")], [DataFile(str(path), **options)]).validation
    return file


def test_a_validation_file_without_a_split_reads_the_split_that_is_held_out(saved, tmp_path):
    assert [row.record for row in read(held_out(saved / "splits"))] == RECORDS[:1]
    assert format_words(held_out(saved / "splits")) == "a saved data set, split 'test'"
    assert format_words(DataFile(str(saved / "splits"))) == "a saved data set, split 'train'"
    (tmp_path / "train.jsonl").write_bytes(lines(RECORDS))
    with pytest.raises(DataError, match="has the splits train; wanted one of `validation` and `test`"):
        find_file(held_out(tmp_path))
    assert find_file(held_out(tmp_path, split="train")) == tmp_path / "train.jsonl"
    (tmp_path / "validation.csv").write_text("text\none\n")
    assert [row.record for row in read(held_out(tmp_path))] == [{"text": "one"}]
    assert format_words(held_out(tmp_path)) == "CSV, split 'validation'"
    (tmp_path / "test.jsonl").write_bytes(lines(RECORDS))
    with pytest.raises(DataError, match="has the splits test, train, validation; wanted one of"):
        read(held_out(tmp_path))


def test_a_split_or_a_subset_of_a_saved_data_set_that_has_none_is_refused(saved):
    path = saved / "one"
    assert find_file(held_out(path)) == find_file(DataFile(str(path))) == path
    assert find_file(DataFile(str(path), split="train")) == path, "all of it is for training, as in `datasets`"
    for split in ("test", "validation"):
        with pytest.raises(DataError, match=f"one is a saved data set.*has no splits, and `split` is '{split}'"):
            find_file(DataFile(str(path), split=split))
    with pytest.raises(DataError, match="has no subsets, and `subset` is 'main'"):
        find_file(DataFile(str(path), subset="main"))


def test_one_file_is_read_whole_and_the_plan_says_what_has_no_effect(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(RECORDS))
    assert format_words(held_out(path)) == format_words(DataFile(str(path), split="train")) == "JSON lines"
    told = format_words(DataFile(str(path), split="test", subset="main"))
    assert told == "JSON lines, one file, so it is read whole whatever `subset` 'main' and `split` 'test' say"
    assert records_of(path, split="test"), "the tasks of an environment may be one file"


def test_the_hash_of_a_saved_data_set_follows_its_rows(saved, tmp_path):
    shutil.copytree(saved / "one", tmp_path / "copy")
    hashes = [
        content_hash(DataFile(str(path))) for path in (saved / "one", tmp_path / "copy", saved / "splits" / "test")
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_saved_data_set_that_is_damaged_is_refused(saved, tmp_path):
    shutil.copytree(saved / "one", tmp_path / "bad")
    next((tmp_path / "bad").glob("*.arrow")).write_bytes(b"no arrow")
    with pytest.raises(DataError, match="bad cannot be read"):
        records_of(tmp_path / "bad")
    (tmp_path / "bad" / "state.json").unlink()
    with pytest.raises(DataError, match=r"has no state\.json or dataset_dict\.json"):
        records_of(tmp_path / "bad", format="saved")
    with pytest.raises(DataError, match="there is no folder"):
        records_of(tmp_path / "gone", format="saved")


def test_the_format_key_chooses_among_the_files_of_a_folder(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(lines(RECORDS))
    (tmp_path / "train.csv").write_text("text\none\n")
    assert records_of(tmp_path, format="csv") == [{"text": "one"}]
    assert records_of(tmp_path, format="jsonl") == RECORDS


@pytest.mark.parametrize("name", ["it.jsonl", "it.json"])
def test_a_record_with_half_of_a_character_is_malformed_and_one_with_both_halves_is_not(tmp_path, name):
    records = [
        '{"text": "half \\ud83d"}',
        '{"text": "whole \\ud83d\\ude00"}',
        '{"\\udE00": 1}',
        '{"text": "no \\\\ud83d"}',
    ]
    joined = f"[{', '.join(records)}]" if name == "it.json" else "\n".join(records)
    (tmp_path / name).write_text(joined)
    rows = list(read(DataFile(str(tmp_path / name))))
    assert [row.problem[:19] for row in rows] == ["half of a character", "", "half of a character", ""]
    assert rows[1].record == {"text": "whole \U0001f600"}
