"""The environment `openenv`: plays what an OpenEnv server runs. Each task is a seed.

reset with the seed -> observation -> response with an action -> step -> observation, reward -> ... until done
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress

from whet.data.messages import Conversation, Message
from whet.data.randomness import derive_seed
from whet.data.records import Task
from whet.errors import ContextFull, DataError
from whet.interfaces.environment import Model
from whet_data.generated import GeneratedTasks
from whet_data.quoting import cut, filled, without_markers
from whet_data.servers import token_in
from whet_env_openenv.actions import InvalidAction, action_format
from whet_env_openenv.config import OpenEnvConfig
from whet_env_openenv.session import ActionRefused, Observation, Server
from whet_sandbox.gate import Gate

_SEEDS = 1 << 31
"""Servers take seeds below this number: NumPy's and Gymnasium's limit is 2^32, and some keep a C int."""
_LONGEST_REASON = 500


class OpenEnv:
    """The environment `openenv`. The server must be running when the environment is built."""

    def __init__(self, config: OpenEnvConfig) -> None:
        self._config = config
        token = token_in(config.token_variable, "openenv.token_variable")
        self._server = Server(config.url, token, config.seconds, config.message_bytes)
        self._format = action_format(config, self._server.action_schema())
        self._free = Gate(config.sessions)

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Weight 1 for `reward`. `done` and `steps` are only recorded."""
        return {"reward": 1.0, "invalid": self._config.invalid_weight, "done": 0.0, "steps": 0.0}

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of `train` or `test`."""
        counts = {"train": self._config.train_tasks, "test": self._config.test_tasks}
        if split not in counts:
            raise DataError(f"there is no split {split!r}; there are train, test")
        parity = int(split == "test")

        def task(index: int) -> Task:
            drawn = derive_seed(self._config.seed, f"openenv-{split}", index) % (_SEEDS // 2)
            seed = 2 * drawn + parity  # so that no seed is in both splits
            return Task(self._opening({}), {"seed": seed}, id=f"seed {seed}")

        return GeneratedTasks(counts[split], task)

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Play one episode in a session of its own. Returns its rewards. Raises `InfrastructureError`."""
        rewards: list[float] = []
        invalid, done = 0, False
        async with self._free.place(), self._server.session() as session:
            now = await session.reset({**self._config.reset, "seed": task.data["seed"]})
            message: Conversation | str = self._opening(now.observation)
            done = now.done
            with suppress(ContextFull):  # the episode is then over
                while not done and len(rewards) + invalid < self._config.turns:
                    text = (await model.reply(message)).text
                    try:
                        now = await session.step(self._format.action(text))
                    except (InvalidAction, ActionRefused) as error:
                        invalid += 1
                        message = without_markers(f"Invalid action. {str(error)[:_LONGEST_REASON]}")
                        continue
                    rewards.append(now.reward)
                    done, message = now.done, self._shown(now.observation)
            _record(model, now, self._shown(now.observation))
        reward = sum(rewards) if self._config.reward == "sum" else (rewards or [0.0])[-1]
        counts = {"invalid": float(invalid), "done": float(done), "steps": float(len(rewards))}
        return {"reward": reward, **counts}

    def close(self) -> None:
        """Do nothing: sessions end with their episodes."""

    def _opening(self, observation: Mapping[str, object]) -> Conversation:
        system: Conversation = (Message("system", self._config.system),) if self._config.system else ()
        shown = {"actions": self._format.described(), "observation": self._shown(observation) if observation else ""}
        return (*system, Message("user", filled(self._config.prompt, shown)))

    def _shown(self, observation: Mapping[str, object]) -> str:
        """Return an observation as text for the model."""
        name = self._config.observation_field
        held = {key: value for key, value in observation.items() if key not in ("metadata", "reward", "done")}
        value = held.get(name, "") if name else next(iter(held.values())) if len(held) == 1 else held
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return cut(text, self._config.observation_characters)


def _record(model: Model, last: Observation, shown: str) -> None:
    model.record("end", shown)
    model.record("last_reward", last.reward)
