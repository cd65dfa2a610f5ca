"""Text that is continued as it is: it begins with the tokens that the model's own tokenizer puts before a text."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing

from whet.data.records import Completion, IntArray, Sampling
from whet.rollout.gate import Gate
from whet_chat.tokenizer import ChatTokenizer
from whet_endpoint.chat import TextDialect
from whet_endpoint.choices import Tokens
from whet_endpoint.episode import EpisodeResponder, FailureScope
from whet_endpoint.memory import Memory
from whet_endpoint.reading import read_choice
from whet_endpoint.requests import Rules
from whet_endpoint.run import RunResponder
from whet_endpoint.streaming import RunningText
from whet_testing.fakes import FakeGenerator

BEGIN = "<|im_start|>"


@pytest.fixture
def beginning(tiny_model_folder: Path, tmp_path: Path) -> Path:
    """Return a model folder whose tokenizer puts a begin token before a text."""
    folder = tmp_path / "beginning"
    shutil.copytree(tiny_model_folder, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pair = (BEGIN, tokenizer.token_to_id(BEGIN))
    tokenizer.post_processor = TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[pair])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("prompt", ["hello world", f"{BEGIN}hello world"])
def test_a_text_begins_as_transformers_and_training_begin_it(beginning: Path, prompt: str) -> None:
    from transformers import AutoTokenizer

    chat = ChatTokenizer(beginning)
    wanted = AutoTokenizer.from_pretrained(beginning)("hello world").input_ids
    assert chat.training_completion("hello world", " a").tokens[: len(wanted)].tolist() == wanted
    rules = Rules(Sampling(8, stop_tokens=chat.stop_tokens), fixed=True)
    request = TextDialect().read({"prompt": prompt}, rules, Memory())
    run = RunResponder(FakeGenerator("yes", codec=chat), chat, Gate(), rules, 0, 0, None)
    sequence: Any = type("Sequence", (), {"messages": (), "turns": 0})()
    episode = EpisodeResponder(sequence, chat, rules, FailureScope())
    for tokens in (run._tokens(request), episode._recorded(request)[2]):
        assert np.array_equal(tokens, wanted)


@pytest.fixture
def spaced(tmp_path: Path) -> ChatTokenizer:
    """Return a tokenizer that marks words by their space and removes that of the first word, as Llama 2's does."""
    words = ["<s>", "</s>", "<unk>", "▁Paris", "▁is", "▁The", "▁a", ".", "▁"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(words[:3])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}), encoding="utf-8")
    return ChatTokenizer(tmp_path)


def shown(chat: ChatTokenizer, tokens: IntArray, at_a_time: int, **fields: Any) -> tuple[Any, list[Any]]:
    """Return the choice of a completion, and its chunks where it is streamed some tokens at a time."""
    dialect, rules = TextDialect(), Rules(Sampling(64, stop_tokens=chat.stop_tokens), fixed=False)
    request = dialect.read({"prompt": "a", "logprobs": 0, **fields}, rules, Memory())
    logprobs = np.zeros(len(tokens), np.float32)
    choice = read_choice(request, chat, np.arange(3), Completion("x", tokens, logprobs, "length", ((0, 0),)))
    running, writer, unsent, written = (
        RunningText(request, chat),
        dialect.writer(request, "x", chat),
        list[Tokens](),
        b"",
    )
    for begin in range(0, len(tokens), at_a_time):
        part = slice(begin, begin + at_a_time)
        unsent.append(Tokens(tokens[part], logprobs[part]))
        for piece in running.add(tokens[part]):
            written += writer.piece(0, piece, unsent)
            unsent = []
    for piece in running.end(choice):
        written += writer.piece(0, piece, unsent)
        unsent = []
    written += writer.end([choice], [unsent])
    lines = [line.removeprefix("data: ") for line in written.decode().splitlines() if line.startswith("data: {")]
    (whole,) = dialect.response(request, "x", [choice], chat)["choices"]
    return whole, [json.loads(line)["choices"][0] for line in lines]


@pytest.mark.parametrize("at_a_time", [1, 2, 10])
def test_the_space_before_the_first_word_of_a_completion_stays(spaced: ChatTokenizer, at_a_time: int) -> None:
    whole, chunks = shown(spaced, np.array([0, 3, 4, 0, 6, 7]), at_a_time)
    assert whole["text"] == "".join(chunk["text"] for chunk in chunks) == " Paris is a."
    assert whole["logprobs"]["text_offset"] == [0, 0, 6, 9, 9, 11]


@pytest.mark.parametrize("at_a_time", [1, 3, 100])
@pytest.mark.parametrize(("said", "text"), [("é漢 ab🎉c<|im_start|>d", "é漢 ab🎉cd"), ("é ab STOP c", "é ab ")])
def test_offsets_are_those_of_the_text(tiny_model_folder: Path, said: str, text: str, at_a_time: int) -> None:
    chat = ChatTokenizer(tiny_model_folder)
    tokens = chat.encode(said)
    whole, chunks = shown(chat, tokens, at_a_time, stop=["STOP"])
    assert whole["text"] == text == "".join(chunk["text"] for chunk in chunks)
    offsets = whole["logprobs"]["text_offset"]
    for token, at in zip(tokens, offsets, strict=True):
        piece = chat.decode([token])
        assert at == len(text) or piece.startswith("\ufffd") or text.startswith(piece, at)
    assert (offsets[0], max(offsets), offsets) == (0, offsets[-1], sorted(offsets))
    assert offsets[-1] == (len(text) if "STOP" in said else len(text) - 1)
    if "STOP" not in said:
        streamed = [at for chunk in chunks if chunk["logprobs"] for at in chunk["logprobs"]["text_offset"]]
        assert streamed == offsets


def test_bytes_that_are_no_character_count_as_they_are_shown(tiny_model_folder: Path) -> None:
    chat = ChatTokenizer(tiny_model_folder)
    broken = [*chat.encode("é")[1:], *chat.encode("é")[1:], *chat.encode("32"), *chat.encode("é")[:1]]
    whole, _ = shown(chat, np.array(broken), 1)
    assert (whole["text"], whole["logprobs"]["text_offset"]) == ("\ufffd\ufffd32\ufffd", [0, 1, 2, 4])
