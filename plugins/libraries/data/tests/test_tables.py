"""CSV and TSV: what programs write is read, by the standard library; what is damaged is told with its line."""

import csv
import gzip
import io
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.config.sections import DataFile
from whet.errors import DataError
from whet_data.readers import content_hash, format_words, read

HEADER = ("prompt", "completion")
ROWS = [("1+1?", "2"), ('say "hi"\nand go on', "h\u00e9llo, \u65e5\u672c"), ("x;y", "a\tb")]
RECORDS = [dict(zip(HEADER, row, strict=True)) for row in ROWS]


def table(rows=(HEADER, *ROWS), **dialect) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, **dialect).writerows(rows)
    return text.getvalue()


def read_all(path, content: bytes, **options):
    path.write_bytes(content)
    return list(read(DataFile(str(path), **options)))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", table().encode()),
        ("a.csv", table().rstrip("\r\n").encode()),
        ("a.csv", table(lineterminator="\n").encode()),
        ("a.csv", table(lineterminator="\r").encode()),
        ("a.csv", b"\xef\xbb\xbf" + table().encode()),
        ("a.csv", table().encode("utf-16")),
        ("a.csv", table(delimiter=";").encode()),
        ("a.csv", table(delimiter="\t").encode()),
        ("a.csv", table(quoting=csv.QUOTE_ALL).encode()),
        ("a.csv", table([("", *HEADER), *((str(i), *row) for i, row in enumerate(ROWS))]).encode()),
        ("a.csv", table([(" prompt", "completion "), *ROWS]).encode()),
        ("a.tsv", table(delimiter="\t").encode()),
        ("a.csv.gz", gzip.compress(table().encode())),
        ("a.tsv.gz", gzip.compress(table(delimiter="\t").encode())),
    ],
    ids=[
        "RFC 4180", "no last newline", "LF", "CR", "UTF-8 with BOM", "UTF-16", "semicolons", "tabs", "all quoted",
        "row numbers", "spaces around names", "TSV", "CSV gzip", "TSV gzip",
    ],
)  # fmt: skip
def test_every_usual_way_to_write_a_table_gives_the_same_records(tmp_path, name, content):
    assert [row.record for row in read_all(tmp_path / name, content)] == RECORDS


def test_any_text_comes_back_as_it_was_written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)

    @given(st.lists(st.tuples(text, text), min_size=1, max_size=5), st.sampled_from(",;\t"))
    def check(rows, delimiter):
        content = table([HEADER, *rows], delimiter=delimiter, quoting=csv.QUOTE_ALL).encode()
        found = read_all(folder / "a.csv", content)
        assert [tuple(row.record.values()) for row in found] == rows

    check()


def test_an_empty_cell_is_no_value_and_an_empty_line_no_record(tmp_path):
    rows = read_all(tmp_path / "a.csv", b"prompt,completion\n\n1,\n\n,2\n")
    assert [row.record for row in rows] == [{"prompt": "1", "completion": None}, {"prompt": None, "completion": "2"}]
    assert [row.where for row in rows] == ["a.csv:3", "a.csv:5"]


def test_a_row_that_does_not_fit_is_told_with_its_line_and_the_next_one_is_read(tmp_path):
    content = b'prompt,completion\n"two\nlines",1\nonly\na,b,c\nnul\0,1\ncaf\xe9,1\n"a"b,c\ngood,row\n'
    rows = read_all(tmp_path / "a.csv", content)
    assert [(row.where, row.record) for row in rows if not row.problem] == [
        ("a.csv:2", {"prompt": "two\nlines", "completion": "1"}),
        ("a.csv:9", {"prompt": "good", "completion": "row"}),
    ]
    problems = {row.where: row.problem for row in rows if row.problem}
    wanted = {
        "a.csv:4": "the row has 1 cells, wanted 2: 'prompt, completion'",
        "a.csv:5": "the row has 3 cells",
        "a.csv:6": "the column 'prompt' has a NUL character",
        "a.csv:7": "the column 'prompt' is not UTF-8: 'caf\\udce9'; save the file as UTF-8",
        "a.csv:8": "not CSV: ",
    }
    assert problems.keys() == wanted.keys()
    assert all(problems[where].startswith(words) for where, words in wanted.items())


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "a.csv has no header"),
        (b"\n\n", "a.csv has no header"),
        (b"a,a\n1,2\n", "has two columns with the name 'a'"),
        (b'""\0\n1\n', "has a header that cannot be read as CSV"),
        (b"caf\xe9,b\n1,2\n", "has a header that is no UTF-8 text"),
        (b'a,b\n1,2\n3,"never\n4,5\n6,7\n', "a quote in the row that begins on line 3 is never closed"),
        (b"\xff\xfea", "a.csv is not UTF-16"),
    ],
)
def test_a_file_that_cannot_be_read_on_is_refused(tmp_path, content, complaint):
    with pytest.raises(DataError, match=complaint):
        read_all(tmp_path / "a.csv", content)


def test_a_cut_archive_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"a\.csv\.gz is damaged or was cut off"):
        read_all(tmp_path / "a.csv.gz", gzip.compress(table([HEADER, *ROWS * 1000]).encode())[:-20])


def test_a_cell_of_a_megabyte_is_read_and_the_limit_of_the_process_stays(tmp_path):
    before = csv.field_size_limit()
    (row,) = read_all(tmp_path / "a.csv", table([HEADER, ("x" * 1_000_000, "1")]).encode())
    assert len(row.record["prompt"]) == 1_000_000
    assert csv.field_size_limit() == before


def test_whatever_the_bytes_are_only_a_data_error_comes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")

    @given(st.one_of(st.binary(max_size=200), st.text('",;\n\r\t\0ab', max_size=60).map(str.encode)))
    def check(content):
        try:
            rows = read_all(folder / "a.csv", content)
        except DataError:
            return
        assert all(isinstance(row.record, dict) for row in rows)

    check()


def test_the_format_key_reads_a_file_of_any_name(tmp_path):
    rows = read_all(tmp_path / "data.txt", table().encode(), format="csv")
    assert [row.record for row in rows] == RECORDS
    assert format_words(DataFile(str(tmp_path / "data.txt"), format="csv")) == "CSV"
    (tmp_path / "b.csv").write_text(table(delimiter=";"))
    assert format_words(DataFile(str(tmp_path / "b.csv"))) == "CSV with semicolons"
    assert content_hash(DataFile(str(tmp_path / "b.csv")))


def test_a_table_needs_the_standard_library_alone(tmp_path):
    (tmp_path / "a.csv").write_text(table())
    code = (
        "import sys\nfrom whet.config.sections import DataFile\nfrom whet_data.readers import read\n"
        f"print(len(list(read(DataFile({str(tmp_path / 'a.csv')!r})))))\n"
        "print(sorted({'datasets', 'pyarrow', 'pandas', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["3", "[]"]
