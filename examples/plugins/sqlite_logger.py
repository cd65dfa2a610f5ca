"""Metrics, rollouts and events of a run in one SQLite file, to query while the run is under way.

sqlite3 runs/it/run.sqlite "SELECT step, value FROM metrics WHERE name = 'reward/mean'"
sqlite3 runs/it/run.sqlite "SELECT kind, details FROM events"
"""

import json
import sqlite3

from attrs import field, frozen

import whet

TABLES = """
CREATE TABLE IF NOT EXISTS metrics (step INTEGER, name TEXT, value REAL);
CREATE TABLE IF NOT EXISTS rollouts (step INTEGER, environment TEXT, reward REAL, messages TEXT);
CREATE TABLE IF NOT EXISTS events (step INTEGER, kind TEXT, details TEXT);
"""


@frozen
class SqliteConfig:
    """Metrics, rollouts and events in a SQLite file."""

    file: str = field(default="run.sqlite", metadata={"path": True, "writes": True})
    """Where to write, relative to the run folder."""


class SqliteLogger:
    def __init__(self, config, run):
        path = run.folder / config.file
        path.parent.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(path)
        self._database.executescript(TABLES)
        self.rewind(run.resumed_from or -1)

    def log(self, step, metrics):
        self._insert("metrics", [(step, name, float(value)) for name, value in metrics.items()])

    def event(self, event):
        if event.kind == "rollouts":
            rows = [(row["environment"], row["reward"], json.dumps(row["messages"])) for row in event.rows]
            self._insert("rollouts", [(event.step, *row) for row in rows])
        elif not event.rows:
            self._insert("events", [(event.step, event.kind, json.dumps(event.details))])

    def status(self, text):
        pass

    def rewind(self, step):
        with self._database:
            for table in ("metrics", "rollouts"):  # what happened stays; what is repeated is written again
                self._database.execute(f"DELETE FROM {table} WHERE step > ?", (step,))

    def close(self, failed):
        self._database.close()

    def _insert(self, table, rows):
        with self._database:
            for row in rows:
                self._database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)


@whet.hookimpl
def whet_loggers():
    return [whet.Component("sqlite", SqliteConfig, ":SqliteLogger")]
