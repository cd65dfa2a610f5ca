r"""DAPO's rule for mathematics: the last `Answer:` of a response must equal the right answer as text.

The text after `Answer:` and the right answer are normalised as in Minerva: Lewkowycz et al. 2022, appendix D.1
(arXiv:2206.14858). `Answer: $\frac12$ dollars` is `\frac{1}{2}`. Only the end of a response is read, as in DAPO's code,
so the regular expressions meet short texts alone. `whet-env-math` compares by meaning instead.
"""

import re

from whet_data.finished import Finished
from whet_env_rewards.answers import golds_of
from whet_env_rewards.config import AnswerLineConfig

SUBSTITUTIONS = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    "\\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', "\\dots",
)  # fmt: skip
LATEX = (
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),
    (re.compile(r"(\\text\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\textbf\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\overline\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\boxed\{)(.*)(\})"), r"\2"),
    (re.compile(r"(frac)([^{])(.)"), r"frac{\2}{\3}"),
    (re.compile(r"(sqrt)([^{])"), r"sqrt{\2}"),
)
LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


class AnswerLine:
    """DAPO's reward: 1 for a right answer and -1 for any other response. Yu et al. 2025, section 2.4
    (arXiv:2503.14476).
    """

    def __init__(self, config: AnswerLineConfig) -> None:
        self._config = config

    def __call__(self, episode: Finished) -> float:
        """Return the reward."""
        found = LINE.findall(episode.text[-self._config.characters :])
        golds = {normalised(gold) for gold in golds_of(episode, self._config.gold)}
        return self._config.right if found and normalised(found[-1]) in golds else self._config.wrong


def normalised(answer: str) -> str:
    """Return a final answer as Minerva compares it."""
    answer = answer.rpartition("=")[2]
    for before, after in SUBSTITUTIONS:
        answer = answer.replace(before, after)
    for word in REMOVED:
        answer = answer.replace(word, "")
    for pattern, kept in LATEX:
        answer = pattern.sub(kept, answer)
    answer = answer.replace("$", "")
    return answer.replace(",", "").strip() if answer.replace(",", "").isdigit() else answer.strip()
