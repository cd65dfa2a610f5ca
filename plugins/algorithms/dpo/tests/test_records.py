import pytest
from attrs import evolve

from whet.data.model_info import ModelInfo
from whet.errors import DataError
from whet_chat.tokenizer import ChatTokenizer
from whet_data.preferences import encode_pair
from whet_dpo.config import DpoConfig, KtoConfig, dpo_facts, kto_facts
from whet_dpo.records import encode_labelled, encode_with_prompt, labelled_encoder, pair_encoder


@pytest.fixture(scope="module")
def chat(tiny_model_folder):
    return ChatTokenizer(tiny_model_folder)


@pytest.mark.parametrize(("label", "desirable"), [(True, True), (False, False), (1, True), (0.0, False)])
def test_a_labelled_response_is_one_sequence(chat, label, desirable):
    (one,) = encode_labelled({"question": "6*7?", "completion": "42", "label": label}, chat, {"prompt": "question"})
    assert one["desirable"] is desirable
    assert chat.decode(one["tokens"][one["loss_mask"]], skip_special=False) == "42<|im_end|>"
    assert one["prompt_length"] == one["loss_mask"].argmax()


@pytest.mark.parametrize(
    ("config", "encoder", "record"),
    [
        (DpoConfig(fields={"tools": "functions"}), pair_encoder, {"chosen": "4", "rejected": "5"}),
        (KtoConfig(fields={"tools": "functions"}), labelled_encoder, {"chosen": "4", "rejected": "5"}),
        (KtoConfig(fields={"tools": "functions"}), labelled_encoder, {"completion": "4", "label": True}),
    ],
)
def test_the_column_of_the_tools_can_have_another_name(tiny_model_folder, config, encoder, record):
    chat, info = ChatTokenizer(tiny_model_folder, TOOLS_FIRST), ModelInfo("")
    record = {"prompt": "2+2?", **record}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    wanted = encoder(evolve(config, fields={}), info)({**record, "tools": tools}, chat)
    found = encoder(config, info)({**record, "functions": tools, "tools": [{"name": "other"}]}, chat)
    assert [one["tokens"].tolist() for one in found] == [one["tokens"].tolist() for one in wanted]
    assert "add" in chat.decode(found[0]["tokens"])


TOOLS_FIRST = (
    "{{ tools }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED, SAID = {"role": "user", "content": "6*7?"}, {"role": "assistant", "content": "42"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [SYSTEM, ASKED, SAID]},
        {"messages": [ASKED, SAID], "system": "Be brief."},
        {"prompt": "6*7?", "completion": "42", "system": "Be brief."},
        {"prompt": "6*7?", "completion": [SYSTEM, ASKED, SAID]},
        {"prompt": [SYSTEM, ASKED], "completion": [ASKED, SAID]},
    ],
)
def test_a_whole_conversation_with_a_label_states_its_prompt(chat, record):
    (wanted,) = encode_labelled({"prompt": [SYSTEM, ASKED], "completion": "42", "label": True}, chat, {})
    (found,) = encode_labelled({**record, "label": True}, chat, {})
    assert found["tokens"].tolist() == wanted["tokens"].tolist()
    assert found["loss_mask"].tolist() == wanted["loss_mask"].tolist()


def test_earlier_turns_of_a_labelled_conversation_are_its_prompt(chat):
    more = [ASKED, {"role": "assistant", "content": "43"}, ASKED, SAID]
    for record in ({"messages": more}, {"prompt": "7", "completion": more}):
        (found,) = encode_labelled({**record, "label": 1}, chat, {})
        assert chat.decode(found["tokens"][found["loss_mask"]], skip_special=False) == "42<|im_end|>"


@pytest.mark.parametrize(
    ("config", "record"),
    [
        (KtoConfig(plain=True), {"prompt": "6*7=", "completion": "42", "label": True}),
        (KtoConfig(plain=True), {"chosen": "6*7 = 42", "rejected": "6*7 = 43"}),
        (DpoConfig(plain=True), {"prompt": "6*7=", "chosen": "42", "rejected": "43"}),
        (DpoConfig(plain=True), {"chosen": "6*7 = 42", "rejected": "6*7 = 43"}),
    ],
)
def test_texts_are_trained_on_without_a_template(chat, config, record):
    encoder = pair_encoder if isinstance(config, DpoConfig) else labelled_encoder
    found = encoder(config, ModelInfo(""))(record, chat)
    assert all("im_start" not in chat.decode(one["tokens"], skip_special=False) for one in found)
    assert chat.decode(found[0]["tokens"][found[0]["loss_mask"]]).strip() == "42"


