"""Records of other frameworks are recognised by their columns, and brought into those that algorithms read."""

import csv
import json
import re

import pytest

from whet.config.sections import DataFile
from whet.plugins.features import chats
from whet_data.demonstrations import encode
from whet_data.layouts import found_words, layout_of, recognise, records
from whet_data.preferences import encode_pair

SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": "hello"},
        {"from": "human", "value": "6*7?"},
        {"from": "gpt", "value": "42"},
    ],
    "system": "Be brief.",
}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "6*7?"},
    {"role": "assistant", "content": "42"},
]


@pytest.fixture
def laid_out(tmp_path):
    """Read records of a file of JSON lines as an algorithm would."""

    def laid_out(*given, names=None, **options):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in given))
        return list(records(DataFile(str(tmp_path / "a.jsonl"), **options), names or {}))

    return laid_out


def one(rows):
    (row,) = rows
    assert not row.problem, row.problem
    return row.record


def test_sharegpt_becomes_messages(laid_out):
    assert one(laid_out(SHAREGPT))["messages"] == MESSAGES
    own = {"conversations": [{"from": "system", "value": "Be brief."}, *SHAREGPT["conversations"]]}
    assert one(laid_out(own))["messages"] == MESSAGES
    assert one(laid_out({"conversations": MESSAGES}))["messages"] == MESSAGES


@pytest.mark.parametrize(
    ("speaker", "role"), [("user", "user"), ("assistant", "assistant"), ("tool", "tool"), ("observation", "tool")]
)
def test_every_name_of_a_speaker_has_its_role(laid_out, speaker, role):
    found = one(laid_out({"conversations": [{"from": speaker, "value": "x"}]}))
    assert found["messages"] == [{"role": role, "content": "x"}]


def test_turns_under_another_name_and_as_text_are_read(laid_out):
    turns = SHAREGPT["conversations"]
    assert one(laid_out({"dialog": turns}, fields={"conversations": "dialog"}))["messages"] == MESSAGES[1:]
    assert one(laid_out({"dialog": turns}, fields={"messages": "dialog"}))["messages"] == MESSAGES[1:]
    assert one(laid_out({"dialog": turns}, names={"messages": "dialog"}))["dialog"] == MESSAGES[1:]
    assert one(laid_out({"conversations": json.dumps(turns)}))["messages"] == MESSAGES[1:]
    assert one(laid_out({"messages": json.dumps(MESSAGES)}))["messages"] == MESSAGES


RESPONSES = ("prompt", "completion", "chosen", "rejected")


@pytest.fixture
def of_table(tmp_path):
    """Read one record of a CSV file as an algorithm would."""

    def of_table(record, **options):
        with (tmp_path / "a.csv").open("w", newline="") as file:
            csv.writer(file).writerows([record, record.values()])
        return one(records(DataFile(str(tmp_path / "a.csv"), **options), {}))

    return of_table


@pytest.mark.parametrize("column", RESPONSES)
def test_turns_as_the_text_of_a_tables_cell_are_read(of_table, column):
    turns = SHAREGPT["conversations"]
    assert of_table({column: json.dumps(MESSAGES)})[column] == MESSAGES
    assert of_table({column: json.dumps(turns)})[column] == MESSAGES[1:]
    other = json.dumps([{"role": "host", "content": "web1"}])  # a text that a model is to write
    for text in (other, "[1]", "[2", '["a"]', '[{"a": 1}]', "[]"):
        assert of_table({column: text})[column] == text


@pytest.mark.parametrize("ending", ["parquet", "saved"])
def test_turns_as_text_are_read_in_every_kind_of_table(tmp_path, ending):
    rows = {column: [json.dumps(MESSAGES)] for column in RESPONSES}
    if ending == "parquet":
        pytest.importorskip("pyarrow.parquet").write_table(
            pytest.importorskip("pyarrow").table(rows), tmp_path / "a.parquet"
        )
    else:
        pytest.importorskip("datasets").Dataset.from_dict(rows).save_to_disk(tmp_path / "a.saved")
    assert one(records(DataFile(str(tmp_path / f"a.{ending}")), {})) == dict.fromkeys(RESPONSES, MESSAGES)


