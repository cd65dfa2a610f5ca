"""Keeps the keys and values of ended sequences, for prompts that begin with the same tokens.

    turn 1    prompt  completion              all is computed, and kept when the row ends
    turn 2    prompt  completion  answer      the last token of the completion and the answer are computed

A conversation of several turns asks for its own tokens again and again. Kept tokens are found by blocks, each with the
blocks before it, as in vLLM (Kwon et al. 2023, arXiv:2309.06180, section 4.4). Nothing is copied until a first prompt
continues a completion.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from attrs import define
from torch import Tensor

from whet.data.records import IntArray

BLOCK: Final = 8
"""Tokens of a block. Fewer equal tokens than one block are computed again."""
MOST: Final = 4096
"""Most sequences that are kept."""


@define(eq=False)
class Kept:
    """A sequence that has ended."""

    tokens: IntArray
    """[length]: the tokens whose keys and values were computed."""
    prompt: int
    """How many of them came before the completion."""
    cache: Tensor | None
    """[layers, 2, kv_heads, length, head_dim]: keys and values. None: only the tokens are known."""

    @property
    def nbytes(self) -> int:
        """Return the size of keys and values."""
        return 0 if self.cache is None else self.cache.nbytes


class Prefixes:
    """The sequences that are kept: the last ones, within a limit. Threads may share it."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes of keys and values that may be kept. 0: nothing is kept."""
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Kept] = OrderedDict()  # by id, the oldest first
        self._at: dict[int, Kept] = {}
        self._size = 0
        self._continued = False
        self.cleared = 0
        """How often all sequences were forgotten. What was computed before does not fit what is computed after."""

    def find(self, prompt: IntArray) -> tuple[Tensor | None, int]:
        """Return keys and values of the longest kept beginning of a prompt, and its length in tokens.

        At least the last token of the prompt is left to compute. (None, 0): nothing is kept.
        """
        if not self._limit:
            return None, 0
        with self._lock:
            found, length = self._longest(prompt)
            if found is None:
                return None, 0
            length = min(length, len(prompt) - 1)
            self._continued = self._continued or length > found.prompt
            if found.cache is None or length < BLOCK:
                return None, 0
            self._kept.move_to_end(id(found))
            return found.cache, length

    def keep(self, tokens: IntArray, prompt: int, cache: Tensor, cleared: int) -> None:
        """Keep a sequence that has ended, in place of a sequence that it continues. Keys and values are copied.

        prompt: how many of the tokens came before the completion; cache [layers, 2, kv_heads, length, head_dim];
        cleared: of the time when the sequence began.
        """
        with self._lock:
            size = cache.nbytes if self._continued else 0
            if cleared != self.cleared or size > self._limit or not self._limit or len(tokens) < BLOCK:
                return
            older, length = self._longest(tokens)
            if older is not None and length == len(older.tokens):
                self._drop(older)
            self._shrink(size)
            copied = cache.clone(memory_format=torch.contiguous_format) if size else None
            kept = Kept(tokens, prompt, copied)
            self._kept[id(kept)] = kept
            self._size += size
            self._at.update(dict.fromkeys(_chains(tokens), kept))

    def leave(self, limit: int) -> None:
        """Keep at most so many bytes from now on."""
        with self._lock:
            self._limit = max(0, limit)
            self._shrink()

    def clear(self) -> int:
        """Forget all sequences, since the weights have changed or memory is wanted. Return the bytes that are freed."""
        with self._lock:
            self.cleared += 1
            size, self._size = self._size, 0
            self._kept.clear()
            self._at.clear()
            return size

    def _longest(self, tokens: IntArray) -> tuple[Kept | None, int]:
        """Return the kept sequence with the most blocks in common, and how many of its first tokens are the same."""
        found = None
        for chain in _chains(tokens):
            if (kept := self._at.get(chain)) is None:
                break
            found = kept
        if found is None:
            return None, 0
        both = min(len(found.tokens), len(tokens))
        differ = np.flatnonzero(found.tokens[:both] != tokens[:both])
        return found, int(differ[0]) if len(differ) else both

    def _shrink(self, more: int = 0) -> None:
        """Drop the oldest sequences, until one of `more` bytes has room."""
        while self._kept and (self._size + more > self._limit or len(self._kept) >= MOST):
            self._drop(next(iter(self._kept.values())))

    def _drop(self, kept: Kept) -> None:
        del self._kept[id(kept)]
        self._size -= kept.nbytes
        for chain in _chains(kept.tokens):
            if self._at.get(chain) is kept:
                del self._at[chain]


def _chains(tokens: IntArray) -> Iterator[int]:
    """Yield a hash of each whole block of tokens and all blocks before it."""
    chain = 0
    for begin in range(0, len(tokens) - BLOCK + 1, BLOCK):
        chain = hash((chain, tokens[begin : begin + BLOCK].tobytes()))
        yield chain