def test_a_chosen_text_may_be_learned_whole(chat):
    chosen, _ = encode_with_prompt({"chosen": "6*7 = 42", "rejected": "6*7 = 43"}, chat, {}, plain=True)
    assert chat.decode(chosen["tokens"][chosen["loss_mask"]]) == "*7 = 42"


def test_a_pair_is_a_desirable_response_and_another(chat):
    pair = encode_labelled({"prompt": "6*7?", "chosen": "42", "rejected": "43"}, chat, {})
    assert [one["desirable"] for one in pair] == [True, False]
    assert all("chosen" not in one for one in pair)


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"prompt": "x", "completion": "y"}, r"`label`, or `messages` and `label`, or the fields of a pair"),
        ({"messages": [ASKED, {**SAID, "weight": 0}], "label": 1}, "`weight: 0` or `train: false`"),
        ({"messages": [ASKED], "label": 1}, "no message of the assistant"),
        ({"prompt": "x", "completion": "y", "label": 0.5}, "the label is 0.5, wanted true"),
        ({"prompt": "x", "completion": "y", "label": "good"}, "the label is 'good', wanted true"),
        ({"prompt": "x", "completion": "y", "label": 2}, "the label is 2"),
        ({"prompt": "x", "completion": 7, "label": 1}, "^the column 'completion' must be text or a list of messages"),
        ({"prompt": "x", "chosen": "y"}, "wanted `chosen` and `rejected`"),
        ({}, "columns none"),
    ],
)
def test_records_that_will_not_do_are_refused(chat, record, complaint):
    with pytest.raises(DataError, match=complaint):
        encode_labelled(record, chat, {})


@pytest.mark.parametrize("config", [DpoConfig, KtoConfig])
def test_unknown_fields_in_the_config_are_refused(config):
    with pytest.raises(ValueError, match="names question, wanted prompt, "):
        config(fields={"question": "prompt"})


SPOKEN = [
    [{"role": "user", "content": "6*7?"}, {"role": "assistant", "content": response}] for response in ("42", "43")
]


@pytest.mark.parametrize(
    ("record", "pair", "labelled"),
    [
        ({"prompt": "6*7?", "chosen": "42", "rejected": "43"}, True, True),
        ({"chosen": SPOKEN[0], "rejected": SPOKEN[1]}, True, True),
        ({"prompt": "6*7?", "completion": "42", "label": False}, False, True),
        ({"messages": SPOKEN[0], "label": True}, False, True),
        ({"messages": SPOKEN[0]}, False, False),
        ({"prompt": "6*7?", "completion": "42"}, False, False),
        ({"prompt": "6*7?", "chosen": "42"}, False, False),
        ({"prompt": "6*7?"}, False, False),
    ],
)
@pytest.mark.parametrize("fields", [{}, {"prompt": "q", "chosen": "c"}])
def test_the_fields_that_check_looks_for_are_those_that_are_read(chat, record, pair, labelled, fields):
    record = {fields.get(name, name): value for name, value in record.items()}
    for facts, encode, usable in (
        (dpo_facts(DpoConfig(fields=fields, reference="none"), ModelInfo("")), encode_pair, pair),
        (kto_facts(KtoConfig(fields=fields, reference="precomputed"), ModelInfo("")), encode_labelled, labelled),
    ):
        assert any(set(names) <= set(record) for names in facts.record_fields) == usable
        if usable:
            assert encode(record, chat, fields)
            continue
        with pytest.raises(DataError, match="wanted `"):
            encode(record, chat, fields)


def test_a_chosen_conversation_may_be_learned_whole(chat):
    record = {"prompt": "6*7?", "chosen": "42", "rejected": "43"}
    plain, found = encode_pair(record, chat, {}), encode_with_prompt(record, chat, {})
    chosen, rejected = found
    assert chosen["loss_mask"].tolist() == [False] + [True] * (len(chosen["tokens"]) - 1)
    assert rejected["loss_mask"].tolist() == plain[1]["loss_mask"].tolist()
    for one, was in zip(found, plain, strict=True):
        assert one["response_mask"].tolist() == was["loss_mask"].tolist()
        assert one["prompt_length"] == was["prompt_length"]


def test_reasoning_of_an_earlier_turn_of_a_labelled_response_is_not_left_out(tiny_model_folder):
    chat = ChatTokenizer(tiny_model_folder)
    turns = [
        {"role": "assistant", "content": "4", "reasoning_content": "two and two"}, {"role": "user", "content": "+1?"},
        {"role": "assistant", "content": "5"},
    ]  # fmt: skip
    with pytest.raises(DataError, match="leaves out the reasoning"):
        labelled_encoder(KtoConfig(), ModelInfo(""))({"prompt": "2+2?", "completion": turns, "label": True}, chat)
