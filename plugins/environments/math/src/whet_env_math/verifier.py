"""Compare answers with math-verify. Imported by grader processes alone: what it parses may hang or crash it.

`math_verify.parse` finds a formula in a text and evaluates it at once. `_parsed_answer` is the same search with its
own functions, and looks at each formula before it is evaluated: the text around it says nothing about its cost.
"""

import logging
from collections.abc import Callable
from functools import lru_cache
from itertools import groupby
from typing import Any

import math_verify
from math_verify.parser import extract_match, get_extraction_regexes

from whet_env_math.answers import is_bomb

# It warns that its own timeouts are off; the pool's limits hold instead, also against what ignores signals.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

_SAMPLES = (("\\boxed{\\frac{2}{4}}", "0.5", True), ("so it is 1/2", "\\frac{1}{2}", True), ("\\boxed{2x}", "x", False))
"""(answer, gold, whether they are equal)."""


def verifier() -> Callable[[str, str], bool]:
    """Return `equal`, after it has graded samples: the time that its first call takes counts for no answer.

    Raises `RuntimeError` where it grades them wrongly, as with a release of math-verify that it does not fit.
    """
    for answer, gold, expected in _SAMPLES:
        if equal(answer, gold) is not expected:
            raise RuntimeError(
                f"math-verify says that {answer!r} is {'not ' * expected}equal to {gold!r}; install a release of it "
                "that whet-env-math was made for"
            )
    return equal


def equal(answer: str, gold: str) -> bool:
    """Return whether an answer, as `given_answer` returns it, is worth the same as the right one. One that cannot be
    parsed is not, and neither is a number that nobody can write down, where the right one is none.
    """
    parsed = _parsed(answer) if is_bomb(gold) else _parsed_answer(answer)
    return bool(math_verify.verify(_parsed_gold(gold), parsed, timeout_seconds=None))


@lru_cache(maxsize=4096)
def _parsed_gold(gold: str) -> list[Any]:
    return _parsed(f"\\boxed{{{gold}}}")


def _parsed(text: str) -> list[Any]:
    # its fallback would compare what cannot be parsed as text
    return list(math_verify.parse(text, fallback_mode="no_fallback", parsing_timeout=None))


@lru_cache(maxsize=1)
def _patterns() -> list[tuple[int, list[tuple[Any, Any]]]]:
    """Return the patterns by which math-verify finds formulas, each with its target, by priority."""
    targets = (math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig())
    found = [
        (rank, pattern, target) for patterns, target in get_extraction_regexes(targets) for pattern, rank in patterns
    ]
    found.sort(key=lambda entry: entry[0])
    return [(rank, [entry[1:] for entry in group]) for rank, group in groupby(found, key=lambda entry: entry[0])]


def _parsed_answer(text: str) -> list[Any]:
    """Return what `_parsed` does, or nothing where the formula that would be evaluated is a bomb."""
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
