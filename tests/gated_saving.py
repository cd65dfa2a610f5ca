"""A backend that is not done with the checkpoint of step 4 before a file says so. The file may say that it fails."""

import os
import time
from pathlib import Path

from attrs import frozen

from whet import hookimpl

HELD = "step-000004"


@frozen
class GatedGroup:
    """Spawns the workers of a group with `gated`."""

    whole: object

    def __getattr__(self, name):
        return getattr(self.whole, name)

    def spawn(self, target, arguments):
        return self.whole.spawn(f"file:{Path(__file__).resolve()}:gated", arguments)


def gated(rank, **arguments):
    """Build the worker of `fsdp2`. `gates/writing` names its process while it is held, until there is `gates/go`."""
    from whet_fsdp2 import checkpoint
    from whet_fsdp2.worker import Worker

    gates, write = Path(arguments["scratch"]).parents[1] / "gates", checkpoint.write

    def held(folder, tensors, **kwargs):
        write(folder, tensors, **kwargs)
        if not folder.parent.name.startswith(HELD) or not gates.is_dir():
            return
        partial = gates / "writing.partial"
        partial.write_text(str(os.getpid()))
        partial.rename(gates / "writing")
        while not (gates / "go").exists():
            time.sleep(0.01)
        if (gates / "go").read_text():
            raise OSError(28, "No space left on device")

    checkpoint.write = held
    return Worker(rank, **arguments)


@hookimpl(wrapper=True)
def whet_worker_group(role):
    """Hold the backend."""
    group = yield
    return GatedGroup(group) if role == "backend" else group
