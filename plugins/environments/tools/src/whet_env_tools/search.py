"""Search over a corpus in memory: BM25 (Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework").

The weight of each term in each passage is computed once, so a query adds up a few lists (as in Lu 2024, "BM25S",
arXiv:2407.03618):

    score(query, passage) = sum over terms of idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * length / mean length))
    idf                   = log(1 + (passages - with the term + 0.5) / (with the term + 0.5))
"""

import re
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final
from weakref import WeakValueDictionary

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from whet.config.sections import DataFile
from whet.errors import DataError
from whet_data.readers import read

K1, B = 1.5, 0.75
_WORD: Final = re.compile(r"\w+")
_LONGEST_QUERY: Final = 2_000
_MOST_TERMS: Final = 64


@frozen
class Passage:
    """A passage of a corpus."""

    title: str
    text: str


def words_of(text: str) -> list[str]:
    """Return the words of a text, in lower case."""
    return _WORD.findall(text.lower())


class Index:
    """An index of passages."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        """Build the index. It takes some 10 microseconds a word, once."""
        self.passages = passages
        found = dict[str, tuple[list[int], list[int]]]()
        lengths = np.zeros(len(passages), np.float32)
        for number, passage in enumerate(passages):
            counts = Counter(words_of(f"{passage.title} {passage.text}"))
            lengths[number] = counts.total()
            for word, count in counts.items():
                places, often = found.setdefault(word, ([], []))
                places.append(number)
                often.append(count)
        mean = float(lengths.mean()) if len(passages) else 1.0
        norms = K1 * (1 - B + B * lengths / max(mean, 1e-9))
        self._postings = dict[str, tuple[NDArray[np.int32], NDArray[np.float32]]]()
        for word, (places, often) in found.items():
            where, times = np.array(places, np.int32), np.array(often, np.float32)
            idf = np.log(1 + (len(passages) - len(where) + 0.5) / (len(where) + 0.5))
            self._postings[word] = where, (idf * times * (K1 + 1) / (times + norms[where])).astype(np.float32)

    def search(self, query: str, most: int) -> list[tuple[Passage, float]]:
        """Return the best passages with their scores, best first. Passages without any word of the query are none."""
        terms = Counter(words_of(query[:_LONGEST_QUERY])).most_common(_MOST_TERMS)
        scores = np.zeros(len(self.passages), np.float32)
        for term, count in terms:
            if term in self._postings:
                where, weights = self._postings[term]
                scores[where] += count * weights
        # a stable order, so that an episode that is played again reads the same
        likely = np.argpartition(-scores, min(most, len(scores) - 1))[: most + 1] if most < len(scores) else None
        candidates = np.flatnonzero(scores >= scores[likely].min()) if likely is not None else np.arange(len(scores))
        order = candidates[np.lexsort((candidates, -scores[candidates]))][:most]
        return [(self.passages[i], float(scores[i])) for i in order if scores[i] > 0]


_INDEXES: "WeakValueDictionary[tuple[str, str, str], Index]" = WeakValueDictionary()
_LOCK = threading.Lock()


def index_of(corpus: str, text: str, title: str) -> Index:
    """Return the index of a corpus file. Environments of one run share it. Raises `DataError`."""
    with _LOCK:
        key = (corpus, text, title)
        if (index := _INDEXES.get(key)) is None:
            index = _INDEXES[key] = Index(list(_passages(corpus, text, title)))
        return index


def _passages(corpus: str, text: str, title: str) -> Iterable[Passage]:
    count = 0
    for row in read(DataFile(corpus)):
        words = row.record.get(text)
        if row.problem or not isinstance(words, str):
            raise DataError(
                f"{row.where}: {row.problem or f'a passage has no text in the field {text!r}'}; "
                f"its fields are {', '.join(row.record) or 'none'}"
            )
        heading = row.record.get(title) if title else ""
        count += 1
        yield Passage(str(heading or ""), words)
    if not count:
        raise DataError(f"the corpus {corpus} has no passage")


def as_answer(found: Sequence[tuple[Passage, float]], most: int) -> str:
    """Return found passages as text for the model, each cut to a number of characters."""
    if not found:
        return "Nothing was found."
    lines = list[str]()
    for number, (passage, _) in enumerate(found, 1):
        text = passage.text if len(passage.text) <= most else f"{passage.text[:most]}..."
        lines.append(f"[{number}] {passage.title}\n{text}" if passage.title else f"[{number}] {text}")
    return "\n\n".join(lines)
