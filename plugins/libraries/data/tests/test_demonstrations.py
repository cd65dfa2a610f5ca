import json

import pytest

from whet.config.sections import DataFile, DataSection
from whet.data.messages import conversation
from whet.errors import DataError
from whet.plan.prepare import look_at_data
from whet.plugins.features import chats
from whet_data.demonstrations import FIELDS, encode, known_fields, record_fields
from whet_data.readers import read

USER, ONE = {"role": "user", "content": "6*7?"}, {"role": "assistant", "content": "42"}
MORE, TWO = {"role": "user", "content": "6*8?"}, {"role": "assistant", "content": "48"}


@pytest.fixture(scope="module")
def chat(tiny_model_folder):
    return chats().ChatTokenizer(tiny_model_folder)


def trained(chat, record, **options) -> str:
    (sequence,) = encode(record, chat, options.pop("fields", {}), **options)
    assert sequence["prompt_length"] == sequence["loss_mask"].argmax()
    return chat.decode(sequence["tokens"][sequence["loss_mask"]], skip_special=False)


def text(chat, record, **options) -> str:
    (sequence,) = encode(record, chat, options.pop("fields", {}), **options)
    return chat.decode(sequence["tokens"], skip_special=False)


def test_conversations_are_trained_on_every_turn_or_the_last(chat):
    record = {"messages": [USER, ONE, MORE, TWO]}
    assert trained(chat, record) == "42<|im_end|>48<|im_end|>"
    assert trained(chat, record, train_on="last") == "48<|im_end|>"


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "6*7?", "completion": "42"},
        {"prompt": [USER], "completion": [ONE]},
        {"prompt": [USER], "completion": "42", "messages": None},
        {"prompt": [USER], "completion": [USER, ONE]},
        {"prompt": "6*7? ", "completion": [USER, ONE]},
    ],
)
def test_prompt_and_completion_are_the_same_as_a_conversation(chat, record):
    assert text(chat, record) == text(chat, {"messages": [USER, ONE]})
    assert trained(chat, record) == "42<|im_end|>"


def test_responses_in_the_prompt_carry_no_loss(chat):
    assert trained(chat, {"prompt": [USER, ONE, MORE], "completion": "48"}) == "48<|im_end|>"
    assert trained(chat, {"prompt": [USER], "completion": [ONE, MORE, TWO]}) == "42<|im_end|>48<|im_end|>"


OUT = {**TWO, "weight": 0}


@pytest.mark.parametrize(
    ("messages", "learned"),
    [
        ([USER, ONE, MORE, {**TWO, "weight": 1, "train": True}], [["42", "48"]]),
        ([USER, ONE, MORE, OUT], [["42"]]),
        ([USER, OUT, MORE, ONE], [["42"]]),
        ([USER, ONE, USER, ONE, MORE, {**TWO, "train": False}, USER, ONE, USER], [["42", "42"], ["42"]]),
        ([USER, OUT, MORE, OUT, USER, ONE], [["42"]]),
        ([USER, {**OUT, "weight": 0.0}, USER, ONE, MORE, {**TWO, "weight": None}], [["42", "48"]]),
        ([{**USER, "weight": 0}, ONE], [["42"]]),
    ],
)
def test_turns_that_a_record_leaves_out_are_not_trained(chat, messages, learned):
    for record in ({"messages": messages}, {"prompt": messages[:1], "completion": messages[1:]}):
        found = encode(record, chat, {})
        texts = [chat.decode(one["tokens"][one["loss_mask"]], skip_special=False) for one in found]
        assert texts == ["".join(f"{turn}<|im_end|>" for turn in turns) for turns in learned]
        for one in found:  # what stands before a trained turn is there, and nothing after the last one
            at = int(one["loss_mask"].nonzero()[0][-1])
            begun = chat.decode(one["tokens"][: at + 1], skip_special=False)
            assert chat.render(conversation(messages)).startswith(begun)


def test_a_column_with_the_system_message_is_in_front_where_there_is_none(chat):
    system = {"role": "system", "content": "Be brief."}
    wanted = text(chat, {"messages": [system, USER, ONE]})
    beside = {"system": "Be brief."}
    assert text(chat, {"messages": [USER, ONE], **beside}) == wanted
    assert text(chat, {"prompt": "6*7?", "completion": "42", **beside}) == wanted
    assert trained(chat, {"prompt": "6*7?", "completion": "42", **beside}) == "42<|im_end|>"
    assert text(chat, {"messages": [system, USER, ONE], "system": "Be long."}) == wanted
    assert text(chat, {"text": "6*7=42", **beside, "image": "a.png"}) == "6*7=42<|im_end|>"
    assert text(chat, {"prompt": "6*7=", "completion": "42", **beside}, plain=True) == "6*7=42<|im_end|>"
    bare = text(chat, {"messages": [USER, ONE], "system": " ", "images": []})
    assert bare == text(chat, {"system": "6*7?", "completion": "42"}, fields={"prompt": "system"})


