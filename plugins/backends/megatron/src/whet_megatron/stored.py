"""The weights of a model folder, read slice by slice."""

import json
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from whet.data.model_info import INDEX, ModelInfo, read_model, weight_files
from whet.errors import ConfigError, WhetError
from whet_training.left_out import check_left_out
from whet_weights.whole import DERIVED, HEAD

WHOLE = "model.safetensors"
"""The file of all weights. Where it is, an index is not read."""


class StoredWeights:
    """The safetensors files of a folder. Files are opened when a weight of theirs is first read."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._files: dict[str, Any] = {}
        self._file_of = _index(folder) or {
            name: file.name for file in weight_files(folder) for name in list(self._open(file.name).keys())
        }

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all weights."""
        return frozenset(self._file_of)

    def slices(self, name: str) -> Any:
        """Return a weight that is read when it is indexed. Raises `WhetError` if there is none of this name."""
        from safetensors import SafetensorError

        if name not in self._file_of:
            raise WhetError(
                f"model.path: the weights in {self._folder} lack {name}; is the download complete, and is config.json "
                "that of these weights?"
            )
        try:
            return self._open(self._file_of[name]).get_slice(name)
        except SafetensorError as error:
            raise WhetError(
                f"model.path: {self._folder / self._file_of[name]} lacks {name}, which the index {INDEX} says that it "
                f"holds; fetch both again: {error}"
            ) from error

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight."""
        return tuple(self.slices(name).get_shape())

    def check_left_out(
        self, read: Collection[str], info: ModelInfo, *, value: bool = False, aloud: bool = True
    ) -> None:
        """Warn of weights that were not `read`, if `aloud`. Heads that a model replaces are left out silently.

        Raises `WhetError` if they show that config.json is that of another model.
        """
        replaced = {HEAD} if value or info.config.get("tie_word_embeddings") else set()
        left_out = {name for name in self.names - set(read) - replaced if not name.endswith(DERIVED)}
        kind = info.architecture if value else info.architecture.replace("ForSequenceClassification", "ForCausalLM")
        check_left_out(str(self._folder), left_out, read, info.config, kind, aloud=aloud)

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._files:
            try:
                self._files[file] = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise WhetError(f"model.path: {self._folder / file} cannot be read: {error}") from error
        return self._files[file]


@contextmanager
def stored_weights(folder: str | Path) -> Iterator[StoredWeights]:
    """Yield the weights of a folder, and close its files."""
    with ExitStack() as stack:
        yield StoredWeights(Path(folder), stack)


def read_folder(path: str) -> ModelInfo:
    """Return the facts of a local model folder. Raises `ConfigError` if there is none, or it is no model folder."""
    if not Path(path).is_dir():
        raise ConfigError(
            f"there is no model folder {path!r}; names of the hub are not looked up here: download the model first"
        )
    return read_model(path)


def _index(folder: Path) -> dict[str, str]:
    """Return the file of each weight, if the folder's index is what counts: see `weight_files`."""
    path = folder / INDEX
    if (folder / WHOLE).is_file() or not path.is_file():
        return {}
    try:
        found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WhetError(f"model.path: {path} cannot be read: {error!r}") from error
    return {name: Path(file).name for name, file in found.items()}
