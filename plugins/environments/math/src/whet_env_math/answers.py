r"""Find answers in text, and compare those that are plain numbers; what is left over needs math-verify.

What a model wrote is hostile: everything here is linear in its length, and only a short piece without number bombs
is handed on.
"""

import re
from fractions import Fraction

from whet.data.boxed import last_boxed

LONGEST = 1000
"""Characters of an answer that is handed on."""
TAIL = 500
"""Characters from the end in which an answer without a box is looked for."""
MARK = "####"
PLAIN = re.compile(r"(-?)(\d{1,3}(?:,\d{3})+|\d{1,30})(\.\d{1,30})?", re.ASCII)
BOMB = re.compile(
    r"(?:\^|\*\*)[\s{(+-]*(?:\d{6}|\d+\s*(?:\^|\*\*))"  # an exponent of six digits, or one raised to a power
    r"|!\s*\)\s*!",  # the factorial of a factorial
    re.ASCII,
)


SPELLING = re.compile(r"\\[dt]frac(?![a-zA-Z])|\\(?:left|right)(?![a-zA-Z])|\\[,;:! ]|[\s$]+")
"""What may differ between two spellings of one answer."""


def gold_answer(text: str, pattern: re.Pattern[str] | None = None) -> str | None:
    r"""Find the right answer in its field: by the pattern's first group, or after `####`, in `\boxed{}`, or all of it.

    None where there is none.
    """
    if pattern is not None:
        found = pattern.search(text)
        return (found.group(1) or "").strip() or None if found else None
    _, mark, after = text.rpartition(MARK)
    answer = after if mark else last_boxed(text)
    return (text if answer is None else answer).strip() or None


def given_answer(text: str, boxed_only: bool) -> str | None:
    r"""Find what a model answered: the last `\boxed{...}` with its box, else the end of the text. None: nothing."""
    boxed = last_boxed(text)
    if boxed is not None:
        return f"\\boxed{{{boxed}}}" if boxed.strip() and len(boxed) <= LONGEST else None
    if boxed_only:
        return None
    return " ".join(text[-TAIL:].split()) or None


def normal_answer(text: str, boxed_only: bool) -> str | None:
    r"""Find what a model answered, in a form in which equal answers are equal text as far as that can be read.

    Plain numbers are equal by value: `1,450.0` is `1450`. Of anything else in a box only white space and sizes are
    taken away, and `\dfrac` and `\tfrac` are `\frac`: `\frac{1}{2}` and `1/2` are two answers. Without a box it is the
    last plain number near the end, unless `boxed_only`. None: no answer.
    """
    boxed = last_boxed(text)
    if boxed is None:
        numbers = [] if boxed_only else PLAIN.findall(text[-TAIL:])
        boxed = "".join(numbers[-1]) if numbers else ""
    if not boxed.strip() or len(boxed) > LONGEST:
        return None
    number = plain_number(boxed)
    return str(number) if number is not None else SPELLING.sub(_respelt, boxed) or None


def _respelt(found: re.Match[str]) -> str:
    return "\\frac" if found[0].endswith("frac") else ""


def is_bomb(answer: str) -> bool:
    """Say whether an answer is a number that nobody can write down, such as `9^{9^{9}}`."""
    return BOMB.search(answer) is not None


def plain_number(answer: str) -> Fraction | None:
    r"""Read `18`, `-3.50`, `1,450`, `$18` or `\$18`; None where it is anything else, and has to be parsed."""
    text = answer.strip().removeprefix("\\").removeprefix("$").removesuffix(".").strip()
    found = PLAIN.fullmatch(text)
    if found is None:
        return None
    sign, whole, decimals = found.groups()
    return Fraction(f"{sign}{whole.replace(',', '')}{decimals or ''}")
