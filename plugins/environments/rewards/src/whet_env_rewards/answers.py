"""Rewards for answers that are compared with right ones as text. All of them read a text in linear time.

`edits` computes a table of both lengths, so much longer answers than the right one score 0 unread.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

from whet.errors import EpisodeError
from whet_data.finished import Finished
from whet_env_rewards.config import AnswerConfig, ExactMatchConfig, FuzzyMatchConfig, MultipleChoiceConfig
from whet_sandbox.boxed import last_boxed

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_OF_A_NUMBER = r"(?<![^\W\d_])[-./](?=\.?\d)"
_BETWEEN_NUMBERS = rf"(?<=\d)(?!,\d{{3}}(?!\d))[{re.escape(string.punctuation)}](?=\d)|(?<=\de)-(?=\d)"
"""`2^3` and `3:4` are not 23 and 34; the comma of `1,000` alone has no meaning."""
_BLANKS = re.compile(r"(?<=\d)\s*([^\w\s.-])\s*(?=\d)")
"""A sign between numbers with white space beside it: `3 : 4` is `3:4`."""
_PUNCTUATION = re.compile(rf"(?!{_OF_A_NUMBER}|{_BETWEEN_NUMBERS})[{re.escape(string.punctuation)}]")
_SIGNS = re.compile(rf"(?!{_OF_A_NUMBER}|{_BETWEEN_NUMBERS})[\W_]")
LONGEST = 10_000
"""A longer answer is wrong."""


class ExactMatch:
    """1 if the answer is one of the right ones."""

    def __init__(self, config: ExactMatchConfig) -> None:
        self._config = config

    def __call__(self, episode: Finished) -> float:
        """Return the reward."""
        answer = answer_in(episode.text, self._config)
        golds = golds_of(episode, self._config.gold)
        return float(answer is not None and self._plain(answer) in {self._plain(gold) for gold in golds})

    def _plain(self, text: str) -> str:
        ignoring = self._config.ignoring
        if ignoring == "style":
            return " ".join(words_of(text))
        bare = text.strip()
        return bare if ignoring == "nothing" else _SIGNS.sub("", _BLANKS.sub(r"\1", bare.lower())) or bare.lower()


class FuzzyMatch:
    """The similarity of the answer to the right answer, or to the most similar of several right answers."""

    def __init__(self, config: FuzzyMatchConfig) -> None:
        self._config = config

    def __call__(self, episode: Finished) -> float:
        """Return the reward."""
        answer, config = answer_in(episode.text, self._config), self._config
        if answer is None:
            return 0.0
        measure = f1 if config.measure == "f1" else edit_similarity
        value = max(measure(answer, gold) for gold in golds_of(episode, config.gold))
        return float(value >= config.at_least) if config.at_least else value


class MultipleChoice:
    """1 if the answer names the right letter. The rule for lines is that of OpenAI's simple-evals."""

    def __init__(self, config: MultipleChoiceConfig) -> None:
        self._letters, self._gold = string.ascii_uppercase[: config.choices], config.gold
        letter = rf"\(?([{self._letters}])\b(?!\)?[ \t]?(?:,|/|&|or\b|and\b))"
        line, box = rf"answer[ \t*]{{0,8}}:[ \t*]{{0,8}}\$?{letter}", rf"\\boxed\{{{letter}\)?\}}"
        self._pattern = re.compile(rf"{line}|{box}|<answer>\s?{letter}\)?\.?\s?</answer>", re.IGNORECASE)

    def __call__(self, episode: Finished) -> float:
        """Return the reward."""
        last = None
        for last in self._pattern.finditer(episode.text[-LONGEST:]):  # noqa: B007 - only the last one counts
            pass
        return float(last is not None and next(filter(None, last.groups())).upper() == self._right(episode))

    def _right(self, episode: Finished) -> str:
        gold = golds_of(episode, self._gold)[0].strip().upper()
        right = self._letters[int(gold)] if gold.isdecimal() and int(gold) < len(self._letters) else gold
        if len(right) != 1 or right not in self._letters:
            words = f"wanted a letter up to {self._letters[-1]}, or its number, counted from 0"
            raise EpisodeError(f"the right answer of the task is {gold!r:.60}, {words}")
        return right


def answer_in(text: str, config: AnswerConfig) -> str | None:
    """Return the answer in a response. None: there is none, or it is too long."""
    found: str | None = text
    if config.answer == "tag":
        before, closing, _ = text.rpartition(f"</{config.tag}>")
        _, opening, found = before.rpartition(f"<{config.tag}>")
        found = found if closing and opening else None
    elif config.answer == "boxed":
        found = last_boxed(text)
    elif config.answer == "line":
        lines = (line.lstrip(" \t*").partition(":") for line in reversed(text.splitlines()))
        found = next((rest.strip(" \t*") for head, _, rest in lines if head.strip(" \t*").lower() == "answer"), None)
    return found if found is not None and len(found) <= LONGEST else None


def golds_of(episode: Finished, key: str) -> Sequence[str]:
    """Return the right answers of a task. Raises `EpisodeError` if it has none."""
    found = episode.data.get(key)
    golds = [str(one) for one in found] if isinstance(found, list | tuple) else [] if found is None else [str(found)]
    if not golds:
        raise EpisodeError(f"the task has no right answer {key!r}; there are {', '.join(episode.data) or 'no data'}")
    return golds


def words_of(text: str) -> list[str]:
    """Return the words of a text without case, punctuation and articles: Rajpurkar et al. 2016 (arXiv:1606.05250), as
    in the official evaluation of SQuAD, but `-`, `.` and `/` before a digit and signs between digits are kept: -1.5
    is not 15, and 2^3 not 23.

    A text of nothing but articles and punctuation keeps its articles, and one of nothing but punctuation all of it.
    """
    lower = text.lower()
    plain = _PUNCTUATION.sub("", lower)
    return _ARTICLES.sub(" ", plain).split() or plain.split() or lower.split()


def f1(answer: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall of words, as in SQuAD. Two empty texts: 1."""
    given, wanted = words_of(answer), words_of(gold)
    shared = (Counter(given) & Counter(wanted)).total()
    if not given or not wanted:
        return float(given == wanted)
    return 2 * shared / (len(given) + len(wanted))


def edit_similarity(answer: str, gold: str) -> float:
    """Return 1 - edit distance / length of the longer text (Levenshtein 1966). Two empty texts: 1.

    Texts are compared without white space at their ends. An answer that is 10 times as long as the right one, and 100
    characters longer, scores 0.
    """
    answer, gold = answer.strip(), gold.strip()
    if answer == gold:
        return 1.0
    if len(answer) > 10 * len(gold) + 100 or len(gold) > LONGEST:
        return 0.0
    wanted, steps = np.array([*map(ord, gold)]), np.arange(len(gold) + 1)
    row = steps.copy()
    for given in map(ord, answer):
        best = row + 1  # the character is left out
        best[1:] = np.minimum(best[1:], row[:-1] + (wanted != given))  # or stands for one of the right answer
        row = np.minimum.accumulate(best - steps) + steps  # or characters of the right answer are left out
    return 1 - int(row[-1]) / max(len(answer), len(gold))
