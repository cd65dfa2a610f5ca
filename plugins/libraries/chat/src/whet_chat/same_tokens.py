"""Whether two models speak of the same tokens: without that, the numbers of one mean nothing to the other."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from whet.data.model_info import locate
from whet.errors import ConfigError

if TYPE_CHECKING:
    from whet.interfaces.algorithm import Parts

_SHOWN = 3


def folders_of_roles(parts: "Parts", names: Collection[str]) -> dict[str, Path]:
    """Return the model folder of each role with a model of its own, of those that read the policy's tokens: `names`.

    Raises `ConfigError` where one does not have the tokens of the policy.
    """
    folders = dict[str, Path]()
    for name, role in parts.config.roles.items():
        if name in names and name in parts.roles and role.model:
            folders[name] = locate(role.model.path, role.model.revision, config_only=True)
            refuse_other_tokens(f"roles.{name}.model", folders[name], parts.chat.folder)
    return folders


def refuse_other_tokens(key: str, folder: Path, policy: Path) -> None:
    """Raise `ConfigError` with the first differences where a model does not have the tokens of the policy.

    Both are model folders. `key` is where the config names the first.
    """
    theirs, ours = _tokens(key, folder), _tokens("model.path", policy)
    if theirs == ours:
        return
    different = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    places = ((name, _place(theirs, name), _place(ours, name)) for name in different[:_SHOWN])
    told = ", ".join(f"{name!r} ({there} there, {here} here)" for name, there, here in places)
    raise ConfigError(
        f"{key}: {folder} has another tokenizer than the policy, whose tokens it reads: {len(different)} tokens "
        f"differ, e.g. {told}; choose a model with the same tokens"
    )


def _tokens(key: str, folder: Path) -> dict[str, int]:
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    try:
        tokens: dict[str, int] = Tokenizer.from_str(file.read_text(encoding="utf-8")).get_vocab(with_added_tokens=True)
    except Exception as error:  # the tokenizers library raises plain exceptions
        raise ConfigError(f"{key}: {file} cannot be read: {error}; tokens are compared with the policy's") from error
    return tokens


def _place(tokens: dict[str, int], name: str) -> str:
    return f"id {tokens[name]}" if name in tokens else "none"
