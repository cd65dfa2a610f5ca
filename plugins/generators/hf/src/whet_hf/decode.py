"""The decoding loop: one batch of requests from prompts to completions, with any decoder."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from whet.data.records import Completion, IntArray, Progress, Request, Stop
from whet.errors import WhetError
from whet_generation.completeness import one_token
from whet_generation.sampling import Sampler
from whet_generation.stopping import Stops, StopStrings
from whet_hf.swap import Weights
from whet_ops.routing import COLUMN

COMPACT_BELOW = 0.8
"""Finished rows are dropped when less than this share of the rows is still running."""


class Session(Protocol):
    """A running batch in a decoder."""

    logits: Tensor  # [B, V], of the next token
    prompts_routed: Sequence[Any]  # the experts of each prompt [prompt, layers * k]; empty: they are not recorded
    routed: Any  # the experts of the last tokens [B, layers * k], before `keep`

    def step(self, tokens: Tensor) -> None:
        """Append a token to each row."""

    def ended(self, row: int, tokens: IntArray, prompt: int) -> None:
        """Take note that a row ends. tokens [length]: those that were computed; the first `prompt` were its prompt."""

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, in this order."""


class Decoder(Protocol):
    """Computes logits. `lane` numbers the sessions that run at the same time."""

    @property
    def vocab_size(self) -> int:
        """Return the width of the logits."""

    def begin(self, prompts: list[Tensor], owner: Tensor, room: int, lane: int = 0) -> Session:
        """Return a session whose prompts are computed.

        prompts: ascending by length; owner [B], ascending: the prompt of each row; room: tokens after each prompt.
        """

    def refresh(self) -> None:
        """Update what is derived from the weights, after the weights have changed."""

    def free(self) -> int:
        """Free the memory that is kept between batches. Returns the number of bytes."""


@define(eq=False)
class Aborts:
    """Ids of requests that must end early. One thread writes them; decoding threads read them."""

    _ids: set[str] = field(factory=set)
    _everything: threading.Event = field(factory=threading.Event)

    def add(self, ids: Sequence[str]) -> None:
        """End these requests at their next token."""
        self._ids.update(ids)

    def add_running(self) -> None:
        """End all requests of the batch at their next token."""
        self._everything.set()

    def clear(self) -> None:
        """Forget all ids, before the next batch."""
        self._ids.clear()
        self._everything.clear()

    def __bool__(self) -> bool:
        """Return whether any request must end early."""
        return bool(self._ids) or self._everything.is_set()

    def __contains__(self, id_: str) -> bool:
        return id_ in self._ids or self._everything.is_set()


Report = Callable[[list[Progress]], None]
"""Takes the tokens of one step; called on the decoding thread."""


@frozen(eq=False)
class Job:
    """A request and the longest completion that it may get."""

    request: Request
    limit: int
    """In tokens: the request's `max_tokens`, at most the model's remaining positions."""

    @property
    def place(self) -> tuple[int, bytes, int, str]:
        """Return the sort key of a batch: by length, then by prompt. The order of arrival does not matter."""
        return len(self.request.tokens), self.request.tokens.tobytes(), self.limit, self.request.id