def test_plain_text_is_trained_on_without_a_template(chat):
    assert text(chat, {"text": "6*7=42"}) == "6*7=42<|im_end|>"
    assert trained(chat, {"text": "6*7=42"}) == "*7=42<|im_end|>"


def test_a_plain_completion_follows_its_prompt_without_a_template(chat):
    record = {"prompt": "6*7=", "completion": "42"}
    assert text(chat, record, plain=True) == "6*7=42<|im_end|>"
    assert trained(chat, record, plain=True) == "42<|im_end|>"
    (sequence,) = encode(record, chat, {}, plain=True)
    assert sequence["tokens"][: sequence["prompt_length"]].tolist() == chat.encode("6*7=").tolist()


def test_where_a_template_rewrites_history_each_turn_is_trained_once_as_the_model_will_write_it(tiny_model_folder):
    forgets = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{{ m['content'] if loop.last else m['content'].split('.')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = chats().ChatTokenizer(tiny_model_folder, forgets)
    thinks = {"role": "assistant", "content": "6*7 is 42.42"}
    first, second = encode({"messages": [USER, thinks, MORE, TWO]}, chat, {})
    learned = [chat.decode(one["tokens"][one["loss_mask"]], skip_special=False) for one in (first, second)]
    assert learned == ["6*7 is 42.42<|im_end|>", "48<|im_end|>"]
    asked = chat.prompt(conversation([USER, thinks, MORE]))
    assert second["tokens"][: second["prompt_length"]].tolist() == asked.tolist()
    assert "6*7 is" not in chat.decode(second["tokens"])
    assert trained(chat, {"messages": [USER, thinks, MORE, TWO]}, train_on="last") == "48<|im_end|>"


OPENS_THE_LAST = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '<think></think>' if m.role == 'assistant' and loop.last }}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ '<think></think>' if thinks is false }}{% endif %}"
)
"""As Qwen 3's: the last turn has a block of reasoning, empty or not; earlier turns have none."""


@pytest.mark.parametrize(("arguments", "opening"), [({}, "<think></think>"), ({"thinks": False}, "")])
def test_a_turn_is_trained_alike_whatever_follows_it(tiny_model_folder, arguments, opening):
    chat = chats().ChatTokenizer(tiny_model_folder, OPENS_THE_LAST, arguments=arguments)
    talk = [USER, ONE, MORE, TWO]
    wanted = [
        (chat.prompt(conversation(talk[:end])).tolist(), f"{opening}{said}<|im_end|>")
        for end, said in ((1, "42"), (3, "48"))
    ]
    for messages, learned in (
        (talk[:2], wanted[:1]),
        (talk[:3], wanted[:1]),
        (talk, wanted),
        ([*talk, USER], wanted),
        ([*talk[:3], OUT], wanted[:1]),
        ([USER, {**ONE, "weight": 0}, MORE, TWO, USER], wanted[1:]),
    ):
        for record in ({"messages": messages}, {"prompt": messages[:1], "completion": messages[1:]}):
            assert prompted(chat, encode(record, chat, {})) == learned
    for messages, learned in ((talk[:3], wanted[:1]), ([*talk, USER], wanted[1:])):
        assert prompted(chat, encode({"messages": messages}, chat, {}, train_on="last")) == learned


def prompted(chat, found):
    """Return the tokens before each trained turn, and its text."""
    return [
        (
            one["tokens"][: one["prompt_length"]].tolist(),
            chat.decode(one["tokens"][one["loss_mask"]], skip_special=False),
        )
        for one in found
    ]


