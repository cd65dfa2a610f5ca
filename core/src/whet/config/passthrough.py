"""Arguments that go to a foreign engine as they are: which may be written, checked before anything starts."""

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from whet.component import Problem
from whet.config.words import nearest, path_segment

if TYPE_CHECKING:
    from whet.config.sections import Config


@frozen
class Passthrough:
    """What a generator's key `engine` may hold: any argument of the engine but those that are set elsewhere."""

    engine: str
    """Its name."""
    listed_by: str
    """The command that lists its arguments."""
    ours: Mapping[str, str]
    """Arguments that are set elsewhere in the config, and where."""
    fixed: Mapping[str, str]
    """Arguments that nobody may change, and why."""

    def wrong(self, written: Mapping[str, Any], known: Collection[str]) -> Iterator[tuple[str, str]]:
        """Find arguments that cannot be passed on: (name, what is wrong). known: the engine's own; empty: not found."""
        for name in written:
            if name in self.ours:
                yield name, f"is set by `{self.ours[name]}`; write it there"
            elif name in self.fixed:
                yield name, f"cannot be changed: {self.fixed[name]}"
            elif known and name not in known:
                meant = nearest(name, set(known) - set(self.ours) - set(self.fixed))
                hint = f"did you mean {meant!r}?" if meant else f"{self.listed_by} lists them"
                yield name, f"is no argument of the installed {self.engine} ({hint})"

    def problems(
        self, config: "Config", written: Mapping[str, Any], tensor_parallel: int, known: Collection[str]
    ) -> list[Problem]:
        """Say what is wrong with the generator of a config that uses the engine, with the path to each.

        known: the arguments of the engine in this interpreter; empty: it has none.
        """
        found = [
            Problem(f"generator.engine.{path_segment(name)}", message) for name, message in self.wrong(written, known)
        ]
        if tensor_parallel > 1 and config.cluster.gpus.get("generator"):
            message = f"is {tensor_parallel}, and a rank has one GPU; wanted 1, with a replica for each GPU"
            found.append(Problem("generator.tensor_parallel", message))
        return found
