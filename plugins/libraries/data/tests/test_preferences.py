import pytest

from whet.errors import DataError
from whet.plugins.features import chats
from whet_data.preferences import encode_pair, pair_texts

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
        {"prompt": "6*7? ", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
        {"prompt": "", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
        {"prompt": [], "chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
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


SYSTEM, YES, NO = (
    {"role": "system", "content": "Be brief."},
    {"role": "assistant", "content": "yes"},
    {"role": "assistant", "content": "no"},
)


@pytest.mark.parametrize(
    ("prompt", "start", "whole"),
    [
        ("6*7?", [SYSTEM, USER], [SYSTEM, USER]),
        ("sure?", [USER, RIGHT, MORE], [USER, RIGHT, MORE]),
        ("6*7?", [SYSTEM, USER, RIGHT, MORE], [SYSTEM, USER, RIGHT, MORE]),
        ([SYSTEM, USER], [USER], [SYSTEM, USER]),
        ([SYSTEM, {"role": "user", "content": "6*7? "}], [USER], [SYSTEM, USER]),
        ([USER, RIGHT, MORE], [MORE], [USER, RIGHT, MORE]),
        ([USER, RIGHT], [MORE], [USER, RIGHT, MORE]),
        ([SYSTEM], [USER], [SYSTEM, USER]),
        ([SYSTEM, USER], [], [SYSTEM, USER]),
    ],
)
def test_no_message_of_a_prompt_beside_whole_conversations_comes_twice(chat, prompt, start, whole):
    wanted = shown(chat, {"chosen": [*whole, YES], "rejected": [*whole, NO]})
    assert shown(chat, {"prompt": prompt, "chosen": [*start, YES], "rejected": [*start, NO]}) == wanted


@pytest.mark.parametrize(("prompt", "start"), [("6*7?", [USER, RIGHT, MORE]), ([USER], [RIGHT, MORE])])
def test_turns_that_both_share_are_no_response(chat, prompt, start):
    _, asked, learned = shown(chat, {"prompt": prompt, "chosen": [*start, YES], "rejected": [*start, NO]})
    assert "42" in asked
    assert learned == ["yes<|im_end|>", "no<|im_end|>"]


def test_a_turn_that_both_share_is_a_response_where_one_has_no_other(chat):
    _, _, learned = shown(chat, {"prompt": "6*7?", "chosen": [RIGHT], "rejected": [RIGHT, MORE, NO]})
    assert learned == ["42<|im_end|>", "42<|im_end|>no<|im_end|>"]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "6*7?", "chosen": "42", "rejected": "43"},
        {"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]},
        {"chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
        {"prompt": "6*7?", "chosen": [SYSTEM, USER, RIGHT], "rejected": [SYSTEM, USER, WRONG], "system": "No."},
    ],
)
def test_a_column_with_the_system_message_is_in_front(chat, record):
    wanted = shown(chat, {"chosen": [SYSTEM, USER, RIGHT], "rejected": [SYSTEM, USER, WRONG]})
    assert shown(chat, {"system": "Be brief.", **record}) == wanted


def test_texts_are_compared_without_a_template(chat):
    pair = encode_pair({"prompt": "6*7=", "chosen": "42", "rejected": "43"}, chat, {}, plain=True)
    assert [chat.decode(one["tokens"], skip_special=False) for one in pair] == ["6*7=42<|im_end|>", "6*7=43<|im_end|>"]
    assert [chat.decode(one["tokens"][one["loss_mask"]]) for one in pair] == ["42", "43"]


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("Human: a\n\nAssistant: I do.", "Human: a\n\nAssistant: No.", "Human: a\n\nAssistant:"),
        ("a: black", "a: blue", "a:"),
        ("a: it is", "a: it was", "a: it"),
        ("a:\n\nyes", "a:\n\nno", "a:\n\n"),
        ("a: b", "a: b c", "a:"),
        ("a b", "a, b", None),
        ("a ", "b ", None),
        ("a\n", "a\nb", None),
        ("a b", "a b", None),
    ],
)
def test_the_prompt_of_two_texts_is_what_they_begin_with_up_to_a_word(chosen, rejected, prompt):
    record = {"chosen": chosen, "rejected": rejected}
    if prompt is None:
        with pytest.raises(DataError, match=r"wanted|must be"):
            pair_texts(record, {})
        return
    assert pair_texts(record, {}) == (prompt, chosen[len(prompt) :], rejected[len(prompt) :])


