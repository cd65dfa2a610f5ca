"""The files beside the weights in a model folder."""

import json
import shutil
from pathlib import Path
from typing import Any

from whet.data.chat import ChatTokenizer
from whet.data.messages import Message
from whet.errors import DataError

COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "generation_config.json", "preprocessor_config.json", "processor_config.json", "*.py", "LICENSE*",
)  # fmt: skip


def copy_companions(source: Path, target: Path) -> None:
    """Copy tokenizer, chat template, generation config and model code without changes."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in COMPANIONS:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, target / file.name)


def set_padding(config: Any, folder: Path) -> None:
    """Write one padding token into a sequence classifier's config and into its tokenizer in `folder`.

    `transformers` reads the score at the last token that is not padding, so the padding token must differ from the
    token that ends a conversation. If the tokenizer has no such padding token, another special token is used.
    """
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").is_file():
        return
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    wanted = [tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token, *tokenizer.all_special_tokens]
    ids = {text: tokenizer.convert_tokens_to_ids(text) for text in wanted if text}
    last = _last_token(folder, tokenizer)
    pad = next((text for text, token in ids.items() if token != last), tokenizer.pad_token)
    if pad is None:
        return
    config.get_text_config().pad_token_id = config.pad_token_id = ids[pad]
    if pad != tokenizer.pad_token:
        file = folder / "tokenizer_config.json"
        settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        file.write_text(json.dumps({**settings, "pad_token": pad}, indent=2, ensure_ascii=False), encoding="utf-8")


def _last_token(folder: Path, tokenizer: Any) -> int | None:
    """Return the token that ends a conversation."""
    try:
        return int(ChatTokenizer(folder).training((Message("user", "?"), Message("assistant", "!"))).tokens[-1])
    except DataError:  # without a chat template, a text ends with eos_token
        end: int | None = tokenizer.eos_token_id
        return end
