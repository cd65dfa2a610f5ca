"""Text that is continued as it is: it begins with the tokens that the model's own tokenizer puts before a text."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from whet.data.records import Sampling
from whet.rollout.gate import Gate
from whet_chat.tokenizer import ChatTokenizer
from whet_endpoint.chat import TextDialect
from whet_endpoint.episode import EpisodeResponder, FailureScope
from whet_endpoint.memory import Memory
from whet_endpoint.requests import Rules
from whet_endpoint.run import RunResponder
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