def test_turns_that_stand_unchanged_share_a_sequence_however_many_do(tiny_model_folder):
    """Each question of a user drops the reasoning before it, so answers to one question share a sequence."""
    rewrites = (
        "{% set ns = namespace(asked=0, seen=0) %}"
        "{% for m in messages if m.role == 'user' %}{% set ns.asked = ns.asked + 1 %}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.seen = ns.seen + 1 %}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ '~' if m.role == 'assistant' and ns.seen == ns.asked }}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = chats().ChatTokenizer(tiny_model_folder, rewrites)
    tool = {"role": "tool", "content": "7"}
    counts = (1, 5, 2, 8, 1, 3)
    talk = [message for count in counts for message in (USER, *[ONE, tool] * count)]
    found = encode({"messages": talk}, chat, {})
    texts = [chat.decode(one["tokens"][one["loss_mask"]], skip_special=False) for one in found]
    assert texts == ["~42<|im_end|>" * count for count in counts]


def test_fields_may_have_other_names(chat):
    record = {"question": "6*7?", "answer": "42", "prompt": 7}
    assert trained(chat, record, fields={"prompt": "question", "completion": "answer"}) == "42<|im_end|>"


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        (
            {"question": "x"},
            r"columns 'question'; wanted `messages`, or `prompt` and `completion`, or `text`.*algorithm.fields",
        ),
        ({}, r"columns none; wanted .*algorithm.fields\)$"),
        ({"chosen": "y", "rejected": "z"}, "wanted `messages`.* are for algorithms that read preferences, such as dpo"),
        ({"prompt": "x"}, r"columns 'prompt'"),
        ({"messages": [USER]}, "no message of the assistant"),
        ({"messages": []}, "no message of the assistant"),
        ({"messages": 7}, "^the column 'messages' must be text or a list of messages, found the number 7; write it as"),
        ({"prompt": "x", "completion": []}, "no message of the assistant"),
        ({"prompt": "x", "completion": 7}, "^the column 'completion' must be text or a list of messages, found the n"),
        ({"text": ""}, "not empty"),
        ({"messages": [USER, OUT]}, "each message of the assistant has `weight: 0` or `train: false`"),
        ({"messages": [USER, {**ONE, "weight": 2}]}, "the `weight` of a message is 2, wanted 0 or 1"),
        ({"messages": [USER, {**ONE, "train": "no"}]}, "the key `train` of a message is 'no', wanted true or false"),
        ({"messages": [USER, ONE], "system": 7}, "the column `system` is 7, wanted text"),
        ({"messages": [USER, ONE], "image": "a.png"}, "the column `image` has images"),
        ({"text": ["x"]}, "must be a string"),
        ({"prompt": [USER, ONE], "completion": " and more"}, "prompt ends in a message of the assistant, and the resp"),
        ({"prompt": [USER, ONE], "completion": [ONE, USER, ONE]}, "put what the assistant began into the response"),
    ],
)
def test_records_that_will_not_do_are_refused(chat, record, complaint):
    with pytest.raises(DataError, match=complaint):
        encode(record, chat, {})


def test_the_last_turn_is_trained_or_the_record_refused(chat):
    assert trained(chat, {"messages": [USER, OUT, MORE, ONE]}, train_on="last") == "42<|im_end|>"
    with pytest.raises(DataError, match="the last message of the assistant has `weight: 0`"):
        encode({"messages": [USER, ONE, MORE, OUT]}, chat, {}, train_on="last")


@pytest.mark.parametrize("record", [{"prompt": [USER], "completion": "y"}, {"prompt": "", "completion": "y"}])
def test_plain_prompts_are_text(chat, record):
    with pytest.raises(DataError, match="must be a string that is not empty"):
        encode(record, chat, {}, plain=True)


def test_unknown_fields_in_the_config_are_refused():
    with pytest.raises(ValueError, match="names question, wanted messages, prompt, completion, text"):
        known_fields(FIELDS)(None, None, {"question": "prompt"})


def test_gsm8k_can_be_trained_on(chat, shared_data):
    names = {"prompt": "question", "completion": "answer"}
    rows = list(read(DataFile(str(shared_data / "gsm8k_train.jsonl"), limit=50)))
    for row in rows:
        (sequence,) = encode(row.record, chat, names)
        assert chat.decode(sequence["tokens"][sequence["loss_mask"]]) == row.record["answer"]


@pytest.mark.parametrize(
    ("record", "fields", "lacks"),
    [
        ({"text": "a"}, {}, ""),
        ({"prompt": "a", "completion": "b"}, {}, ""),
        ({"question": "a", "answer": "b"}, {"prompt": "question", "completion": "answer"}, ""),
        ({"question": "a", "answer": "b"}, {}, "`messages`, or `prompt` and `completion`, or `text`"),
        ({"prompt": "a"}, {}, "`messages`, or `prompt` and `completion`, or `text`"),
    ],
)
def test_the_fields_that_check_looks_for_are_those_that_are_read(tmp_path, record, fields, lacks):
    (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
    section = DataSection([DataFile(str(tmp_path / "data.jsonl"))])
    found = [str(problem) for problem in look_at_data(section, record_fields(fields))[0]]
    assert [f"wanted {lacks}; `fields` says" in problem for problem in found] == [True] * bool(lacks)
