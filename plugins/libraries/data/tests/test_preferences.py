import pytest

from whet.errors import DataError
from whet.plugins.features import chats
from whet_data.preferences import encode_pair

USER, RIGHT, WRONG = (
    {"role": "user", "content": "6*7?"},
    {"role": "assistant", "content": "42"},
    {"role": "assistant", "content": "43"},
)
MORE = {"role": "user", "content": "sure?"}


@pytest.fixture(scope="module")
def chat(tiny_model_folder):
    return chats().ChatTokenizer(tiny_model_folder)


def shown(chat, record, **names):
    """Return the text of both sequences, that of their prompts, and what is learned."""
    pair = encode_pair(record, chat, names)
    assert [one["chosen"] for one in pair] == [True, False]
    texts = [chat.decode(one["tokens"], skip_special=False) for one in pair]
    prompts = [chat.decode(one["tokens"][: one["prompt_length"]], skip_special=False) for one in pair]
    assert prompts[0] == prompts[1]
    assert pair[0]["prompt_length"] == pair[1]["prompt_length"]
    learned = [chat.decode(one["tokens"][one["loss_mask"]], skip_special=False) for one in pair]
    return texts, prompts[0], learned


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "6*7?", "chosen": "42", "rejected": "43"},
        {"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]},
        {"prompt": "6*7?", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
        {"chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
        {"question": "6*7?", "better": "42", "rejected": "43", "prompt": None},
    ],
)
def test_every_way_to_write_a_pair_is_the_same(chat, record):
    names = {"prompt": "question", "chosen": "better"} if "question" in record else {}
    texts, prompt, learned = shown(chat, record, **names)
    assert prompt == "<|im_start|>user\n6*7?<|im_end|>\n<|im_start|>assistant\n"
    assert texts == [f"{prompt}{response}<|im_end|>\n" for response in ("42", "43")]
    assert learned == ["42<|im_end|>", "43<|im_end|>"]


def test_responses_that_both_share_are_prompt_where_conversations_are_whole(chat):
    start = [USER, RIGHT, MORE]
    yes, no = {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}
    _, prompt, learned = shown(chat, {"chosen": [*start, yes], "rejected": [*start, no]})
    assert "42" in prompt
    assert learned == ["yes<|im_end|>", "no<|im_end|>"]


def test_all_turns_after_a_prompt_are_compared(chat):
    _, _, learned = shown(chat, {"prompt": [USER], "chosen": [RIGHT, MORE, RIGHT], "rejected": [WRONG, MORE, RIGHT]})
    assert learned == ["42<|im_end|>42<|im_end|>", "43<|im_end|>42<|im_end|>"]


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        (
            {"prompt": "x", "chosen": "y"},
            r"columns 'prompt', 'chosen'; wanted `chosen` and `rejected`.*algorithm.fields",
        ),
        ({}, r"columns none"),
        ({"chosen": "y", "rejected": "z"}, "there is no prompt, and a response is a string"),
        ({"chosen": [USER, RIGHT], "rejected": [USER, RIGHT]}, "are the same"),
        (
            {"chosen": [USER, RIGHT], "rejected": [MORE, WRONG]},
            "from message 1 on, where one has user and the other user",
        ),
        ({"chosen": [USER, RIGHT], "rejected": [USER]}, "one has assistant and the other nothing"),
        ({"prompt": "x", "chosen": [USER], "rejected": "y"}, "no message of the assistant"),
        ({"prompt": "x", "chosen": 7, "rejected": "y"}, "found 7"),
    ],
)
def test_records_that_will_not_do_are_refused(chat, record, complaint):
    with pytest.raises(DataError, match=complaint):
        encode_pair(record, chat, {})


def test_graded_solutions_make_pairs(chat, shared_data):
    import json

    with (shared_data / "gsm8k_model_solutions.jsonl").open() as lines:
        row = next(row for row in map(json.loads, lines) if row["175b_verification"]["is_correct"])
    record = {"prompt": row["question"], "chosen": row["175b_verification"]["solution"], "rejected": "A: 0"}
    _, prompt, learned = shown(chat, record)
    assert row["question"] in prompt
    assert learned[0] == record["chosen"] + "<|im_end|>"
