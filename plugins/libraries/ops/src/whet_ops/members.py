"""What a batch of rollouts compares: its members, and the turns of its sequences, on NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from whet.data.batch import Batch
from whet.errors import PluginError
from whet.rollout.collate import shares
from whet_ops.gae import at_last
from whet_ops.reductions import segment_sum


@frozen(eq=False)
class Members:
    """The members of a batch. A member counts once in a comparison, however many sequences it has.

    A member is usually an episode. If an episode has several agents, each of its agents is a member. If the sequences
    of an agent have rewards of their own, each of its conversations is a member.
    """

    first: NDArray[Any]
    """The position of one sequence of each member: [M]."""
    owner: NDArray[Any]
    """The member of each sequence: [B]."""
    sizes: NDArray[Any]
    """The number of sequences of each member: [M]."""
    cohort: NDArray[Any]
    """A number for each member. Members with the same number are compared: one agent in one group. [M]."""


def members_of(batch: Batch) -> Members:
    """Return the members of a batch. Without the column `member`, each episode is a member."""
    column = np.asarray(batch["member"] if "member" in batch else batch["episode"])
    _, first, owner, sizes = np.unique(column, return_index=True, return_inverse=True, return_counts=True)
    group = np.asarray(batch["group"] if "group" in batch else np.zeros(len(column), np.int64))
    agent = np.asarray(batch["agent"] if "agent" in batch else np.zeros(len(column), np.int64))
    _, groups = np.unique(group, return_inverse=True)
    return Members(first, owner, sizes, (groups * (agent.max(initial=0) + 1) + agent)[first])


def of_members(batch: Batch, values: NDArray[Any]) -> NDArray[Any]:
    """Return for each sequence the sum of values over its member. values [B] -> [B]."""
    owner = members_of(batch).owner
    return np.asarray(np.bincount(owner, values)[owner])


def by_conversation(estimate: Callable[[Batch], Any], batch: Batch) -> NDArray[Any]:
    """Return what an estimator returns for a batch, [B] or [N]. It gets each conversation as one sequence.

    Raises `PluginError` if that is no finite number for each conversation or for each token.
    """
    (first, conversation), given = conversations(batch), estimate(joined(batch))
    who = f"the advantages of {getattr(estimate, '__name__', type(estimate).__name__)}"
    wanted = f"a finite number for each of {len(first)} conversations, or for each of {batch.tokens} tokens"
    try:
        found = np.asarray(given)
    except ValueError as error:
        parts = f"are a {type(given).__name__} of parts that make no array"
        raise PluginError(f"{who} {parts}; wanted {wanted}") from error
    number = found.dtype.kind in "fiub"
    if not number or found.shape not in ((len(first),), (batch.tokens,)) or not np.isfinite(found).all():
        words = f"the shape {found.shape}" if number else f"the type {found.dtype}"
        words = words if not number or np.isfinite(found).all() else "numbers that are not finite"
        raise PluginError(f"{who} have {words}; wanted {wanted}")
    return found if len(found) == batch.tokens else found[conversation]


def joined(batch: Batch) -> Batch:
    """Return the batch with one sequence for each conversation. The parts of a conversation follow each other in it.

    Columns of the conversation are those of its first part, except for `stopped`, which is that of its last part.
    """
    if "conversation" not in batch:
        return batch
    first, conversation = conversations(batch)
    columns = {name: np.asarray(column)[first] for name, column in batch.per_sequence.items()}
    columns["lengths"] = np.bincount(conversation, batch["lengths"]).astype(np.int64)
    if "stopped" in batch:
        columns["stopped"] = np.asarray(batch["stopped"])[np.append(first[1:], batch.sequences) - 1]
    return evolve(batch, per_sequence={n: c for n, c in columns.items() if n not in ("conversation", "share")})


def conversations(batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the position of the first part of each conversation [C], and the conversation of each sequence [B].

    Without the column `conversation`, each sequence is a conversation. The sequences are in the order of the rollouts.
    """
    if "conversation" not in batch:
        return np.arange(batch.sequences), np.arange(batch.sequences)
    number = np.asarray(batch["conversation"])
    begins = np.append(True, number[1:] != number[:-1])[: len(number)]
    return np.flatnonzero(begins), np.cumsum(begins) - 1


def with_mask(batch: Batch, mask: NDArray[np.bool_]) -> Batch:
    """Return the batch with another loss mask [N], and with the column `share` by that mask if there is one."""
    if "share" not in batch:
        return batch.with_columns(loss_mask=mask)
    trained = segment_sum(mask.astype(np.int64), batch["lengths"])
    return batch.with_columns(loss_mask=mask, share=shares(np.asarray(batch["conversation"]), trained))


def produced(batch: Batch) -> NDArray[np.bool_]:
    """Return which tokens [N] the model produced, also those that are not trained: by `version`, if it is there."""
    return np.asarray(batch["version"]) >= 0 if "version" in batch else np.asarray(batch["loss_mask"])


def turn_of(batch: Batch) -> NDArray[np.int32]:
    """Return the number of the model's turn in its conversation for each token [N], -1 outside of turns."""
    if "turn" in batch:
        return np.asarray(batch["turn"], np.int32)
    return np.where(produced(batch), 0, -1).astype(np.int32)


def placed_rewards(batch: Batch, rewards: NDArray[Any], mask: NDArray[Any]) -> NDArray[np.float64]:
    """Return the reward of each token [N]: the rewards of turns and spans where they are, the rest at the end.

    rewards [B] are the rewards of the sequences, those of turns and spans included. The end is the last token under the
    mask [N]. The rest of a part of a conversation lacks the rewards of the turns of earlier parts too. If the last
    token of a turn or span is not under the mask, its reward is at the last token under the mask before it, or else at
    the end. A sequence without a token under the mask has no rewards.
    """
    lengths, rewards = np.asarray(batch["lengths"]), np.asarray(rewards, np.float64)
    if "span_rewards" not in batch:
        return at_last(rewards, mask, lengths)
    spans = np.asarray(batch["span_rewards"], np.float64)
    placed = segment_sum(spans, lengths)
    if "conversation" in batch:
        first, conversation = conversations(batch)
        placed, before = np.cumsum(placed), np.cumsum(placed) - placed
        placed = placed - before[first][conversation]
    return at_last(rewards - placed, mask, lengths) + _under(spans, mask, lengths)


def _under(values: NDArray[Any], mask: NDArray[Any], lengths: NDArray[Any]) -> NDArray[np.float64]:
    """Move each value to the last token under the mask at or before it, or else to the last of its sequence.

    values, mask [N] -> [N]
    """
    there, places = np.flatnonzero(mask), np.flatnonzero(values)
    if not len(there):
        return np.zeros(len(values))
    owner = np.repeat(np.arange(len(lengths)), lengths)
    before = there[np.searchsorted(there, places, "right") - 1]
    last = there[np.searchsorted(there, np.cumsum(lengths)[owner[places]]) - 1]
    found = np.where((before <= places) & (owner[before] == owner[places]), before, last)
    kept = owner[found] == owner[places]
    return np.bincount(found[kept], values[places[kept]], len(values)).astype(np.float64)
