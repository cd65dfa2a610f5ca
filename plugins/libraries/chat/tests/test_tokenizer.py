"""Chat templates and tokens, held against transformers' own `apply_chat_template`."""

import itertools
import json
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from whet.data.messages import Call, Conversation, Message, conversation
from whet.errors import DataError, RewrittenHistory
from whet_chat.tokenizer import ChatTokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{%- if messages[0]['role'] == 'system' %}\n"
    "    {%- set ns = namespace(text=messages[0]['content'], rest=messages[1:]) %}\n"
    "{%- else %}\n"
    "    {%- set ns = namespace(text='You are a whetstone.', rest=messages) %}\n"
    "{%- endif %}\n"
    "{{- '<|im_start|>system\\n' + ns.text + '<|im_end|>\\n' }}\n"
    "{%- for m in ns.rest %}\n"
    "    {%- if m.role == 'tool' %}\n"
    "        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}\n"
    "        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}\n"
    "        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}\n"
    "    {%- else %}\n"
    "        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"
)
LLAMA = (
    "{{- bos_token }}\n"
    "{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}\n"
    "{%- if messages[0]['role'] == 'system' %}\n"
    "    {%- set system = messages[0]['content']|trim %}{%- set messages = messages[1:] %}\n"
    "{%- else %}{%- set system = '' %}{%- endif %}\n"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}\n"
    "{{- 'Today Date: ' + date_string + '\\n\\n' + system + '<|eot_id|>' }}\n"
    "{%- for m in messages %}\n"
    "    {%- set role = 'ipython' if m.role == 'tool' else m.role %}\n"
    "    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}\n"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
VICUNA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ 'USER: ' + m.content.strip() + '\n' }}"
    "{% else %}{{ 'ASSISTANT: ' + m.content.strip() + eos_token + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content | trim + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
REASONING = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{%- set parts = m.content.split('</think>') %}"
    "{%- set thought = parts[0].split('<think>')[-1].strip('\\n') if parts | length > 1 else '' %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<think>\\n' + thought + '\\n</think>\\n\\n' + parts[-1].lstrip('\\n') }}"
    "{%- else %}{{- parts[-1].lstrip('\\n') }}{% endif %}{{- '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
)

TALK = conversation(
    [
        {"role": "user", "content": "  What is 6*7?\n"},
        {"role": "assistant", "content": "It is \\boxed{42}."},
        {"role": "user", "content": "Ünd 6*8? 日本 <b>&"},
        {"role": "assistant", "content": "48"},
    ]
)
TOOLS = conversation(
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Compute 47*83."},
        {"role": "assistant", "content": "calc 47*83"},
        {"role": "tool", "content": "3901"},
        {"role": "assistant", "content": "\\boxed{3901}"},
    ]
)
CASES = {
    "chatml": ("bytes", CHATML, [TALK, TOOLS]),
    "generation": ("bytes", GENERATION, [TALK, TOOLS]),
    "default-system": ("bytes", DEFAULT_SYSTEM, [TALK, TOOLS]),
    "llama": ("llama", LLAMA, [TALK, TOOLS]),
    "mistral": ("mistral", MISTRAL, [TALK]),
    "vicuna": ("mistral", VICUNA, [TALK]),
    "phi": ("phi", PHI, [TALK, TOOLS]),
}
# how the tokenizers of Llama 3 and Qwen cut text into words
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_bytes(eos: str, specials: list, bos: str | None = None):
    """A byte-level BPE with the merges that matter: newlines and a leading space stick to what follows."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(
        ["user\n\nassistant\n\n system tool It is What is", "\n\n\n", "47*83 = 3901"] * 9, trainer
    )
    tokens = [AddedToken(s, special=True, normalized=False) if isinstance(s, str) else s for s in specials]
    tokenizer.add_special_tokens(tokens)
    if bos:
        pair = (bos, tokenizer.token_to_id(bos))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[pair])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos)


def make_metaspace():
    """A tokenizer that marks spaces as SentencePiece does, with one put before the first word."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"])
    words = "[INST] What is 6*7? [/INST] It is \\boxed{42}. Ünd 6*8? 日本 <b>& 48 \n and so on"
    tokenizer.train_from_iterator([words, "USER: ASSISTANT:"] * 9, trainer)
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="session")
def tokenizers():
    from tokenizers import AddedToken

    names = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")
    swallowing = [AddedToken(name, rstrip=True, special=True, normalized=False) for name in names]
    return {
        "bytes": make_bytes("<|im_end|>", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
        "llama": make_bytes(
            "<|end_of_text|>",
            ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
            bos="<|begin_of_text|>",
        ),
        "mistral": make_metaspace(),
        "glm": make_bytes(
            "<|endoftext|>", ["<|endoftext|>", *(f"<|{name}|>" for name in ("user", "assistant", "observation"))]
        ),
        # each swallows the white space behind it, as those of Phi-3 do
        "phi": make_bytes("<|endoftext|>", ["<|endoftext|>", *swallowing], bos="<|endoftext|>"),
    }


@pytest.fixture(scope="session")
def load(tokenizers, tmp_path_factory):
    """Return (whet's, transformers') for a case, both read from the same folder."""
    from transformers import AutoTokenizer

    def load(kind: str, template: str):
        folder = tmp_path_factory.mktemp(kind)
        tokenizers[kind].chat_template = template
        tokenizers[kind].save_pretrained(folder)
        return ChatTokenizer(folder), AutoTokenizer.from_pretrained(folder)

    return load


def as_dicts(talk: Conversation) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.text} for m in talk]


