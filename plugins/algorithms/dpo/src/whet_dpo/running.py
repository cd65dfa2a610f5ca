"""The running mean of scores: sums over all trained batches, kept in the run folder as JSON lines.

    RUN/score-shift.jsonl      {"step": 3, "sums": [1.5, -2.25], "counts": [12, 12]}     chosen and rejected responses

A line holds the sums up to its step. A resume after step n takes the line of step n, so the result is the same bit for
bit. Lines of later steps are from a process that died before its next checkpoint.
"""

import json
import os
from pathlib import Path
from typing import Literal

from attrs import frozen

from whet.data.files import disk_errors, json_line
from whet.errors import CheckpointError


@frozen
class Tally:
    """Sums of the scores of two kinds of responses, desirable ones first, and their numbers."""

    sums: tuple[float, float] = (0.0, 0.0)
    counts: tuple[int, int] = (0, 0)

    def plus(self, other: "Tally") -> "Tally":
        """Return the sum of two tallies."""
        sums = (self.sums[0] + other.sums[0], self.sums[1] + other.sums[1])
        return Tally(sums, (self.counts[0] + other.counts[0], self.counts[1] + other.counts[1]))

    def mean(self, of: Literal["kinds", "responses"]) -> float:
        """Return the mean of the means of the kinds that occur, or the mean over all responses; 0 if there are none."""
        if of == "responses":
            return sum(self.sums) / max(sum(self.counts), 1)
        means = [total / count for total, count in zip(self.sums, self.counts, strict=True) if count]
        return sum(means) / max(len(means), 1)


class RunningTally:
    """The tally of all batches so far, in a file of the run folder."""

    def __init__(self, folder: str, done: int) -> None:
        """Begin after `done` steps. The file is read when it is first needed."""
        self._file, self._done = Path(folder).expanduser() / "score-shift.jsonl", done
        self._tally: Tally | None = None

    @property
    def tally(self) -> Tally:
        """Return the tally so far. Raises `CheckpointError` if the file does not have it."""
        if self._tally is None:
            self._tally = self._read(self._done) if self._done else Tally()
        return self._tally

    def add(self, tally: Tally, step: int) -> Tally:
        """Add the batch of a step, sync the file to disk, and return the tally."""
        self._tally = self.tally.plus(tally)
        row = {"step": step, "sums": list(self.tally.sums), "counts": list(self.tally.counts)}
        with disk_errors(self._file):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write(("" if self._whole() else "\n") + json_line(row))
                stream.flush()
                os.fsync(stream.fileno())
        return self.tally

    def _whole(self) -> bool:
        """Return whether the last line of the file is whole, or there is none."""
        with self._file.open("rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            stream.seek(max(end - 1, 0))
            return stream.read(1) in (b"", b"\n")

    def _read(self, done: int) -> Tally:
        lines = self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else []
        for line in reversed(lines):
            try:
                row = json.loads(line)
                if row["step"] == done:
                    return Tally((row["sums"][0], row["sums"][1]), (row["counts"][0], row["counts"][1]))
            except (ValueError, KeyError, TypeError, IndexError):
                continue  # cut short by a kill; a whole line of the same step follows or is not needed
        raise CheckpointError(
            f"{self._file} has no line of step {done}, and the run continues after it: the line holds the mean that "
            "rewards are compared with (shift: running). Put the file back, or start again in another run.folder"
        )
