"""Records some sequences of a step token by token: the numbers of sampler, trainer and algorithm for each token.

    take            chooses sequences; the trainer scores them with the weights that are about to be trained
    train, sync     by the algorithm, which does not know about the recorder
    finish          adds the algorithm's columns; rows are made on the thread that writes them

Recording draws no random number and changes nothing, so a run's numbers are the same with and without it.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from whet.data.batch import Batch
from whet.data.records import FloatArray, Group, IntArray, Trajectory
from whet.rollout.collate import record

if TYPE_CHECKING:
    from whet.config.sections import RecordSection
    from whet.interfaces.backend import Backend

ADVANTAGES = "advantages"
"""Column of a batch, per sequence or per token."""

Rows = list[dict[str, Any]]
Score = Callable[[Batch], FloatArray]
"""Return the logprobs [N] of a batch's tokens under the trainer's current weights; 0 where `loss_mask` is false."""


@frozen(eq=False)
class Taken:
    """A batch as the stream returned it, before the algorithm saw it."""

    batch: Batch
    scored: Mapping[int, FloatArray | None]
    """Positions of the sequences to record -> the trainer's logprobs [L], or None if the trainer cannot compute
    them."""


class TokenRecorder:
    """Chooses the sequences of a step to record token by token, and makes the rows of all episodes.

    Obeys `whet.rollout.recorder.Recorder`.
    """

    def __init__(self, section: "RecordSection", score: Score | None, pieces: Callable[[IntArray], list[str]]) -> None:
        """Record as a section states. `score` is None if the trainer cannot score; `pieces` returns the text of each
        token.
        """
        self._section, self._score, self._pieces = section, score, pieces
        self._taken: Taken | None = None

    def due(self, step: int) -> bool:
        """Return whether a step is recorded. It depends only on the step's number, so a longer run has the same
        records.
        """
        every = self._section.every
        return every > 0 and (step == 1 or step % every == 0)

    def taken(self, step: int, batch: Batch) -> None:
        """Choose sequences of a batch before it is trained on, and have the trainer score them.

        If a step takes several batches, the first one is used.
        """
        if self._taken is None and self.due(step):
            chosen = self._first(batch)
            scored: dict[int, FloatArray | None] = dict.fromkeys(chosen)
            if chosen and self._score is not None:
                part = batch.take(chosen)
                scored = dict(zip(chosen, _by_sequence(self._score(part), part["lengths"]), strict=True))
            self._taken = Taken(batch, scored)

    def rows(self, groups: Sequence[Group], finished: Batch) -> Callable[[], Rows]:
        """Return a function that returns a row for each episode. Any thread may call it.

        `finished` is the batch with the columns that the algorithm added.
        """
        taken, self._taken = self._taken, None
        return lambda: self._rows(groups, taken, finished)

    def _first(self, batch: Batch) -> list[int]:
        """Return the positions of the sequences of the first groups, as many as fit."""
        group = batch["group"]
        return self._fitting(batch, np.flatnonzero(np.isin(group, list(dict.fromkeys(group))[: self._section.groups])))

    def _fitting(self, batch: Batch, positions: Sequence[int] | IntArray, used: int = 0) -> list[int]:
        """Return the positions of sequences that fit into the remaining tokens. After one that does not fit, shorter
        ones may.
        """
        chosen = []
        for position in positions:
            length = int(batch["lengths"][position])
            if used + length <= self._section.max_tokens:
                chosen.append(int(position))
                used += length
        return chosen

    def _rows(self, groups: Sequence[Group], taken: Taken | None, finished: Batch) -> Rows:
        rows = [row for group in groups for row in record(group)]
        for row, advantage in zip(rows, _advantages(groups, finished), strict=False):
            row["advantage"] = advantage
        if taken is None:
            return rows
        batch, scored = taken.batch, dict(taken.scored)
        added = _added(taken.batch, finished)
        if added:
            batch, scored = finished, {**scored, **self._widest(taken, finished)}
        position = 0
        for row, episode in zip(rows, (e for group in groups for e in group.episodes), strict=True):
            here = range(position, position := position + len(episode.trajectories))
            sequences = [
                {**self._sequence(t, scored[i]), "columns": _columns(batch.take([i]), added)}
                for i, t in zip(here, episode.trajectories, strict=True)
                if i in scored
            ]
            if sequences:
                row["sequences"] = sequences
        return rows

    def _widest(self, taken: Taken, finished: Batch) -> dict[int, FloatArray]:
        """Return the sequences in which sampler and trainer differ most, with the trainer's logprobs.

        Empty unless the algorithm had the whole batch scored.
        """
        sampler, trainer = finished["sampler_logprobs"], finished.per_token.get("old_logprobs")
        if trainer is None or np.array_equal(trainer, sampler):
            return {}
        gaps = _by_sequence(np.where(finished["loss_mask"], np.abs(trainer - sampler), 0), finished["lengths"])
        widest = sorted(range(len(gaps)), key=lambda i: -gaps[i].max(initial=0.0))[: self._section.groups]
        used = sum(len(gaps[i]) for i in taken.scored)
        chosen = self._fitting(finished, [i for i in widest if i not in taken.scored], used)
        scores = _by_sequence(trainer, finished["lengths"])
        return {i: scores[i] for i in chosen}

    def _sequence(self, trajectory: Trajectory, trainer: FloatArray | None) -> dict[str, Any]:
        return {
            "prompt_length": trajectory.prompt_length,
            "stop": trajectory.stop,
            "tokens": trajectory.tokens.tolist(),
            "pieces": self._pieces(trajectory.tokens),
            "loss_mask": trajectory.loss_mask.astype(int).tolist(),
            "versions": trajectory.versions.tolist(),
            "sampler_logprobs": plain(trajectory.logprobs),
            **({} if trainer is None else {"trainer_logprobs": plain(trainer)}),
        }


def make_recorder(
    section: "RecordSection", outputs: Collection[str], backend: "Backend", pieces: Callable[[IntArray], list[str]]
) -> TokenRecorder:
    """Return a recorder, with the logprobs of a backend that can compute them."""

    def score(batch: Batch) -> FloatArray:
        return np.asarray(backend.score(batch, ("logprobs",))["logprobs"])

    return TokenRecorder(section, score if "logprobs" in outputs else None, pieces)


def _advantages(groups: Sequence[Group], finished: Batch) -> list[float | None]:
    """Return the advantage of each episode: the mean over its trained tokens, in the order of the groups.

    Empty if the algorithm trained on other sequences than the groups hold, or computes no advantages.
    """
    trajectories = [t for group in groups for episode in group.episodes for t in episode.trajectories]
    lengths = np.array([len(t.tokens) for t in trajectories], np.int64)
    same = ADVANTAGES in finished and np.array_equal(finished["lengths"], lengths)
    if not same or np.ndim(finished[ADVANTAGES]) != 1:
        return []
    column = np.asarray(finished[ADVANTAGES], np.float64)
    per_token = column if ADVANTAGES in finished.per_token else np.repeat(column, lengths)
    sizes = [
        sum(len(t.tokens) for t in episode.trajectories) for group in groups for episode in group.episodes
    ]  # an episode's sequences follow each other
    parts = zip(*(np.split(each, np.cumsum(sizes)[:-1]) for each in (per_token, finished["loss_mask"])), strict=True)
    means = [float(values[mask].mean()) if mask.any() else math.nan for values, mask in parts]
    return [round(mean, 6) if math.isfinite(mean) else None for mean in means]


def _by_sequence(column: NDArray[Any], lengths: IntArray) -> list[NDArray[Any]]:
    """Cut a per-token column [N] into one array for each sequence."""
    return np.split(column, np.cumsum(lengths)[:-1]) if len(lengths) else []


def _added(taken: Batch, finished: Batch) -> list[str]:
    """Return the columns that the algorithm added or changed. Empty if it trained on other sequences than it took."""
    same = finished.sequences == taken.sequences and np.array_equal(finished["tokens"], taken["tokens"])
    return [
        name
        for name in finished.columns
        if same
        and np.ndim(finished[name]) == 1
        and np.asarray(finished[name]).dtype.kind in "biuf"
        and (name not in taken or not (finished[name] is taken[name] or np.array_equal(finished[name], taken[name])))
    ]


def _columns(one: Batch, names: Sequence[str]) -> dict[str, Any]:
    """Return columns of a single sequence: per-token columns as lists, per-sequence columns as numbers."""
    return {name: plain(one[name]) if name in one.per_token else plain(one[name])[0] for name in names}


def plain(column: NDArray[Any]) -> list[Any]:
    """Return numbers as builtins, in the shortest form that reads back the same. None: the number is not finite."""
    if column.dtype.kind != "f":
        return column.tolist()  # type: ignore[no-any-return]
    finite = np.isfinite(column)
    values = np.where(finite, column, 0).astype(str).astype(float).tolist()
    return [value if fine else None for value, fine in zip(values, finite.tolist(), strict=True)]
