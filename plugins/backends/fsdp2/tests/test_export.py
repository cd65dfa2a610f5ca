"""What stands beside the weights of a sequence classifier, so that `transformers` reads scores where we do."""

import json
import shutil

import pytest
import torch

from whet.data.messages import Message
from whet.data.model_info import read_model
from whet.interfaces.workers import WorkerRank
from whet_chat.tokenizer import ChatTokenizer
from whet_fsdp2.worker import Worker
from whet_start.small_models import CHAT_TEMPLATE

ENDS_AT_ONCE = CHAT_TEMPLATE.replace("<|im_end|>\n{% endfor %}", "<|im_end|>{% endfor %}")
"""A template after which nothing follows the end of a turn."""


def answered(text):
    return (Message("user", "6*7?"), Message("assistant", text))


@pytest.fixture
def changed(folders, tmp_path):
    """Copy a model with another template and other settings of padding."""

    def change(template, tokenizer_pad, model_pad):
        folder = tmp_path / "model"
        shutil.copytree(folders(), folder)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings.pop("chat_template", None)
        settings.pop("pad_token", None)
        settings |= {"pad_token": tokenizer_pad} if tokenizer_pad else {}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "special_tokens_map.json").unlink(missing_ok=True)
        (folder / "chat_template.jinja").write_text(template)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": model_pad}))
        return folder

    return change


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, ENDS_AT_ONCE], ids=["newline", "at-once"])
@pytest.mark.parametrize("tokenizer_pad", ["<|endoftext|>", "<|im_end|>", None])
@pytest.mark.parametrize("model_pad", [0, 2, None])
def test_scores_in_a_padded_batch_are_those_of_each_alone(changed, tmp_path, template, tokenizer_pad, model_pad):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = changed(template, tokenizer_pad, model_pad)
    worker = Worker(WorkerRank("backend", 0, 1), {"head": "value"}, read_model(folder), scratch="")
    worker.export(str(tmp_path / "out"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.config.pad_token_id == tokenizer.pad_token_id
    chat = ChatTokenizer(tmp_path / "out")
    rows = [chat.training(answered(text)).tokens.tolist() for text in ("42", "I think that it is 43, or 44")]
    padded = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    for row, score in zip(rows, model(**padded).logits[:, 0], strict=True):
        states = model.base_model(input_ids=torch.tensor([row])).last_hidden_state
        assert score.item() == pytest.approx(model.score(states)[0, -1, 0].item(), abs=1e-5)
