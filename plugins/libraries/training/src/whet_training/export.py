"""The files of an exported model folder: weights, config, and what is copied from the folder that was trained."""

import json
import logging
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from whet.data.files import use_umask
from whet.data.messages import Message
from whet.errors import DataError
from whet.plugins.features import chats

logger = logging.getLogger(__name__)

COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "tekken.json", "chat_template*", "additional_chat_templates/*.jinja", "generation_config.json",
    "*preprocessor_config.json", "processor_config.json", "*.py", "LICENSE*",
)  # fmt: skip


FILE_BYTES = 4 << 30
"""A file of weights is written as soon as the collected tensors reach this size."""


def write_weights(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write weights as `transformers` names their files. At most `FILE_BYTES` and a tensor are in memory at a time."""
    write_part(folder, weights)
    join_parts(folder)


def write_part(folder: Path, weights: Iterable[tuple[str, Tensor]], part: int = 0) -> None:
    """Write the weights of one of several writers, which all write to one folder. `join_parts` names the files."""
    chunk, size, count = dict[str, Tensor](), 0, 0
    for name, tensor in weights:
        chunk[name] = tensor.detach().cpu().contiguous()
        size += chunk[name].nbytes
        if size >= FILE_BYTES:
            _write_file(folder, part, count, chunk)
            chunk, size, count = {}, 0, count + 1
    if chunk or not count:
        _write_file(folder, part, count, chunk)


def join_parts(folder: Path) -> None:
    """Name the files of all writers as `transformers` does, and write their index, once all are written."""
    files = sorted(folder.glob("*.safetensors.partial"))
    if len(files) == 1:
        files[0].rename(folder / "model.safetensors")
        return
    listed, total = dict[str, str](), 0
    for number, file in enumerate(files, 1):
        place = folder / f"model-{number:05d}-of-{len(files):05d}.safetensors"
        for name, entry in _header(file).items():
            if name != "__metadata__":
                listed[name] = place.name
                total += entry["data_offsets"][1] - entry["data_offsets"][0]
        file.rename(place)
    index = {"metadata": {"total_size": total}, "weight_map": listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _write_file(folder: Path, part: int, number: int, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    path = folder / f"{part:05d}-{number:05d}.safetensors.partial"
    save_file(tensors, path, metadata={"format": "pt"})
    use_umask(path)


def _header(file: Path) -> dict[str, Any]:
    """Return the header of a file that this module wrote."""
    with file.open("rb") as stream:
        found: dict[str, Any] = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        return found


def copy_companions(source: Path, target: Path) -> None:
    """Copy tokenizer, chat templates, generation config and model code without changes."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in COMPANIONS:
        for file in filter(Path.is_file, sorted(source.glob(pattern))):
            copy = target / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)


def set_padding(config: Any, folder: Path) -> None:
    """Write one padding token into a sequence classifier's config and into its tokenizer in `folder`.

    `transformers` reads the score at the last token that is not padding, so the padding token must differ from every
    token that ends what is scored: a conversation, or a text without a chat template. If the tokenizer's own padding
    token ends one, another special token is used.
    """
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").is_file():
        return
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    named = (tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token)
    wanted = [*named, *tokenizer.all_special_tokens, *sorted(tokenizer.get_added_vocab())]
    ids = {text: tokenizer.convert_tokens_to_ids(text) for text in wanted if text}
    ends = _last_tokens(config, folder, tokenizer)
    pad = next((text for text, token in ids.items() if token not in ends), tokenizer.pad_token)
    if pad is None or ids[pad] in ends:
        logger.warning(
            f"{folder}: every special token of the tokenizer ends a conversation or a text, so none is left for "
            "padding; score one text at a time, or add a token to the tokenizer of the model that the run starts from"
        )
    if pad is None:
        return
    config.get_text_config().pad_token_id = config.pad_token_id = ids[pad]
    if pad != tokenizer.pad_token:
        _write_into(folder / "tokenizer_config.json", pad_token=pad)
        if (older := folder / "special_tokens_map.json").is_file():  # what it says wins
            _write_into(older, pad_token=pad)


def _write_into(file: Path, **changes: str) -> None:
    """Change what a JSON file says. Make it if it is not there."""
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    file.write_text(json.dumps({**settings, **changes}, indent=2, ensure_ascii=False), encoding="utf-8")


def _last_tokens(config: Any, folder: Path, tokenizer: Any) -> set[int | None]:
    """Return the tokens that may end what is scored: those that end a text, and the last one of a conversation."""
    stated = config.get_text_config().eos_token_id
    ends = {tokenizer.eos_token_id, *(stated if isinstance(stated, list | tuple) else [stated])}
    with suppress(DataError):  # without a chat template there are only texts
        talk = (Message("user", "?"), Message("assistant", "!"))
        ends.add(int(chats().ChatTokenizer(folder).training(talk).tokens[-1]))
    return ends
