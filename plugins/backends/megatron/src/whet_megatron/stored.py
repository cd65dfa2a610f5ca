"""The weights of a model folder, read slice by slice."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from whet.data.model_info import weight_files
from whet.errors import WhetError


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
        if name not in self._file_of:
            raise WhetError(
                f"model.path: the weights in {self._folder} lack {name}; is the download complete, and is config.json "
                "that of these weights?"
            )
        return self._open(self._file_of[name]).get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight."""
        return tuple(self.slices(name).get_shape())

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


def _index(folder: Path) -> dict[str, str]:
    """Return the file of each weight, if the folder has an index."""
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return {}
    try:
        found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WhetError(f"model.path: {path} cannot be read: {error!r}") from error
    return {name: Path(file).name for name, file in found.items()}