@pytest.mark.parametrize(
    "record", [{"chosen": [USER, RIGHT], "rejected": [USER, WRONG]}, {"chosen": "a", "rejected": ""}]
)
def test_plain_pairs_are_texts(chat, record):
    with pytest.raises(DataError, match="must be a string that is not empty"):
        encode_pair(record, chat, {}, plain=True)


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
        (
            {"c": "y", "chosen": "y", "rejected": "z"},
            r"there is no prompt, and a response is a string; .* columns 'c', 'chosen', 'rejected'; .*algorithm.fields",
        ),
        ({"chosen": [USER, RIGHT], "rejected": [USER, RIGHT]}, "are the same"),
        ({"prompt": "6*7?", "chosen": [USER, RIGHT], "rejected": [USER, RIGHT]}, "are the same"),
        ({"prompt": "sure?", "chosen": [USER, RIGHT], "rejected": [USER, RIGHT]}, "are the same"),
        ({"prompt": "6*7?", "chosen": "42", "rejected": [RIGHT]}, "are the same"),
        (
            {"chosen": [USER, RIGHT], "rejected": [MORE, WRONG]},
            "from message 1 on, where one has user and the other user",
        ),
        ({"chosen": [USER, RIGHT], "rejected": [USER]}, "one has assistant and the other nothing"),
        (
            {"prompt": "x", "chosen": [USER], "rejected": "y"},
            "one response is a whole conversation that begins otherwise than the",
        ),
        ({"prompt": "x", "chosen": [USER], "rejected": [RIGHT]}, "one response is a whole conversation"),
        ({"prompt": "6*7?", "chosen": [USER, RIGHT], "rejected": [MORE, WRONG]}, "one response is a whole conver"),
        ({"prompt": "x", "chosen": [{**RIGHT, "weight": 0}], "rejected": "y"}, "`weight: 0` or `train: false`"),
        ({"chosen": [USER, RIGHT], "rejected": [USER, {**WRONG, "train": False}]}, "`weight: 0` or `train: false`"),
        ({"prompt": "x", "chosen": "y", "rejected": "z", "images": ["a"]}, "`images` has images"),
        ({"prompt": "x", "chosen": "y", "rejected": "z", "system": 7}, "`system` is 7, wanted text"),
        ({"prompt": "x", "chosen": 7, "rejected": "y"}, "^the column 'chosen' must be text or a list of .* number 7"),
        ({"prompt": [USER, RIGHT], "chosen": "y", "rejected": "z"}, "the prompt ends in a message of the assistant"),
        ({"prompt": [USER, RIGHT], "chosen": [YES], "rejected": [NO]}, "the prompt ends in a message of the assistant"),
    ],
)
def test_records_that_will_not_do_are_refused(chat, record, complaint):
    with pytest.raises(DataError, match=complaint):
        encode_pair(record, chat, {})


@pytest.mark.parametrize("prompt", [{}, {"prompt": "6*7="}])
def test_responses_that_are_the_same_are_refused_in_the_same_words_with_a_prompt_or_without(chat, prompt):
    words = "the chosen and the rejected response are the same; wanted two that differ"
    for options, said in (({"plain": True}, "a 42"), ({}, [USER, RIGHT])):
        with pytest.raises(DataError, match=words):
            encode_pair({**prompt, "chosen": said, "rejected": said}, chat, {}, **options)


OPENS_THE_LAST = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '<think></think>' if m.role == 'assistant' and loop.last }}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_responses_are_compared_in_the_form_in_which_the_model_writes_them_or_refused(tiny_model_folder):
    chat = chats().ChatTokenizer(tiny_model_folder, OPENS_THE_LAST)
    long = [RIGHT, MORE, YES]
    with pytest.raises(DataError, match=r"rewrites history.*in pairs with a prompt that holds all turns but the last"):
        encode_pair({"prompt": [USER], "chosen": long, "rejected": [WRONG]}, chat, {})
    for prompt, chosen, learned in (([USER, *long[:2]], YES, "yes"), ([USER], RIGHT, "42")):
        for after in ([], [MORE]):
            _, _, found = shown(chat, {"prompt": prompt, "chosen": [chosen, *after], "rejected": [NO]})
            assert found == [f"<think></think>{said}<|im_end|>" for said in (learned, "no")]


def test_reasoning_of_an_earlier_trained_turn_that_the_template_leaves_out_is_refused(chat):
    thinks = {**RIGHT, "reasoning_content": "Six sevens."}
    for chosen in ([thinks], [thinks, MORE, YES], [thinks, MORE]):
        with pytest.raises(DataError, match=r"leaves out the reasoning 'Six sevens\.'"):
            encode_pair({"prompt": [USER], "chosen": chosen, "rejected": [NO]}, chat, {})
    encode_pair({"prompt": [USER, thinks, MORE], "chosen": [YES], "rejected": [NO]}, chat, {})


def test_graded_solutions_make_pairs(chat, shared_data):
    import json

    with (shared_data / "gsm8k_model_solutions.jsonl").open() as lines:
        row = next(row for row in map(json.loads, lines) if row["175b_verification"]["is_correct"])
    record = {"prompt": row["question"], "chosen": row["175b_verification"]["solution"], "rejected": "A: 0"}
    _, prompt, learned = shown(chat, record)
    assert row["question"] in prompt
    assert learned[0] == record["chosen"] + "<|im_end|>"
