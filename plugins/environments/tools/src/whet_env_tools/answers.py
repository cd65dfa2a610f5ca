r"""The final answer of a response, and whether it is right.

The answer is the content of the last `\boxed{...}`, else the text after `Answer:` in the last line with it, else the
whole response. Two answers are the same if they are the same number, or the same text without case, articles, white
space and, where there are no digits, punctuation (Rajpurkar et al. 2016, "SQuAD", arXiv:1606.05250, section 6.1).
"""

import re
import unicodedata
from collections.abc import Iterable
from typing import Final

from whet_sandbox.boxed import last_boxed

_LONGEST: Final = 10_000
_ARTICLES: Final = re.compile(r"\b(?:a|an|the)\b")
_NUMBER: Final = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3}){1,13}|\d{1,40})(?:\.\d{1,40})?", re.ASCII)
_POWER: Final = re.compile(r"[\u2070\u00b9\u00b2\u00b3\u2074-\u207b]+")
"""Raised digits and signs, which NFKC takes for plain ones."""
_MARK: Final = re.compile("answer:", re.IGNORECASE)


def final_answer(text: str) -> str | None:
    """Return the final answer. None: the response is empty, or too long to hold one."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()[:_LONGEST]
    marks = [found.end() for found in _MARK.finditer(text)]
    if marks:
        return text[marks[-1] :].strip().partition("\n")[0].strip(" *_`")[:_LONGEST]
    return text.strip() if 0 < len(text.strip()) <= _LONGEST else None


def is_right(answer: str | None, gold: Iterable[str]) -> bool:
    """Return whether an answer is one of the right ones."""
    return answer is not None and any(canonical(answer) == canonical(one) for one in gold)


def canonical(answer: str) -> str:
    """Return an answer in the form in which answers are compared."""
    plain = answer.strip().strip("$").removesuffix(".")
    if _NUMBER.fullmatch(plain):
        whole, _, part = plain.replace(",", "").lstrip("+").partition(".")
        sign, digits, part = whole[:1].strip("0123456789"), whole.lstrip("-0") or "0", part.rstrip("0")
        return f"{sign if (digits, part) != ('0', '') else ''}{digits}{'.' if part else ''}{part}"
    lower = unicodedata.normalize("NFKC", _POWER.sub(r"^\g<0>", answer[:_LONGEST])).lower()
    # next to digits, a sign changes the meaning: 9! is not 9, and 1/2 is not 12
    dropped = ",\"'" if any(map(str.isdigit, lower)) else ""
    if dropped:
        letters = "".join(" " if one in dropped else one for one in lower)
    else:
        letters = "".join(" " if unicodedata.category(one)[0] in "PZC" else one for one in lower)
    return " ".join(_ARTICLES.sub(" ", letters).split()) or " ".join(lower.split())
