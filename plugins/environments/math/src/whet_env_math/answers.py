r"""Find answers in text, and compare those that are plain numbers; what is left over needs math-verify.

What a model wrote is hostile: everything here reads a short piece of it, or is linear in its length, and only a short
piece is handed on.

    **Answer:** she pays $5 and $13,      Answer: she pays 5 and 13,      markdown and currency are no mathematics:
    so **18**.                        ->  so 18.                          `**` is a power only between two operands
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


PAINT = re.compile(
    r"(?<![\w)\]}\\*])(?P<stars>\*{1,3})(?=[^\s*])(?P<starred>[^\n]*?)(?<=[^\s*])(?P=stars)(?![\w({\\*])"  # **42**
    r"|(?<![\w)\]}\\])(?P<lines>_{1,3})(?=[^\s_])(?P<lined>[^\n]*?)(?<=[^\s_])(?P=lines)(?!\w)"  # __42__
    r"|(?P<ticks>`{1,3})(?P<code>[^`\n]+)(?P=ticks)",
)
"""Emphasis and code of markdown. A power such as `2**10` has an operand on both sides, emphasis has not."""
ITEM = re.compile(r"^[ \t]*(?:#{1,6}|[-*\u2022>])[ \t]+", re.MULTILINE)
"""What stands before a heading, an item of a list or a quotation."""
LINES = re.compile(r"(?<=\d)\s*\n\s*(?=\d)")
"""The end of a line between two numbers, which are not one number."""
DOLLARS = re.compile(
    r"\$\$.*?\$\$|\\\(.*?\\\)|\\\[.*?\\\]"
    r"|\$(?=[^\s$])[^$\n]*(?<=[^\s\\])\$(?!\d)"  # as in pandoc: `$5 and $13` is no formula
    r"|(?P<currency>\\?\$(?=\.?\d))",
    re.DOTALL,
)
"""Formulas, and dollars that are money."""

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
    r"""Find what a model answered: the last `\boxed{...}` with its box, else the end of the text as plain text.

    None where there is nothing. Markdown is taken away in both.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return f"\\boxed{{{_unpainted(boxed)}}}" if boxed.strip() and len(boxed) <= LONGEST else None
    return None if boxed_only else plain_text(text[-TAIL:]) or None


def plain_text(text: str) -> str:
    """Return a short text on one line, without the marks of markdown and without the dollars of amounts of money."""
    text = LINES.sub(" ; ", ITEM.sub("", _unpainted(text)))
    return " ".join(DOLLARS.sub(lambda found: "" if found["currency"] else found[0], text).split())


def _unpainted(text: str) -> str:
    for _ in range(3):  # bold within a list in italics: hardly anybody goes deeper
        text = PAINT.sub(lambda found: found["starred"] or found["lined"] or found["code"], text)
    return text


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
    """Return whether a formula is a number that nobody can write down, such as `9^{9^{9}}`. Not for text around one."""
    return BOMB.search(answer) is not None


def plain_number(answer: str) -> Fraction | None:
    r"""Read `18`, `-3.50`, `1,450`, `$18` or `\$18`; None where it is anything else, and has to be parsed."""
    text = answer.strip().removeprefix("\\").removeprefix("$").removesuffix(".").strip()
    found = PLAIN.fullmatch(text)
    if found is None:
        return None
    sign, whole, decimals = found.groups()
    return Fraction(f"{sign}{whole.replace(',', '')}{decimals or ''}")
