"""The files of an exported model folder, as `transformers` and engines read them."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from whet_training import export

WEIGHTS = {f"w{n}": torch.arange(100.0) + n for n in range(5)}


def read(folder):
    """Return all weights of a folder, by its index where there are several files."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return load_file(folder / "model.safetensors")
    document = json.loads(index.read_text())
    found = {name: load_file(folder / file)[name] for name, file in document["weight_map"].items()}
    assert document["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


@pytest.mark.parametrize(("file_bytes", "files"), [(1 << 30, 1), (800, 3), (1, 5)])
def test_files_hold_all_weights_whatever_their_size(tmp_path, monkeypatch, file_bytes, files):
    monkeypatch.setattr(export, "FILE_BYTES", file_bytes)
    export.write_weights(tmp_path, WEIGHTS.items())
    assert len(list(tmp_path.glob("*.safetensors"))) == files
    found = read(tmp_path)
    assert set(found) == set(WEIGHTS)
    assert all(torch.equal(found[name], tensor) for name, tensor in WEIGHTS.items())
    assert {path.suffix for path in tmp_path.iterdir()} <= {".safetensors", ".json"}


def test_several_writers_make_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "FILE_BYTES", 800)
    names = list(WEIGHTS)
    for part, mine in enumerate((names[:3], names[3:])):
        export.write_part(tmp_path, ((name, WEIGHTS[name]) for name in mine), part)
    export.join_parts(tmp_path)
    assert sorted(file.name for file in tmp_path.glob("*.safetensors")) == [
        f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)
    ]
    assert all(torch.equal(tensor, WEIGHTS[name]) for name, tensor in read(tmp_path).items())


@pytest.fixture
def padded(tiny_model_folder, tmp_path):
    """Return a model folder with these added tokens, this padding token and this chat template, and its config."""

    def make(pad, template, renamed=()):
        folder = tmp_path / "model"
        export.copy_companions(tiny_model_folder, folder)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        for kept in ("chat_template", "pad_token", "extra_special_tokens"):
            settings.pop(kept, None)
        settings |= {"pad_token": pad, "eos_token": "<|im_end|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "special_tokens_map.json").unlink(missing_ok=True)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        if template:
            (folder / "chat_template.jinja").write_text(template)
        config = PretrainedConfig(eos_token_id=list(renamed) or None, pad_token_id=None)
        export.set_padding(config, folder)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        assert config.pad_token_id == tokenizer.pad_token_id
        return tokenizer

    return make


CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize("template", [CHATML, CHATML.replace("|>\n{% endfor", "|>{% endfor"), ""])
def test_the_padding_token_ends_neither_a_conversation_nor_a_text_without_a_template(padded, template):
    assert padded("<|im_end|>", template).pad_token not in ("<|im_end|>", None)


def test_a_padding_token_that_ends_nothing_stays(padded):
    assert padded("<|endoftext|>", CHATML).pad_token == "<|endoftext|>"


def test_a_tokenizer_whose_special_tokens_all_end_texts_is_warned_of(padded, caplog):
    assert padded("<|im_end|>", CHATML, renamed=(0, 1, 2)).pad_token == "<|im_end|>"
    assert "none is left for padding" in caplog.text


def test_the_padding_token_is_that_of_an_older_file_of_special_tokens_too(tiny_model_folder, tmp_path):
    """`transformers` takes what `special_tokens_map.json` says before what `tokenizer_config.json` says."""
    export.copy_companions(tiny_model_folder, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    ends = {"pad_token": "<|im_end|>", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, **ends}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(ends))
    config = PretrainedConfig(eos_token_id=None, pad_token_id=None)
    export.set_padding(config, tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tokenizer.pad_token != "<|im_end|>"
    assert config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.eos_token == "<|im_end|>"


def test_named_chat_templates_and_files_of_other_processors_are_copied(tiny_model_folder, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_model_folder)
    tokenizer.chat_template = {"default": CHATML, "tool_use": "TOOLS"}
    tokenizer.save_pretrained(source)
    names = ("tekken.json", "preprocessor_config.json", "video_preprocessor_config.json")
    for name in names:
        (source / name).write_text(name)
    export.copy_companions(source, target)
    assert PreTrainedTokenizerFast.from_pretrained(target).chat_template == tokenizer.chat_template
    assert all((target / name).read_text() == name for name in names)
    for file in (source / "additional_chat_templates").iterdir():
        file.unlink()
    export.copy_companions(source, tmp_path / "other")
    assert not (tmp_path / "other/additional_chat_templates").exists()