def text_of(chat: ChatTokenizer, tokens: np.ndarray) -> str:
    return chat.decode(tokens, skip_special=False)


def prefixes(talk: Conversation) -> list[Conversation]:
    """What a model is asked to continue in the course of a conversation."""
    return [talk[:i] for i in range(1, len(talk)) if talk[i].role == "assistant"]


@pytest.mark.parametrize("name", CASES)
def test_prompts_are_those_of_transformers(name, load):
    kind, template, talks = CASES[name]
    chat, reference = load(kind, template)
    for talk in itertools.chain.from_iterable(map(prefixes, talks)):
        wanted = reference.apply_chat_template(as_dicts(talk), add_generation_prompt=True, tokenize=False)
        assert chat.template.render(talk, generation_prompt=True) == wanted
        ids = reference.apply_chat_template(as_dicts(talk), add_generation_prompt=True, return_dict=False)
        assert chat.prompt(talk).tolist() == ids
        assert chat.prompt(talk).dtype == np.int64


def test_half_of_a_character_is_named_with_what_is_around_it(load):
    chat, _ = load(*next(iter(CASES.values()))[:2])
    with pytest.raises(DataError, match=r"half of a character \(a lone surrogate\), in 'ab\\ud800c'"):
        chat.encode("ab\ud800c")


@pytest.mark.parametrize("name", CASES)
def test_training_tokens_are_those_of_transformers(name, load):
    kind, template, talks = CASES[name]
    chat, reference = load(kind, template)
    for talk in talks:
        trainable = chat.training(talk)
        assert trainable.tokens.tolist() == reference.apply_chat_template(as_dicts(talk), return_dict=False)
        first = next(i for i, m in enumerate(talk) if m.role == "assistant")
        assert trainable.prompt_length == len(chat.prompt(talk[:first])) == int(trainable.loss_mask.argmax())


def test_the_loss_mask_is_that_of_the_generation_tag(load):
    chat, reference = load("bytes", GENERATION)
    for talk in (TALK, TOOLS):
        wanted = reference.apply_chat_template(as_dicts(talk), return_assistant_tokens_mask=True, return_dict=True)
        assert chat.training(talk).loss_mask.astype(int).tolist() == wanted["assistant_masks"]