@pytest.mark.parametrize("turns", [MESSAGES, SHAREGPT["conversations"]])
def test_a_text_of_json_lines_stays_text_though_it_is_json(laid_out, tmp_path, turns):
    record = dict.fromkeys(RESPONSES, json.dumps(turns))
    assert one(laid_out(record)) == record
    (tmp_path / "list.json").write_text(json.dumps([record]))
    (tmp_path / "lines.txt").write_text(json.dumps(record))
    assert one(records(DataFile(str(tmp_path / "list.json")), {})) == record
    assert one(records(DataFile(str(tmp_path / "lines.txt"), format="jsonl"), {})) == record


def test_the_text_of_a_cell_counts_without_a_chat_template(of_table, tiny_model_folder):
    chat, text = chats().ChatTokenizer(tiny_model_folder), json.dumps(MESSAGES)
    turns = json.dumps(SHAREGPT["conversations"])
    for written in (text, turns):
        record = of_table({"prompt": written, "completion": written})
        (found,) = encode(record, chat, {}, plain=True)
        assert chat.decode(found["tokens"], skip_special=False) == f"{written}{written}<|im_end|>"
        pair = of_table({"prompt": written, "chosen": written, "rejected": "no"})
        chosen, _ = encode_pair(pair, chat, {}, plain=True)
        assert chat.decode(chosen["tokens"][chosen["loss_mask"]], skip_special=False) == f"{written}<|im_end|>"


def test_an_object_of_lists_is_the_list_of_messages_that_it_was(laid_out, tmp_path, tiny_model_folder):
    """`Sequence` of the library `datasets` stores a list of objects so."""
    plain = {"role": [m["role"] for m in MESSAGES], "content": [m["content"] for m in MESSAGES], "weight": None}
    talk = SHAREGPT["conversations"]
    shared = {"from": [turn["from"] for turn in talk], "value": [turn["value"] for turn in talk]}
    assert one(laid_out({"messages": plain}))["messages"] == MESSAGES
    assert one(laid_out({"messages": shared}))["messages"] == MESSAGES[1:]
    assert one(laid_out({"conversations": shared}))["messages"] == MESSAGES[1:]
    assert one(laid_out({"conversations": plain}))["messages"] == MESSAGES
    for column in RESPONSES:
        assert one(laid_out({column: plain}))[column] == MESSAGES
    datasets = pytest.importorskip("datasets")
    fields = {"role": datasets.Value("string"), "content": datasets.Value("string"), "weight": datasets.Value("int64")}
    kept = [{**message, "weight": int(message["content"] != "hello")} for message in MESSAGES]
    stored = {name: [message[name] for message in kept] for name in fields}
    sequence = datasets.Features({"messages": datasets.Sequence(fields)})
    datasets.Dataset.from_dict({"messages": [stored]}, features=sequence).save_to_disk(tmp_path / "saved")
    record = one(records(DataFile(str(tmp_path / "saved")), {}))
    assert record["messages"] == kept
    chat = chats().ChatTokenizer(tiny_model_folder)
    (found,) = encode(record, chat, {})
    assert chat.decode(found["tokens"][found["loss_mask"]], skip_special=False) == "42<|im_end|>"


def test_a_turn_keeps_whether_it_is_trained_on(laid_out):
    turns = [{**turn, "weight": 0, "train": None} for turn in SHAREGPT["conversations"]]
    assert one(laid_out({"conversations": turns}))["messages"] == [{**turn, "weight": 0} for turn in MESSAGES[1:]]
    called = [MESSAGES[1], {"role": "assistant", "tool_calls": []}]
    assert one(laid_out({"conversations": called}))["messages"] == called


def test_a_column_beside_the_conversation_is_gone_where_its_file_gives_it_another_meaning(laid_out):
    record = {"system": "6*7?", "answer": "42"}
    fields = {"prompt": "system", "completion": "answer"}
    assert one(laid_out(record, fields=fields)) == {"answer": "42", "prompt": "6*7?", "completion": "42"}
    assert one(laid_out(record, fields={"system": "answer"}))["system"] == "42"
    assert one(laid_out(record, fields={"text": "system"}, names={"prompt": "system"}))["system"] == "6*7?"


