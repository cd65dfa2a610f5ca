"""Rewards every even digit: something that a random model can learn a little of at once."""

from attrs import frozen

from whet import hookimpl
from whet.component import Component
from whet.data.records import Task
from whet.interfaces.environment import SingleTurn


@frozen
class EvenConfig:
    """Nothing to set."""


def share(text, data):
    return sum(c in "02468" for c in text) / 12


def build(config):
    return SingleTurn({"train": [Task(f"Say {n}") for n in range(50)]}, {"even": share})


@hookimpl
def whet_environments():
    return [Component("even", EvenConfig, "even_digits:build")]