@pytest.mark.parametrize("name", CASES)
def test_trained_is_the_content_and_the_end_of_turn_but_no_header(name, load):
    kind, template, talks = CASES[name]
    chat, _ = load(kind, template)
    for talk in talks:
        trainable = chat.training(talk)
        trained = text_of(chat, trainable.tokens[trainable.loss_mask])
        end = chat.decode([chat._end_of_turn], skip_special=False)
        answers = [m.text for m in talk if m.role == "assistant"]
        assert trained.replace(" ", "") == "".join(a.replace(" ", "") + end for a in answers)
        last = chat.training(talk, train_on="last")
        assert text_of(chat, last.tokens[last.loss_mask]).replace(" ", "") == answers[-1].replace(" ", "") + end
        assert last.prompt_length == len(chat.prompt(talk[:-1]))


@pytest.mark.parametrize("name", CASES)
def test_turns_are_found_as_where_each_is_rendered_alone(name, load, monkeypatch):
    """A turn that ends as an earlier one did is not rendered alone. Texts that hold the end of a turn are."""
    kind, template, talks = CASES[name]
    chat, _ = load(kind, template)
    end = chat.decode([chat._end_of_turn], skip_special=False)
    answers = ("one", " two \n", f"three{end}", "four", "", "five\n", "one")
    long = [message for text in answers for message in (Message("user", "and?"), Message("assistant", text))]
    for talk in (*talks, tuple(long)):
        found = chat.training(talk)
        with monkeypatch.context() as patch:
            patch.setattr(chat, "_stop_at_end", lambda turn, message: "")
            one_by_one = chat.training(talk)
        assert found.tokens.tolist() == one_by_one.tokens.tolist()
        assert found.loss_mask.tolist() == one_by_one.loss_mask.tolist()


def test_the_last_turn_is_trained_to_its_own_end_however_earlier_turns_end(load):
    """As Phi-3's template does: another end token follows the whole conversation."""
    chat, _ = load("phi", PHI_END)
    talk = (Message("user", "a?"), Message("assistant", "one"), Message("user", "b?"), Message("assistant", "two"))
    whole, last = chat.training(talk), chat.training(talk, train_on="last")
    assert whole.tokens.tolist() == last.tokens.tolist()
    after = last.prompt_length
    assert whole.loss_mask[after:].tolist() == last.loss_mask[after:].tolist()


def test_a_conversation_of_plain_turns_is_rendered_about_once_for_each(load, monkeypatch):
    chat, _ = load("bytes", CHATML)
    talk = [message for n in range(9) for message in (Message("user", f"{n}?"), Message("assistant", f"{n}"))]
    renders = []
    monkeypatch.setattr(chat, "render", lambda *a, of=chat.render, **k: renders.append(a) or of(*a, **k))
    chat.training(tuple(talk))
    assert len(renders) == 1 + 9 + 1


PHI_END = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
PLAIN_ROLES = "{{% for m in messages %}}{{{{ m.role }}}}: {{{{ m.content{} }}}}{}{{% endfor %}}{}"
ASKED = "{% if add_generation_prompt %}assistant: {% endif %}"


@pytest.mark.parametrize(
    ("trim", "end", "trained"),
    [
        ("", "\n", ["def f():\n    pass\n\n", "42 \n\t<|im_end|>"]),
        ("", "", ["def f():\n    pass\n\n", "42 \n\t<|im_end|>"]),
        ("", "\n### End\n", ["def f():\n    pass\n\n\n### End", "42 \n\t\n### End<|im_end|>"]),
        ("|trim", "\n", ["def f():\n    pass", "42<|im_end|>"]),
        ("", "<|im_end|>\n", ["def f():\n    pass\n\n<|im_end|>", "42 \n\t<|im_end|>"]),
    ],
)
def test_white_space_at_the_end_of_an_answer_is_trained_whatever_closes_the_turn(trim, end, trained, load):
    chat, _ = load("bytes", PLAIN_ROLES.format(trim, end, ASKED))
    answers = [Message("assistant", "def f():\n    pass\n\n"), Message("assistant", "42 \n\t")]
    talk = (Message("user", "write"), answers[0], Message("user", "and"), answers[1])
    found = chat.training(talk)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], found.loss_mask, [False]]))).reshape(-1, 2)
    assert [text_of(chat, found.tokens[begin:last]) for begin, last in edges] == trained
    rendered = chat.template.render(talk)
    without = text_of(chat, found.tokens).replace("<|im_end|>", "")
    assert text_of(chat, found.tokens) == rendered if "<|im_end|>" in end else without == rendered
    assert found.prompt_length == len(chat.prompt(talk[:1]))
    last = chat.training(talk, train_on="last")
    assert text_of(chat, last.tokens[last.loss_mask]) == trained[1]