@torch.inference_mode()
def decode(
    decoder: Decoder,
    jobs: Sequence[Job],
    strings: StopStrings,
    weights: Weights,
    aborts: Aborts,
    device: torch.device,
    lane: int = 0,
    report: Report | None = None,
) -> list[Completion]:
    """Decode jobs, sorted by `place`, to their ends. Returns the completions in the same order.

    `report` gets each token of the requests that want it, as soon as it is sampled. If new weights arrive between two
    tokens, earlier tokens keep the keys and values of the old weights.
    """
    versions = [(0, weights.between_tokens())]
    requests, samplings = [job.request for job in jobs], [job.request.sampling for job in jobs]
    prompts, owner = distinct([r.tokens for r in requests])
    limits = np.array([job.limit for job in jobs])
    session = decoder.begin(
        [torch.from_numpy(p).to(device) for p in prompts], torch.from_numpy(owner).to(device), int(limits.max()), lane
    )
    sampler = Sampler(samplings, [r.seed for r in requests], device)
    stops = Stops(samplings, strings, decoder.vocab_size)
    history = np.zeros((len(requests), int(limits.max())), np.int64)
    experts = Experts(session.prompts_routed, owner, int(limits.max()))
    logprobs = np.zeros(history.shape, np.float32)
    lengths = np.zeros(len(requests), np.int64)
    endings: list[Stop] = ["length"] * len(requests)
    rows = np.arange(len(requests))  # the job of each row
    alive = np.ones(len(requests), np.bool_)  # for each of `rows`: still running
    tokens = torch.empty(0, dtype=torch.int64)
    for step in range(int(limits.max())):
        if step:
            if (version := weights.between_tokens()) != versions[-1][1]:
                versions.append((step, version))
            session.step(tokens)
            experts.add(rows, step - 1, session)
        tokens, drawn = sampler.draw(session.logits, step)
        history[rows, step], logprobs[rows, step] = tokens.cpu().numpy(), drawn.cpu().numpy()
        if report is not None:
            shown = [
                (i, requests[row]) for i, row in enumerate(rows) if alive[i] and requests[row].progress is not None
            ]
            report(_reports(shown, step, tokens, drawn, sampler, session.logits))
        stopped = stops.stopped(rows, history, step)
        ended = stopped | (step + 1 >= limits[rows])
        for i in np.flatnonzero(alive & stopped):
            endings[rows[i]] = "stop"
        if aborts:
            aborted = np.array([requests[row].id in aborts for row in rows])
            for i in np.flatnonzero(alive & aborted & ~ended):
                endings[rows[i]] = "abort"
            ended |= aborted
        lengths[rows[alive & ended]] = step + 1
        for i in np.flatnonzero(alive & ended):
            prompt = requests[rows[i]].tokens
            session.ended(int(i), np.concatenate([prompt, history[rows[i], :step]]), len(prompt))
        alive &= ~ended
        left = int(alive.sum())
        if left == 0:
            break
        if left < COMPACT_BELOW * len(rows):
            kept = compacted(alive)
            rows, alive = rows[kept], np.ones(left, np.bool_)
            where = torch.from_numpy(kept).to(device)
            session.keep(where)
            sampler.keep(where)
            tokens = tokens[where]
    if not np.isfinite(logprobs).all():
        raise WhetError(
            "the model gave logits that are not finite; the weights may have diverged: look at grad_norm and lower the "
            "learning rate"
        )
    return [
        Completion(
            r.id,
            history[i, :n].copy(),
            logprobs[i, :n].copy(),
            endings[i],
            tuple(v for v in versions if v[0] < n),
            experts.columns(i, int(n)),
        )
        for i, (r, n) in enumerate(zip(requests, lengths, strict=True))
    ]


def _reports(
    shown: Sequence[tuple[int, Request]], step: int, tokens: Tensor, logprobs: Tensor, sampler: Sampler, logits: Tensor
) -> list[Progress]:
    """Return the reports of one step: the token of each (row, request)."""
    most = max((request.progress or 0 for _, request in shown), default=0)
    top, their = sampler.likeliest(logits, most) if most else (tokens[:, None], logprobs[:, None])
    return [
        one_token(
            r.id,
            step,
            int(tokens[i]),
            float(logprobs[i]),
            top[i, : r.progress].tolist(),
            their[i, : r.progress].tolist(),
        )
        for i, r in shown
    ]


class Experts:
    """The experts of each token of a batch, if the decoder records them."""

    def __init__(self, prompts: Sequence[Any], owner: Any, room: int) -> None:
        self._prompts, self._owner = prompts, owner
        if prompts:
            self._later = np.full((len(owner), room, prompts[0].shape[1]), -1, np.int16)

    def add(self, rows: Any, step: int, session: Session) -> None:
        """Store the experts of the tokens that were the inputs after `step` tokens."""
        if self._prompts:
            self._later[rows, step] = session.routed

    def columns(self, row: int, length: int) -> dict[str, Any]:
        """Return the columns of a completion of `length` tokens; the last token was never an input."""
        if not self._prompts:
            return {}
        later = self._later[row, :length].copy()
        later[-1] = -1
        return {COLUMN: np.concatenate([self._prompts[self._owner[row]], later])}


def distinct(
    prompts: Sequence[np.ndarray[tuple[int], np.dtype[np.int64]]],
) -> tuple[list[np.ndarray[tuple[int], np.dtype[np.int64]]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Return the distinct prompts of sorted prompts, and owner [B]: the distinct prompt of each row."""
    found: dict[bytes, int] = {}
    owner = np.array([found.setdefault(np.asarray(p, np.int64).tobytes(), len(found)) for p in prompts])
    return [np.frombuffer(data, np.int64).copy() for data in found], owner


def compacted(alive: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the running rows in an order that moves few of them: the last rows fill the gaps among the first."""
    left = int(alive.sum())
    order = np.arange(left)
    order[~alive[:left]] = left + np.flatnonzero(alive[left:])
    return order
