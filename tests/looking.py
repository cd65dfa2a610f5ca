"""An environment that starts programs, as tools and agents do, and writes down what of Ray's token these see."""

import json
import subprocess
import sys

from attrs import frozen

from whet import hookimpl
from whet.component import Component
from whet.data.records import Task

SHOW = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('RAY_AUTH')}))"


@frozen
class LookingConfig:
    """Where to write."""

    file: str = ""
    """A line is added to it for each program."""


class Looking:
    """Rewards even digits."""

    reward_weights = {}

    def __init__(self, config: LookingConfig) -> None:
        self.config = config
        self.look("built")

    def tasks(self, split: str) -> list[Task]:
        """Return fifty prompts."""
        return [Task(f"Say {n}") for n in range(50)]

    async def run(self, task, model):
        """Ask once, and start a program."""
        answer = await model.reply(task.prompt)
        self.look("played")
        return {"even": sum(c in "02468" for c in answer.text) / 12}

    def look(self, when: str) -> None:
        """Start a program that shows its environment."""
        done = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True)
        with open(self.config.file, "a", encoding="utf-8") as file:
            file.write(json.dumps({"when": when, **json.loads(done.stdout)}) + "\n")

    def close(self) -> None:
        """Nothing is held."""


@hookimpl
def whet_environments():
    return [Component("looking", LookingConfig, "looking:Looking")]
