"""The ends of completions: stop tokens and stop strings.

A stop string is searched for in decoded text, but only after a token that can complete the string. Such a token
contains the string, or begins with an end of it. These tokens are found over the vocabulary, and kept for the strings
that were used last.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from whet.data.records import Sampling
from whet.errors import WhetError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BoolArray = NDArray[np.bool_]
REPLACEMENT = "\ufffd"
"""The character to which incomplete bytes decode."""
MOST_KEPT = 64
"""Most stop strings whose tokens are kept: requests may bring ever new ones, and a vocabulary has 150,000 tokens."""


class StopStrings:
    """Finds stop strings at the end of token sequences."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._tokenizer: Tokenizer | None = None
        self._texts: list[str] = []
        self._enders_of = lru_cache(MOST_KEPT)(self._find_enders)

    def enders(self, stops: Sequence[str], vocab_size: int) -> BoolArray:
        """Return which tokens may complete one of the strings -> [vocab_size]."""
        found = np.zeros(vocab_size, np.bool_)
        for stop in stops:
            known = self._enders_of(stop)
            found[: len(known)] |= known[:vocab_size]
        return found

    def completed(self, tokens: NDArray[np.int64], stops: Sequence[str]) -> bool:
        """Return whether the last token completes one of the strings. tokens: the completion so far."""
        # A token is at least one byte and the string ends in the last token, so no more tokens than bytes take part.
        # One more on the left, because some tokenizers drop a space before the first token.
        window = max(len(stop.encode()) for stop in stops) + 1
        text = self._load().decode(tokens[-window:].tolist(), skip_special_tokens=False)
        return any(stop in text for stop in stops)

    def _find_enders(self, stop: str) -> BoolArray:
        ends = tuple(stop[begin:] for begin in range(len(stop)))
        return np.array([REPLACEMENT in t or stop in t or t.startswith(ends) for t in self._vocabulary()], np.bool_)

    def _vocabulary(self) -> list[str]:
        if not self._texts:
            tokenizer = self._load()
            size = tokenizer.get_vocab_size(with_added_tokens=True)
            self._texts = tokenizer.decode_batch([[i] for i in range(size)], skip_special_tokens=False)
            for i in range(size):
                if (tokenizer.id_to_token(i) or "").startswith("\u2581"):  # a space, dropped when decoded alone
                    self._texts[i] = " " + self._texts[i].removeprefix(" ")
        return self._texts

    def _load(self) -> "Tokenizer":
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            file = self._folder / "tokenizer.json"
            if not file.exists():
                raise WhetError(f"stop strings need {file}, which is not there; use stop tokens, or save the tokenizer")
            self._tokenizer = Tokenizer.from_file(str(file))
        return self._tokenizer


class Stops:
    """The stop conditions of the rows of a batch. Rows keep their numbers when other rows are dropped."""

    def __init__(self, samplings: Sequence[Sampling], strings: StopStrings, vocab_size: int) -> None:
        self._samplings, self._strings = samplings, strings
        kinds = list(dict.fromkeys((s.stop_tokens, s.stop) for s in samplings))
        self._kind = np.array([kinds.index((s.stop_tokens, s.stop)) for s in samplings])
        self._stops = np.zeros((len(kinds), vocab_size), np.bool_)
        self._enders = np.zeros((len(kinds), vocab_size), np.bool_)
        self._any_strings = any(stop for _, stop in kinds)
        for kind, (tokens, stop) in enumerate(kinds):
            self._stops[kind, [token for token in tokens if 0 <= token < vocab_size]] = True
            if stop:
                self._enders[kind] = strings.enders(stop, vocab_size)

    def stopped(self, rows: NDArray[np.int64], history: NDArray[np.int64], step: int) -> BoolArray:
        """Return which rows end with the token of this step. rows [K], history [B, steps] -> [K]."""
        tokens, kind = history[rows, step], self._kind[rows]
        ended: BoolArray = self._stops[kind, tokens]
        if self._any_strings:
            for i in np.flatnonzero(self._enders[kind, tokens] & ~ended):
                row = rows[i]
                ended[i] = self._strings.completed(history[row, : step + 1], self._samplings[row].stop)
        return ended
