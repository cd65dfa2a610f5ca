"""Whether two models speak of the same tokens: without that, logprobs of one mean nothing to the other."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.data.model_info import locate, read_model
from whet.errors import ConfigError

if TYPE_CHECKING:
    from whet.config.sections import ModelSection

_SHOWN = 3


def rows_of_teacher(role: str, section: "ModelSection", student: Path) -> int:
    """Return a teacher's rows of logits. Raises `ConfigError` with the first differences where its tokens are not the
    student's.
    """
    folder = locate(section.path, section.revision, config_only=True)
    theirs, ours = _tokens(folder), _tokens(student)
    if theirs != ours:
        different = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
        places = ((name, _place(theirs, name), _place(ours, name)) for name in different[:_SHOWN])
        told = ", ".join(f"{name!r} ({there} there, {here} here)" for name, there, here in places)
        raise ConfigError(
            f"roles.{role}.model: {section.path} has another tokenizer than the student: {len(different)} tokens "
            f"differ, e.g. {told}; a teacher must have the student's tokens, so that both speak of the same"
        )
    return read_model(folder).vocab_size


def _tokens(folder: Path) -> dict[str, Any]:
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    try:
        tokens: dict[str, Any] = Tokenizer.from_str(file.read_text(encoding="utf-8")).get_vocab(with_added_tokens=True)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; distillation compares tokenizers") from error
    except Exception as error:  # the tokenizers library raises plain exceptions
        raise ConfigError(f"{file} is no tokenizer: {error}; distillation compares tokenizers") from error
    return tokens


def _place(tokens: dict[str, Any], name: str) -> str:
    return f"id {tokens[name]}" if name in tokens else "none"
