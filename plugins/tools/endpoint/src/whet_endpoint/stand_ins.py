"""What a config has beside a generator, for `whet serve`: an algorithm and a backend that are never built.

`whet serve` loads this file as a plugin of one file, so no other command offers these names.
"""

from collections.abc import Iterable

from attrs import frozen

from whet import hookimpl
from whet.component import AlgorithmFacts, BackendFacts, Component
from whet.data.model_info import ModelInfo


@frozen
class Nothing:
    """There is nothing to set."""


def algorithm_facts(config: Nothing, model: ModelInfo) -> AlgorithmFacts:
    """Return the facts of an algorithm that asks for nothing but a generator beside it."""
    return AlgorithmFacts(inputs=frozenset({"data"}))


def backend_facts(config: Nothing, model: ModelInfo) -> BackendFacts:
    """Return the facts of a backend that holds nothing."""
    return BackendFacts(memory=lambda ranks, trained: ())


@hookimpl
def whet_algorithms() -> Iterable[Component]:
    """Offer the algorithm."""
    return [Component("nothing", Nothing, ":Nothing", facts=":algorithm_facts")]


@hookimpl
def whet_backends() -> Iterable[Component]:
    """Offer the backend."""
    return [Component("nothing", Nothing, ":Nothing", facts=":backend_facts")]
