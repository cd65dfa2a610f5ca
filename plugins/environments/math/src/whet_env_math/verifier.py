"""Compare answers with math-verify. Only grader processes import this module, because parsing may hang or crash.

`math_verify.parse` finds a formula in a text and evaluates it at once. `_parsed_answer` does the same search with
math-verify's own functions, but checks each formula before it is evaluated.
"""

import logging
from collections.abc import Callable
from functools import lru_cache
from itertools import groupby
from typing import Any

import math_verify
from math_verify.parser import extract_match, get_extraction_regexes

from whet_env_math.answers import is_bomb

# math-verify warns that its own timeouts are off. The pool's limits apply instead, even if code ignores signals.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

_SAMPLES = (("\\boxed{\\frac{2}{4}}", "0.5", True), ("so it is 1/2", "\\frac{1}{2}", True), ("\\boxed{2x}", "x", False))
"""(answer, gold, whether they are equal)."""


def verifier() -> Callable[[str, str], bool]:
    """Return `equal`, after it has graded samples, so that the slow first call is not charged to an answer.

    Raises `RuntimeError` if a sample is graded wrongly, for example with an incompatible release of math-verify.
    """
    for answer, gold, expected in _SAMPLES:
        if equal(answer, gold) is not expected:
            raise RuntimeError(
                f"math-verify says that {answer!r} is {'not ' * expected}equal to {gold!r}; install a release of it "
                "that whet-env-math was made for"
            )
    return equal


def equal(answer: str, gold: str) -> bool:
    """Return whether an answer from `given_answer` has the same value as the right answer.

    An answer that cannot be parsed is not equal. An answer that is too large to evaluate is not equal either, unless
    the right answer is as large.
    """
    parsed = _parsed(answer) if is_bomb(gold) else _parsed_answer(answer)
    return bool(math_verify.verify(_parsed_gold(gold), parsed, timeout_seconds=None))


@lru_cache(maxsize=4096)
def _parsed_gold(gold: str) -> list[Any]:
    return _parsed(f"\\boxed{{{gold}}}")


def _parsed(text: str) -> list[Any]:
    # the fallback would compare unparsable answers as text
    return list(math_verify.parse(text, fallback_mode="no_fallback", parsing_timeout=None))


@lru_cache(maxsize=1)
def _patterns() -> list[tuple[int, list[tuple[Any, Any]]]]:
    """Return the patterns with which math-verify finds formulas, each with its target, by priority."""
    targets = (math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig())
    found = [
        (rank, pattern, target) for patterns, target in get_extraction_regexes(targets) for pattern, rank in patterns
    ]
    found.sort(key=lambda entry: entry[0])
    return [(rank, [entry[1:] for entry in group]) for rank, group in groupby(found, key=lambda entry: entry[0])]


def _parsed_answer(text: str) -> list[Any]:
    """Return the result of `_parsed`, or [] if the formula would be too large to evaluate."""
    for _, patterns in _patterns():
        found = [(match, target) for pattern, target in patterns for match in pattern.finditer(text)]
        # rightmost first, then the longest: the order of math-verify
        for match, target in sorted(found, key=lambda entry: (entry[0].end(), -entry[0].start()), reverse=True):
            if any(is_bomb(formula) for formula in match.groupdict().values() if formula):
                return []
            value, _ = extract_match(match, target)
            if value is not None:
                return [value]
    return []
