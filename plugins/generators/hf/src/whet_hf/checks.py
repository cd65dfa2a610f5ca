"""What shared weights do not allow in the other sections of a config. Imports no torch."""

from collections.abc import Iterator

from whet.component import Problem
from whet.config.sections import Config
from whet_hf.config import HfConfig

_OWN = "or set generator.weights: own"


def checked(config: Config) -> Iterator[Problem]:
    """Yield what a generator `hf` with shared weights does not allow beside it."""
    for name, role in config.roles.items():
        found = role.component.config
        if isinstance(found, HfConfig) and found.weights == "shared":
            words = "is shared, and only the section `generator` can share the backend's weights; set it to own"
            yield Problem(f"roles.{name}.weights", words)
    generator = config.generator.config if config.generator is not None else None
    if not isinstance(generator, HfConfig) or generator.weights == "own":
        return
    if (ranks := _ranks(config, "backend")) > 1:
        words = f"is shared, and the backend has {ranks} ranks, which split its weights; give both one rank"
        yield Problem("generator.weights", f"{words} (cluster.ranks or cluster.gpus), {_OWN}")
    if config.rollout.max_staleness:
        words = (
            f"is shared, and with rollout.max_staleness {config.rollout.max_staleness} weights change under requests"
        )
        yield Problem("generator.weights", f"{words}; set rollout.max_staleness: 0, {_OWN}")
    if config.endpoint.serve and getattr(config.backend.config, "lora", None) is None:
        words = "is shared, and the weights change under requests that endpoint.serve answers at any time"
        yield Problem(
            "generator.weights", f"{words}; train an adapter (backend.lora), leave out endpoint.serve, {_OWN}"
        )
    if config.weight_sync.content == "merged":
        words = "is merged, and an adapter cannot be merged into weights that are the trainer's; set it to auto"
        yield Problem("weight_sync.content", f"{words}, {_OWN}")


def _ranks(config: Config, role: str) -> int:
    """Return the ranks that `cluster` gives a role; 1 where it gives none."""
    return config.cluster.ranks.get(role) or config.cluster.gpus.get(role) or 1
