"""Rewards for the form of a response: its tags, and its repetitions. They read a text of any length in linear time."""

from whet_data.finished import Finished
from whet_env_rewards.config import FormatConfig, RepetitionConfig


class Format:
    """1 if a response consists of the wanted tags and nothing else.

    DeepSeek-AI 2025, section 2.2.2 (arXiv:2501.12948). With `partial` it is the share of tags that occur exactly once,
    the tag count reward of open-r1, there with a quarter for each of four tags.
    """

    def __init__(self, config: FormatConfig) -> None:
        self._marks = [mark for tag in config.tags for mark in (f"<{tag}>", f"</{tag}>")]
        self._opened, self._partial = config.opened, config.partial

    def __call__(self, episode: Finished) -> float:
        """Return the reward."""
        text = self._marks[0] + episode.text if self._opened else episode.text
        once = [text.count(mark) == 1 for mark in self._marks]
        if self._partial:
            return sum(once) / len(once)
        if not all(once):
            return 0.0
        ends = [(text.find(mark), text.find(mark) + len(mark)) for mark in self._marks]
        outside = [text[: ends[0][0]], text[ends[-1][1] :]]
        outside += [text[after:before] for (_, after), (before, _) in zip(ends[1::2], ends[2::2], strict=False)]
        return float(ends == sorted(ends) and not any(part.strip() for part in outside))


class Repetition:
    """The share of phrases that occurred before: 1 - distinct phrases / phrases.

    Yeo et al. 2025, appendix C.2 (arXiv:2502.03373): with a weight of -1 it is their penalty. Words are separated by
    white space, and case does not matter, as in open-r1.
    """

    def __init__(self, config: RepetitionConfig) -> None:
        self._words = config.words

    def __call__(self, episode: Finished) -> float:
        """Return the reward. It is 0 for a response with fewer words than a phrase."""
        words = episode.text.lower().split()
        phrases = len(words) - self._words + 1
        if phrases < 1:
            return 0.0
        return 1 - len({tuple(words[i : i + self._words]) for i in range(phrases)}) / phrases