def test_an_answer_that_quotes_the_end_token_is_trained_to_its_end(load):
    chat, _ = load("bytes", PLAIN_ROLES.format("", "\n", ASKED))
    found = chat.training((Message("user", "how?"), Message("assistant", "write <|im_end|> last\n")))
    assert text_of(chat, found.tokens[found.loss_mask]) == "write <|im_end|> last\n<|im_end|>"


GLM = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>\n<think></think>\n{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}</tool_call>{% endfor %}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As GLM 4.5's: the next message ends a turn."""


@pytest.mark.parametrize("train_on", ["all", "last"])
def test_each_turn_ends_in_a_stop_token_where_the_template_writes_none(load, train_on):
    kept, _ = load("glm", GLM)
    ids = [int(kept.encode(f"<|{name}|>")[0]) for name in ("endoftext", "user", "observation")]
    (kept.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    chat, call = ChatTokenizer(kept.folder), Message("assistant", "", (Call("1", "ping", "{}"),))
    talk = (Message("user", "One?"), Message("assistant", "First."), Message("user", "Two?"), call)
    talk = (*talk, Message("tool", "pong"), Message("assistant", "It answers."))
    turns = [
        "\n<think></think>\nFirst.<|user|>",
        "\n<think></think>\n<tool_call>ping</tool_call><|observation|>",
        "\n<think></think>\nIt answers.<|user|>",
    ]
    for last in (1, 3, 5):
        found = chat.training(talk[: last + 1], train_on=train_on)
        spans = np.split(np.arange(len(found.tokens)), np.flatnonzero(np.diff(found.loss_mask)) + 1)
        trained = [found.tokens[span] for span in spans if found.loss_mask[span[0]]]
        first = 0 if train_on == "all" else last // 2
        assert [text_of(chat, turn) for turn in trained] == turns[first : last // 2 + 1]
        assert all(int(turn[-1]) in chat.stop_tokens for turn in trained)
        longer = chat.prompt((*talk[: last + 1], Message("tool" if last == 3 else "user", "Go on.")))
        assert longer[: len(found.tokens)].tolist() == found.tokens.tolist()


def test_messages_before_the_first_trainable_one_carry_no_loss(load):
    chat, _ = load("bytes", CHATML)
    trainable = chat.training(TALK, first=2)
    assert text_of(chat, trainable.tokens[trainable.loss_mask]) == "48<|im_end|>"


@pytest.mark.parametrize("name", CASES)
def test_a_continued_history_equals_the_prompt_of_the_longer_conversation(name, load):
    kind, template, talks = CASES[name]
    chat, _ = load(kind, template)
    for talk in talks:
        turn = next(i for i, m in enumerate(talk) if m.role == "assistant")
        whole = chat.prompt(talk[: turn + 2])
        trainable = chat.training(talk[: turn + 1])
        produced = trainable.tokens[trainable.loss_mask]
        more = chat.continuation(talk[: turn + 1], True, talk[turn + 1 : turn + 2])
        assert [*chat.prompt(talk[:turn]), *produced, *more] == whole.tolist()
        assert produced[-1] in chat.stop_tokens
        cut = chat.continuation(talk[: turn + 1], False, talk[turn + 1 : turn + 2])
        assert [*chat.prompt(talk[:turn]), *produced[:-1], *cut] == whole.tolist()


def test_what_the_model_wrote_is_found_also_where_the_template_trims_it(load):
    chat, _ = load("llama", LLAMA)
    history = (*TALK[:1], Message("assistant", " 42 \n"))
    more = text_of(chat, chat.continuation(history, True, TALK[2:3]))
    assert more.startswith("<|start_header_id|>user<|end_header_id|>\n\nÜnd")
    assert more.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
    assert text_of(chat, chat.continuation(history, False, TALK[2:3])) == "<|eot_id|>" + more


def test_trailing_white_space_of_the_model_is_not_repeated(load):
    chat, _ = load("bytes", CHATML)
    history = (*TALK[:1], Message("assistant", "42\n\n"))
    cut = text_of(chat, chat.continuation(history, False, conversation("so?")))
    assert cut == "<|im_end|>\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"


def test_an_empty_answer_can_be_continued(load):
    chat, _ = load("bytes", CHATML)
    more = chat.continuation((*TALK[:1], Message("assistant", "")), True, conversation("so?"))
    assert text_of(chat, more) == "\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_drops_earlier_reasoning_is_refused_and_shown(load):
    chat, _ = load("bytes", REASONING)
    history = (*TALK[:1], Message("assistant", "<think>\nsix sevens\n</think>\n\n42"))
    with pytest.raises(DataError, match=r"rewrites history.*<think>.*part at character \d+"):
        chat.continuation(history, True, conversation("so?"))
    with pytest.raises(DataError, match="rewrites history"):
        chat.training((*history, *TALK[2:]))
    assert chat.training((*history, *TALK[2:]), train_on="last").loss_mask.any()


def test_a_template_that_keeps_reasoning_before_a_tool_reply_is_accepted(load):
    chat, _ = load("bytes", REASONING)
    history = (*TALK[:1], Message("assistant", "<think>\nsix sevens\n</think>\n\n42"))
    more = text_of(chat, chat.continuation(history, True, (Message("tool", "3901"),)))
    assert more == "\n<|im_start|>tool\n3901<|im_end|>\n<|im_start|>assistant\n"


def test_answers_that_a_model_wrote_without_reasoning_pass_through_a_template_that_drops_it(load):
    chat, _ = load("bytes", REASONING)
    more = text_of(chat, chat.continuation(TALK[:2], True, conversation("so?")))
    assert more == "\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("train_on", ["all", "last"])
@pytest.mark.parametrize("count", [2, 4])
def test_a_template_that_asks_for_reasoning_and_renders_none_is_named(train_on, count, load):
    chat, _ = load("bytes", CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"))
    with pytest.raises(DataError, match=r"begins a response otherwise .*<think>\\n' where the turn has") as caught:
        chat.training(TALK[:count], train_on)
    assert not isinstance(caught.value, RewrittenHistory)


@pytest.mark.parametrize("answer", ["It is \\boxed{42}.", "", " \n"])
def test_a_turn_that_begins_otherwise_where_it_is_last_is_rewritten(answer, load):
    """An empty block of reasoning opens the last turn only, so an earlier turn is not what the model will write."""
    chat, _ = load("bytes", REASONING)
    talk = (TALK[0], Message("assistant", answer), *TALK[2:])
    with pytest.raises(RewrittenHistory, match=r"History has .*<think>.*where the longer.*`train_on: last`, in pairs"):
        chat.training(talk)
    for found, asked, said in (
        (chat.training(talk, train_on="last"), talk[:3], "48"),
        (chat.training(talk[:2]), talk[:1], answer),
    ):
        assert found.tokens[: found.prompt_length].tolist() == chat.prompt(asked).tolist()
        shown = said.lstrip("\n")
        assert text_of(chat, found.tokens[found.loss_mask]) == f"<think>\n\n</think>\n\n{shown}<|im_end|>"


@pytest.mark.parametrize("template", [REASONING, CHATML], ids=["rewrites", "appends"])
@pytest.mark.parametrize("train_on", ["all", "last"])
def test_what_follows_the_last_turn_changes_nothing(template, train_on, load):
    chat, _ = load("bytes", template)
    alone = chat.training(TALK[:2], train_on)
    for after in (TALK[2:3], (Message("tool", "3901"), TALK[2])):
        found = chat.training((*TALK[:2], *after), train_on)
        assert found.tokens.tolist() == alone.tokens.tolist()
        assert found.loss_mask.tolist() == alone.loss_mask.tolist()


def test_a_turn_that_only_closes_otherwise_where_it_is_last_is_trained(load):
    chat, _ = load("phi", PHI_END)
    talk = (Message("user", "a?"), Message("assistant", " one\n"), Message("user", "b?"), Message("assistant", "two"))
    found = chat.training(talk)
    assert text_of(chat, found.tokens[found.loss_mask]) == " one\n<|end|>two<|end|><|endoftext|>"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<|im_start|>{{ loop.revindex }} {{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}",
        "{% for m in messages %}<|im_start|>{{ m.content if loop.last else '...' }}<|im_end|>{% endfor %}",
    ],
    ids=["renumbers", "elides"],
)
def test_templates_that_change_earlier_text_are_refused(template, load):
    chat, _ = load("bytes", template)
    with pytest.raises(DataError, match="rewrites history"):
        chat.continuation(TALK[:2], True, TALK[2:3])
    with pytest.raises(DataError, match="rewrites history"):
        chat.training(TALK)


def test_content_that_would_merge_with_the_header_keeps_the_tokens_of_the_prompt(load):
    chat, reference = load("bytes", CHATML)
    talk = (*TALK[:1], Message("assistant", "\n\n42"), *TALK[2:])
    trainable, prompt = chat.training(talk), chat.prompt(talk[:1])
    assert trainable.tokens.tolist() != reference.apply_chat_template(as_dicts(talk), return_dict=False)
    assert trainable.tokens[: trainable.prompt_length].tolist() == prompt.tolist()
    assert text_of(chat, trainable.tokens) == chat.template.render(talk)
    assert text_of(chat, trainable.tokens[trainable.loss_mask]) == "\n\n42<|im_end|>48<|im_end|>"


def test_stop_tokens_are_those_of_tokenizer_generation_config_and_template(load):
    chat, reference = load("llama", LLAMA)
    ids = reference.convert_tokens_to_ids(["<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>"])
    assert set(chat.stop_tokens) == set(ids[:2])
    (chat.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert set(ChatTokenizer(chat.folder).stop_tokens) == set(ids)


def test_time_stands_still_for_templates(load):
    chat, _ = load("llama", LLAMA)
    frozen = ChatTokenizer(chat.folder, now=datetime(2024, 7, 26, 23, 59))
    assert "Today Date: 26 Jul 2024" in text_of(frozen, frozen.prompt(TALK[:1]))


def test_begin_tokens_are_not_doubled(load):
    chat, _ = load("llama", LLAMA)
    bos = chat.encode("<|begin_of_text|>")[0]
    assert (chat.prompt(TALK[:1]) == bos).sum() == 1
    assert (chat.training(TALK).tokens == bos).sum() == 1
    assert (chat.encode("What is") == bos).sum() == 0
    assert chat.opening == (bos,)
    text = chat.training_text(chat.render(TALK))
    assert text.tokens.tolist() == [*chat.encode(chat.render(TALK)), chat.encode("<|end_of_text|>")[0]]
    assert text.loss_mask.tolist() == [False] + [True] * (len(text.tokens) - 1)
    completion = chat.training_completion(chat.render(TALK[:1], generation_prompt=True), "x")
    assert completion.tokens[: completion.prompt_length].tolist() == chat.prompt(TALK[:1]).tolist()
    assert text_of(chat, completion.tokens[completion.loss_mask]) == "x<|end_of_text|>"


def test_plain_text_gets_begin_and_end_tokens_and_no_loss_on_the_first(load):
    chat, _ = load("llama", LLAMA)
    trainable = chat.training_text("What is")
    assert text_of(chat, trainable.tokens) == "<|begin_of_text|>What is<|end_of_text|>"
    assert trainable.loss_mask.tolist() == [False] + [True] * (len(trainable.tokens) - 1)
    assert trainable.prompt_length == 1


@pytest.mark.parametrize(("kind", "begin"), [("llama", "<|begin_of_text|>"), ("bytes", "")])
def test_a_plain_completion_stands_between_begin_and_end_tokens_and_alone_has_loss(load, kind, begin):
    chat, _ = load(kind, LLAMA)
    trainable = chat.training_completion("What is", " 6*7")
    end = text_of(chat, trainable.tokens[-1:])
    assert text_of(chat, trainable.tokens) == f"{begin}What is 6*7{end}"
    assert text_of(chat, trainable.tokens[trainable.loss_mask]) == f" 6*7{end}"
    assert trainable.prompt_length == int(trainable.loss_mask.argmax())
    prompt = trainable.tokens[: trainable.prompt_length]
    assert prompt.tolist() == [*chat.encode(begin), *chat.encode("What is")]


def test_plain_text_that_would_have_no_end_is_refused(load):
    whole, _ = load("bytes", CHATML)
    file = whole.folder / "tokenizer_config.json"
    config = {name: value for name, value in json.loads(file.read_text()).items() if name != "eos_token"}
    file.write_text(json.dumps(config))
    (whole.folder / "special_tokens_map.json").unlink(missing_ok=True)
    chat, bare = ChatTokenizer(whole.folder), ChatTokenizer(whole.folder, "{{ messages[0].content }}")
    words = r"has no end token.*wanted `eos_token` in tokenizer_config\.json.*model\.chat_template"
    for one in (chat, bare):
        with pytest.raises(DataError, match=words):
            one.training_text("What is")
        with pytest.raises(DataError, match=words):
            one.training_completion("What is", " 6*7")
    assert bare.encode("What is").tolist() == bare.prompt((Message("user", "What is"),)).tolist()
    # a text that a template rendered has its own end of turn
    ended = chat.render(TALK)
    assert ended.endswith("<|im_end|>\n")
    assert text_of(chat, chat.training_text(ended).tokens) == ended
    assert text_of(chat, chat.training_completion("What is", " 6*7<|im_end|>").tokens) == "What is 6*7<|im_end|>"


def test_decoding_leaves_special_tokens_out_where_asked(load):
    chat, reference = load("bytes", CHATML)
    tokens = chat.prompt(TALK[:1])
    assert (
        chat.decode(tokens)
        == reference.decode(tokens, skip_special_tokens=True)
        == "user\n  What is 6*7?\n\nassistant\n"
    )


def test_a_template_given_by_file_or_text_replaces_the_folders_own(load, tmp_path):
    chat, _ = load("bytes", CHATML)
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    for given in (str(tmp_path / "own.jinja"), "{{ messages[0].content }}"):
        assert text_of(chat, ChatTokenizer(chat.folder, given).prompt(conversation("hi"))) == "hi"
    with pytest.raises(DataError, match=r"model\.chat_template.*none\.jinja"):
        ChatTokenizer(chat.folder, str(tmp_path / "none.jinja"))


def test_templates_in_older_places_and_lists_are_read(load):
    chat, _ = load("bytes", CHATML)
    (chat.folder / "chat_template.jinja").unlink()
    file = chat.folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    wanted = chat.prompt(TALK[:1]).tolist()
    named = [{"name": "default", "template": CHATML}, {"name": "rag", "template": "x"}]
    for template in (CHATML, named):
        file.write_text(json.dumps({**config, "chat_template": template}))
        assert ChatTokenizer(chat.folder).prompt(TALK[:1]).tolist() == wanted
    file.write_text(json.dumps({**config, "chat_template": named[1:]}))
    with pytest.raises(DataError, match="none named `default`"):
        ChatTokenizer(chat.folder).prompt(TALK[:1])


def test_special_tokens_that_only_the_config_names_are_known(load, tmp_path):
    chat, _ = load("bytes", CHATML)
    (tmp_path / "tokenizer.json").write_text((chat.folder / "tokenizer.json").read_text())
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|new|>"}}))
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    new = ChatTokenizer(tmp_path, "{{ messages[0].content + eos_token }}")
    assert new.stop_tokens == (reference.eos_token_id,)
    assert new.prompt(conversation("hi")).tolist() == reference.encode("hi<|new|>", add_special_tokens=False)


def test_what_is_missing_is_named(tmp_path, load):
    with pytest.raises(DataError, match=r"has no tokenizer\.json"):
        ChatTokenizer(tmp_path)
    chat, _ = load("bytes", CHATML)
    (chat.folder / "chat_template.jinja").unlink()
    base = ChatTokenizer(chat.folder)
    assert base.stop_tokens  # a base model can still be trained on plain text
    with pytest.raises(DataError, match=r"no chat template.*model\.chat_template"):
        base.prompt(TALK)


def test_a_refusing_template_says_which_roles_it_was_given(load):
    chat, _ = load("mistral", MISTRAL)
    with pytest.raises(DataError, match=r"roles user, user.*must alternate"):
        chat.prompt((*TALK[:1], *TALK[:1]))


@pytest.mark.parametrize(
    ("content", "shown"),
    [("{{ m.content[:5] }}", "Comp"), ("{{ m.content | upper }}", "COMPUTE"), ("{{ m.content[0].text }}", "Compute")],
)
def test_content_is_a_list_of_parts_only_for_templates_that_take_one(load, content, shown):
    chat, _ = load("bytes", "{% for m in messages %}" + content + "{% endfor %}")
    text = chat.render(conversation("Compute 6*7."))
    assert text.startswith(shown)
    assert "type" not in text


def test_templates_cannot_leave_the_sandbox(load):
    chat, _ = load("bytes", CHATML)
    for attack in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ namespace(__class__=1) }}",
        "{{ messages.append(1) }}",
        "{{ dict.__init__.__globals__ }}",
    ):
        with pytest.raises(DataError):
            ChatTokenizer(chat.folder, attack).prompt(TALK[:1])


