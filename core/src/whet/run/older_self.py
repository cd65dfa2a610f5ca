"""A role that generates with the policy's weights of some steps ago, e.g. the opponent of a game.

    sync_every: 10      step    0 1 ...  9 10 11 ... 19 20
                        weights 0 0 ...  0 10 10 ... 10 20

A checkpoint of step 12 holds the weights of step 10 too, so a resumed run continues with the same opponent.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve

from whet.data.files import disk_errors

if TYPE_CHECKING:
    from whet.data.model_info import ModelInfo
    from whet.interfaces.backend import Backend
    from whet.interfaces.generator import Generator
    from whet.plan.roles import Role
    from whet.run.checkpoint import Checkpoint
    from whet.run.weight_sync import WeightSync


class OlderSelf:
    """Sends the policy's weights to one role, every few steps."""

    def __init__(self, role: "Role", sync: "WeightSync", folder: Path, saved: "Checkpoint | None") -> None:
        """Take a weight sync without ends, a folder for the role's weights, and the checkpoint of a resumed run."""
        self.part, self.sync, self._every, self._folder = f"roles/{role.name}", sync, role.sync_every, folder
        if saved and (held := saved.part(self.part)).is_dir():
            _link(held, folder)

    def model(self, model: "ModelInfo") -> "ModelInfo":
        """Return the model from which the role starts: the one in its folder, or else `model`, that of the run."""
        return evolve(model, path=str(self._folder)) if self._folder.is_dir() else model

    def connect(self, backend: "Backend", generator: "Generator", before: Callable[[], None]) -> None:
        """Take both ends, once they are started; see `WeightSync.connect`."""
        self._backend = backend
        self.sync.connect(backend, generator, before=before)

    def follow(self, version: int) -> None:
        """Send the backend's weights, which are those of step `version`, if they are due.

        At version 0 the role has them: it has loaded the same model.
        """
        if version and version % self._every == 0:
            self.sync(version=version)
            if self._every > 1:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._backend.export(self._folder)

    def save(self, folder: Path) -> None:
        """Write the role's weights, for a checkpoint. There is none to write before the first weight sync."""
        if self._folder.is_dir():
            _link(self._folder, folder)


def _link(source: Path, target: Path) -> None:
    """Put the files of a folder into another one, without a copy if both are on one file system."""

    def place(file: str, at: str) -> None:
        try:
            os.link(file, at)
        except OSError:
            shutil.copyfile(file, at)

    with disk_errors(target):
        shutil.copytree(source, target, copy_function=place, dirs_exist_ok=True)
