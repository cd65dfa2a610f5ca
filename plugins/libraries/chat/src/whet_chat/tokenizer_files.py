"""Reads the tokenizer of a model folder: `tokenizer.json`, and the tokens that further files add to it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from whet.data.bounded import MODEL_VALUES, loads
from whet.errors import DataError


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty where there is no file. Raises `DataError` with what is wrong in it."""
    if not file.is_file():
        return {}
    try:
        value = loads(file.read_bytes(), MODEL_VALUES)
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{file} holds {type(value).__name__}, wanted a JSON object")
    return value


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens by name, as templates see them: `bos_token`, `eos_token`, ..."""
    extra = config.get("extra_special_tokens")
    named = {**config, **(extra if isinstance(extra, dict) else {})}
    tokens = {name: _content(value) for name, value in named.items() if name.endswith("_token")}
    return {name: text for name, text in tokens.items() if text is not None}


def _content(token: object) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def read_tokenizer(folder: Path, config: dict[str, Any], special: dict[str, str]) -> Tokenizer:
    """Return the tokenizer of a model folder with all tokens that its config adds. Raises `DataError`."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise DataError(
            f"{folder} has no tokenizer.json; write one with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        raise DataError(f"{file} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    try:
        missing = [token for token in _further_tokens(config, special) if token.content not in known]
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(f"{folder / 'tokenizer_config.json'} has added tokens that are none: {error}") from error
    tokenizer.add_tokens([token for token in missing if not token.special])
    tokenizer.add_special_tokens([token for token in missing if token.special])
    return tokenizer


def _further_tokens(config: dict[str, Any], special: dict[str, str]) -> Iterator[AddedToken]:
    """Yield the tokens that `tokenizer_config.json` adds, in order of id. Usually `tokenizer.json` has them all."""
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    decoder = config.get("added_tokens_decoder") or {}
    for _, token in sorted(decoder.items(), key=lambda item: int(item[0])):
        yield AddedToken(**{name: token[name] for name in names if name in token})
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    listed = [] if isinstance(extra, dict) else [_content(token) for token in extra]
    for text in dict.fromkeys([*special.values(), *listed]):
        if text:
            yield AddedToken(text, special=True, normalized=False)
