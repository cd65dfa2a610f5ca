"""Compare answers with math-verify. Imported by grader processes alone: what it parses may hang or crash it."""

import logging
from functools import lru_cache
from typing import Any

import math_verify

# It warns that its own timeouts are off; the pool's deadline holds instead, also against what ignores signals.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def equal(answer: str, gold: str) -> bool:
    """Say whether an answer, as `given_answer` gives it, is worth the same as the right one. One that cannot be parsed
    is not.
    """
    return bool(math_verify.verify(_parsed_gold(gold), _parsed(answer), timeout_seconds=None))


@lru_cache(maxsize=4096)
def _parsed_gold(gold: str) -> list[Any]:
    return _parsed(f"\\boxed{{{gold}}}")


def _parsed(text: str) -> list[Any]:
    # its fallback would compare what cannot be parsed as text
    return list(math_verify.parse(text, fallback_mode="no_fallback", parsing_timeout=None))