def test_alpaca_becomes_prompt_and_completion(laid_out):
    record = {"instruction": "Add.", "input": "1+1", "output": "2"}
    assert one(laid_out(record)) == {**record, "prompt": "Add.\n\n1+1", "completion": "2"}
    assert one(laid_out({**record, "input": ""}))["prompt"] == "Add."
    assert one(laid_out({"instruction": "Add.", "output": "2"}))["prompt"] == "Add."
    found = one(laid_out({**record, "system": "Be brief.", "history": [["hi", "hello"]]}))
    assert found["prompt"] == [*MESSAGES[:3], {"role": "user", "content": "Add.\n\n1+1"}]


def test_pairs_of_both_kinds_become_a_prompt_and_two_responses(laid_out):
    asked = {"conversations": [{"from": "human", "value": "6*7?"}]}
    answers = {"chosen": {"from": "gpt", "value": "42"}, "rejected": {"from": "gpt", "value": "41"}}
    said = {key: [{"role": "assistant", "content": text}] for key, text in (("chosen", "42"), ("rejected", "41"))}
    plain = {"prompt": "6*7?", "chosen": "42", "rejected": "41"}
    for record, wanted in (
        ({**asked, **answers}, {"prompt": [MESSAGES[3]], **said}),
        ({"instruction": "6*7?", "chosen": "42", "rejected": "41"}, plain),
    ):
        found = one(laid_out(record))
        assert {key: found[key] for key in wanted} == wanted


def test_a_column_that_the_config_gives_another_meaning_shows_nothing(laid_out):
    record = {"instruction": "Add.", "input": "1+1", "output": "2"}
    for options in (
        {"names": {"prompt": "instruction"}},
        {"fields": {"prompt": "instruction", "completion": "output"}},
    ):
        assert one(laid_out(record, **options)).get("prompt", record["instruction"]) == "Add."
    assert one(laid_out(record, layout="plain")) == record
    both = {**SHAREGPT, "messages": MESSAGES[3:]}
    assert one(laid_out(both))["messages"] == MESSAGES[3:]


@pytest.mark.parametrize(
    ("record", "options"),
    [
        ({"prompt": "p", "completion": "c", "instruction": "i", "output": "o"}, {}),
        ({"prompt": "p", "chosen": "c", "rejected": "r", "instruction": "i", "output": "o"}, {}),
        ({"prompt": "p", "completion": "c", "conversations": SHAREGPT["conversations"]}, {}),
        ({"p": "p", "c": "c", "instruction": "i", "output": "o"}, {"names": {"prompt": "p", "completion": "c"}}),
    ],
)
def test_columns_that_algorithms_read_as_they_are_are_not_replaced(laid_out, record, options):
    assert one(laid_out(record, **options)) == record


def test_empty_columns_show_nothing(laid_out, tmp_path):
    """Tables and joined data sets have every column in every record."""
    empty = dict.fromkeys(("messages", "prompt", "completion", "text", "chosen", "rejected", "history", "system"))
    alpaca = {"instruction": "Add.", "input": None, "output": "2"}
    turns = [{**turn, "role": None, "content": None} for turn in SHAREGPT["conversations"]]
    rows = laid_out({**empty, **SHAREGPT}, {**empty, **alpaca}, {**empty, "conversations": turns})
    assert not [row.problem for row in rows if row.problem]
    talk, task, joined = (row.record for row in rows)
    assert (talk["messages"], talk["prompt"]) == (MESSAGES, None)
    assert (task["prompt"], task["completion"]) == ("Add.", "2")
    assert joined["messages"] == MESSAGES[1:]
    words = recognise(DataFile(str(tmp_path / "a.jsonl")), {}).words
    assert words.endswith("; Alpaca: `prompt` and `completion`; ShareGPT: `messages`")


