"""Tasksets of verifiers (`pip install verifiers`): whet plays an episode of one turn, and the taskset scores it.

Agents of several turns need no adapter: they play at `model.endpoint()`, see docs/how-to/foreign-agent.md.
"""

from attrs import field, frozen

import whet


@frozen
class VerifiersConfig:
    """The tasks and rewards of a taskset of verifiers 0.4 or later."""

    taskset: str
    """Id of the taskset: a module whose `__all__` names one `Taskset`."""
    options: dict[str, object] = field(factory=dict)
    """Further keys of the taskset's own config."""


class Verifiers:
    def __init__(self, config):
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        chosen = {"taskset": {"id": config.taskset, **config.options}, "agent": {"runtime": {"type": "subprocess"}}}
        self._theirs = list(load_environment(resolve_env_config(chosen)).taskset)
        functions = self._theirs[0].hooks("reward")
        self.reward_weights = {reward.__name__: getattr(reward, "_vf_weight", 1.0) for reward in functions}
        self._tasks = [whet.Task(conversation(task.data), {"index": i}) for i, task in enumerate(self._theirs)]

    def tasks(self, split):
        if split != "train":
            raise whet.DataError(f"there is no split {split!r}; there is train")
        return self._tasks

    async def run(self, task, model):
        import verifiers.v1 as vf
        from verifiers.v1.types import AssistantMessage

        theirs, reply = self._theirs[task.data["index"]], await model.reply(task.prompt)
        about = vf.TraceTask(type=type(theirs).__name__, data=theirs.data)
        trace = vf.Trace(task=about, agent=vf.AgentInfo(config=vf.AgentConfig()))
        trace.nodes.append(vf.MessageNode(message=AssistantMessage(content=reply.text), sampled=True))
        await theirs.score(trace)
        return {name: reward.score for name, reward in trace.rewards.items()}

    def close(self):
        pass


def conversation(data):
    """Return the messages of a task of verifiers."""
    opening = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*opening, {"role": "user", "content": data.prompt}]
    return [*opening, *({"role": message.role, "content": message.content} for message in data.prompt)]


@whet.hookimpl
def whet_environments():
    return [whet.Component("verifiers", VerifiersConfig, ":Verifiers")]
