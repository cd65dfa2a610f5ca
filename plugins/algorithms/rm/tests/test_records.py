from pathlib import Path

import numpy as np
import pytest

from whet.config.structure import structure
from whet.data.messages import Message, conversation
from whet.data.model_info import ModelInfo
from whet.errors import ConfigError, DataError
from whet.plugins.registry import load_plugins
from whet_chat.tokenizer import ChatTokenizer
from whet_rm.config import RmConfig, rm_facts
from whet_rm.records import encode


@pytest.fixture(scope="module")
def chat(tiny_model_folder):
    return ChatTokenizer(tiny_model_folder)


def test_a_pair_is_two_whole_conversations_with_a_place_for_the_score_behind(chat):
    pair = encode({"question": "6*7?", "chosen": "42", "rejected": "43, I think"}, chat, {"prompt": "question"})
    for one, response in zip(pair, ("42", "43, I think"), strict=True):
        whole = chat.training((Message("user", "6*7?"), Message("assistant", response))).tokens
        assert np.array_equal(one["tokens"][:-1], whole)
        assert one["loss_mask"].nonzero()[0].tolist() == [len(whole)]
    assert [one["chosen"] for one in pair] == [True, False]
    assert "margin" not in pair[0]


@pytest.mark.parametrize(
    "record", [{"prompt": "6*7 =", "chosen": " 42", "rejected": " 43"}, {"chosen": "6*7 = 42", "rejected": "6*7 = 43"}]
)
def test_texts_are_scored_behind_their_end_token_without_a_template(chat, record):
    for one, text in zip(encode(record, chat, {}, plain=True), ("6*7 = 42", "6*7 = 43"), strict=True):
        assert chat.decode(one["tokens"][:-1], skip_special=False) == f"{text}<|im_end|>"
        assert one["loss_mask"].nonzero()[0].tolist() == [len(one["tokens"]) - 1]
    with pytest.raises(DataError, match="must be a string"):
        encode({"chosen": [{"role": "user", "content": "x"}], "rejected": "y"}, chat, {}, plain=True)


def test_a_judge_reads_plain_texts_as_in_training_by_the_template_of_the_guide(tiny_model_folder, chat):
    guide = (Path(__file__).parents[4] / "docs/how-to/reward-model.md").read_text(encoding="utf-8")
    template = guide.partition("file=plain.jinja\n")[2].partition("```")[0].rstrip()
    talk = conversation([Message("user", "6*7 ="), Message("assistant", " 42")])
    read = ChatTokenizer(tiny_model_folder, template).training(talk, "last").tokens
    record = {"prompt": "6*7 =", "chosen": " 42", "rejected": " 43"}
    assert read.tolist() == encode(record, chat, {}, plain=True)[0]["tokens"][:-1].tolist()


@pytest.mark.parametrize(("plain", "template"), [(True, ""), (True, "{{ messages }}"), (False, "")])
def test_check_says_that_a_judge_uses_a_template(plain, template):
    config = structure({"plain": plain, "loss": "bradley-terry"}, RmConfig, load_plugins())
    notes = rm_facts(config, ModelInfo("m", chat_template=template)).notes
    assert bool(notes) == (plain and not template)


def test_the_column_of_the_tools_can_have_another_name(tiny_model_folder):
    template = "{{ tools }}{% for message in messages %}[{{ message.role }}]{{ message.content }}<|im_end|>{% endfor %}"
    chat, names = ChatTokenizer(tiny_model_folder, template), RmConfig(fields={"tools": "functions"}).fields
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    record = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
    wanted = encode({**record, "tools": tools}, chat, {})
    found = encode({**record, "functions": tools, "tools": [{"name": "other"}]}, chat, names)
    assert [one["tokens"].tolist() for one in found] == [one["tokens"].tolist() for one in wanted]
    assert "add" in chat.decode(found[0]["tokens"])


def test_the_prompt_is_what_both_begin_with(chat):
    for chosen, rejected in (("42 is it", "42 is not"), ("42", "42 and more")):
        one, other = encode({"prompt": "6*7?", "chosen": chosen, "rejected": rejected}, chat, {})
        length = one["prompt_length"]
        assert other["prompt_length"] == length
        assert np.array_equal(one["tokens"][:length], other["tokens"][:length])
        assert length < min(len(one["tokens"]), len(other["tokens"]))
        following = [pair["tokens"][length] for pair in (one, other) if length < len(pair["tokens"]) - 1]
        assert len(set(following)) == len(following)


def test_several_turns_are_read_as_a_judge_reads_them(chat):
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    responses = {name: [*begun, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    one, _ = encode(responses, chat, {})
    whole = (Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "chosen"))
    assert np.array_equal(one["tokens"][:-1], chat.training(whole).tokens)


def test_a_margin_is_of_both_sequences(chat):
    pair = encode({"prompt": "x", "chosen": "y", "rejected": "z", "by": 2}, chat, {"margin": "by"}, margin=True)
    assert [one["margin"] for one in pair] == [2.0, 2.0]


@pytest.mark.parametrize("margin", [None, "much", True, float("nan")])
def test_a_margin_that_is_no_number_is_refused(chat, margin):
    with pytest.raises(DataError, match=r"the field `margin` is .*, wanted a number: by how much"):
        encode({"prompt": "x", "chosen": "y", "rejected": "z", "margin": margin}, chat, {}, margin=True)


def test_a_record_without_responses_is_refused(chat):
    with pytest.raises(DataError, match="wanted `chosen` and `rejected`"):
        encode({"prompt": "x", "chosen": "y"}, chat, {})


@pytest.mark.parametrize(("margin", "wanted"), [(0, ("better", "rejected")), (1, ("better", "rejected", "by"))])
def test_check_looks_for_the_fields_that_are_read(margin, wanted):
    document = {"fields": {"chosen": "better", "margin": "by"}, "loss": {"use": "bradley-terry", "margin": margin}}
    config = structure(document, RmConfig, load_plugins())
    assert rm_facts(config, ModelInfo("", {})).record_fields == (wanted,)


def test_unknown_fields_are_refused():
    with pytest.raises(ConfigError, match="names better, wanted prompt, chosen, rejected, margin"):
        structure({"fields": {"better": "chosen"}}, RmConfig, load_plugins())
