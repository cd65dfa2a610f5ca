"""An environment that notes which worker processes there are while it is evaluated."""

from pathlib import Path

from attrs import frozen

from whet import hookimpl
from whet.component import Component
from whet.data.records import Task
from whet.interfaces.environment import SingleTurn
from whet_testing.processes import descendants


@frozen
class WitnessConfig:
    """Where to note them."""

    notes: str


def witness(config: WitnessConfig) -> SingleTurn:
    """Build the environment."""

    def note(text: str, data: object) -> float:
        workers = {p.command.split()[-1] for p in descendants() if "whet.runtime.worker_process" in p.command}
        Path(config.notes).write_text("\n".join(sorted(workers)))
        return 1.0

    return SingleTurn({"test": [Task("Say it")]}, rewards={"seen": note})


@hookimpl
def whet_environments():
    """Offer `witness`."""
    return [Component("witness", WitnessConfig, "witness:witness")]
