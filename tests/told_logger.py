"""A logger that writes down all that it is told."""

import json
from collections.abc import Mapping

from attrs import frozen

import whet
from whet.interfaces.logger import Event, RunInfo


@frozen
class SeeingConfig:
    """Writes what a logger is told into a file."""

    fails_at: str = ""
    """The kind of event at which it fails."""


class Seeing:
    def __init__(self, config: SeeingConfig, run: RunInfo) -> None:
        self.file, self.config = run.folder / "seen.jsonl", config

    def _write(self, *what: object) -> None:
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(what) + "\n")

    def event(self, event: Event) -> None:
        if event.kind == self.config.fails_at:
            raise ConnectionError("no room")
        self._write(event.kind, event.step, event.name, dict(event.details), list(event.rows))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write("log", step)

    def status(self, text: str) -> None:
        pass

    def rewind(self, step: int) -> None:
        self._write("rewind", step)

    def close(self, failed: bool) -> None:
        self._write("close", failed)


@whet.hookimpl
def whet_loggers() -> list[whet.Component]:
    return [whet.Component("seeing", SeeingConfig, ":Seeing")]