def test_what_a_file_says_of_its_columns_comes_before_what_the_algorithm_says(laid_out):
    names = {"prompt": "question", "completion": "answer"}
    found = one(laid_out({"q": "1", "a": "2"}, names=names, fields={"prompt": "q", "completion": "a"}))
    assert (found["question"], found["answer"]) == ("1", "2")
    found = one(laid_out({"instruction": "Add.", "output": "2"}, names=names))
    assert (found["question"], found["answer"]) == ("Add.", "2")


def test_labels_and_margins_that_are_text_are_read(laid_out):
    rows = laid_out(*({"label": label} for label in ("true", "No", "1", "maybe", "1.0", "0.0")))
    assert [row.record["label"] for row in rows] == [True, False, True, "maybe", True, False]
    assert one(laid_out({"margin": "0.5"}))["margin"] == 0.5
    assert one(laid_out({"good": "yes"}, names={"label": "good"}))["good"] is True


@pytest.mark.parametrize(
    ("record", "options", "complaint"),
    [
        ({"conversations": [{"from": "bing", "value": "x"}]}, {}, "`from` 'bing', wanted one of human, user, gpt"),
        ({"conversations": [{"from": "gpt", "value": 3}]}, {}, "the `value` of a turn is 3, wanted text"),
        ({"conversations": [{"from": [], "value": "x"}]}, {}, r"`from` \[\]"),
        ({"text": "x"}, {"layout": "sharegpt"}, "`conversations` is None, wanted a list of turns"),
        (
            {"instruction": 5, "output": "x"},
            {},
            "`instruction` is 5, wanted text; the record has 'instruction', 'output'",
        ),
        ({"instruction": "x", "output": "y", "history": [["a"]]}, {}, r"`history` has \['a'\], wanted pairs"),
        ({"instruction": "x", "output": "y", "history": 5}, {}, "`history` is 5, wanted a list of pairs"),
        ({"instruction": "x", "output": "y", "history": "ab"}, {}, "`history` is 'ab', wanted a list of pairs"),
        ({"instruction": "x", "output": "y", "history": {"a": "b"}}, {}, "`history` is {'a': 'b'}, wanted a list of"),
        ({"instruction": "x", "output": "y", "system": 7}, {}, "`system` is 7, wanted text"),
        ({"messages": "[1, "}, {}, "`messages` is text that is no JSON list of messages"),
        ({"messages": "[" * 100_000}, {}, "`messages` is text that is no JSON list of messages"),
        ({"messages": '[{"role": "user", "content": "\\ud800"}]'}, {}, "`messages` is text .* half of a character"),
    ],
)
def test_a_record_that_does_not_fit_its_layout_is_told(laid_out, record, options, complaint):
    (row,) = laid_out(record, **options)
    assert (row.where, row.record) == ("a.jsonl:1", {})
    assert re.search(complaint, row.problem)


def test_what_is_recognised_is_put_into_words(laid_out, tmp_path):
    file = DataFile(str(tmp_path / "a.jsonl"), fields={"prompt": "gone"})
    laid_out(SHAREGPT, {"instruction": "x", "output": "y"})
    seen = recognise(file, {})
    assert seen.words == (
        "JSON lines; columns conversations, system, instruction, output; "
        "Alpaca: `prompt` and `completion`; ShareGPT: `messages`"
    )
    assert seen.missing == ("gone",)
    laid_out({"a\x1b[31m": 1})
    assert "columns a\\x1b[31m" in recognise(DataFile(str(tmp_path / "a.jsonl")), {}).words


def test_columns_in_words_name_those_that_are_empty_and_are_short():
    assert found_words({"a": 1, "b": None}) == "'a', 'b' (empty)"
    assert found_words({}) == "none"
    assert len(found_words({"x" * 1000 + str(i): 1 for i in range(1000)})) < 1000


def test_the_layout_that_a_config_states_counts():
    assert layout_of({"text": "x"}, DataFile("a", layout="alpaca"), {}) == "alpaca"
    assert layout_of(SHAREGPT, DataFile("a", layout="plain"), {}) == "plain"
