"""Asks for a digit. An even one is right, which only a judge says."""

from attrs import frozen

import whet


@frozen
class DigitsConfig:
    """Nothing to set."""


def even(text, data):
    return float(text.strip() in tuple("02468"))


def build(config):
    tasks = [whet.Task(f"Say {n}") for n in range(50)]
    return whet.SingleTurn({"train": tasks, "test": tasks[:16]}, {"even": even})


@whet.hookimpl
def whet_environments():
    return [whet.Component("digits", DigitsConfig, ":build")]