def test_a_conversation_without_an_answer_cannot_be_trained_on(load):
    chat, _ = load("bytes", CHATML)
    with pytest.raises(DataError, match="no message of the assistant"):
        chat.training(TALK[:1])


def test_nothing_heavy_is_imported():
    code = "import sys, whet_chat.tokenizer; print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_folder_may_be_named_by_a_string(load):
    chat, _ = load("bytes", CHATML)
    assert ChatTokenizer(str(chat.folder)).folder == Path(chat.folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("chat_template.jinja", b"\xff{{ x }}", "chat_template.jinja is not UTF-8 text, at byte 0"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": 5}', "has added tokens that are none"),
        ("tokenizer_config.json", b'{"extra_special_tokens": 5}', "has added tokens that are none"),
        ("tokenizer_config.json", b'{"chat_template": [5]}', "has a list of no chat templates"),
        ("tokenizer_config.json", b"[" * 100_000, "tokenizer_config.json cannot be read as JSON: it nests too deeply"),
        ("tokenizer_config.json", b"[],[" * 1_000_000, "cannot be read as JSON: it has about 3,000,000 values"),
        ("tokenizer.json", b"[" * 100_000, "tokenizer.json cannot be read"),
    ],
)
def test_files_of_nonsense_are_named(tiny_model_folder, tmp_path, name, content, message):
    folder = shutil.copytree(tiny_model_folder, tmp_path / "model")
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        (folder / file).unlink(missing_ok=True)
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        ChatTokenizer(folder)


def test_a_given_template_that_cannot_be_read_is_named(tiny_model_folder, tmp_path):
    (tmp_path / "latin.jinja").write_bytes(b"caf\xe9")
    for name, message in (("latin.jinja", "is not UTF-8 text, at byte 3"), ("none.jinja", "cannot be read: No such")):
        with pytest.raises(DataError, match=rf"model\.chat_template: .*{name} {message}"):
            ChatTokenizer(tiny_model_folder, str(tmp_path / name))


@pytest.mark.parametrize("template", ["{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ 'x' * 10 ** 17 }}"])
def test_a_template_without_end_is_refused(tiny_model_folder, template):
    with pytest.raises(DataError, match="the chat template refuses a conversation"):
        ChatTokenizer(tiny_model_folder, template).prompt((Message("user", "x"),))


def test_plain_tokens_are_those_that_stand_for_text(tiny_tokenizer, tiny_model_folder) -> None:
    special = set(tiny_tokenizer.all_special_ids)
    assert special
    plain = ChatTokenizer(tiny_model_folder).plain_tokens
    assert set(plain.tolist()) == set(range(len(tiny_tokenizer))) - special
    assert ChatTokenizer(tiny_model_folder).opening == ()
