r"""Find answers in text, and compare plain numbers. Other answers need math-verify.

The text of a model is hostile input. Every function here reads a short piece of it, or is linear in its length, and
passes on only a short piece.

    **Answer:** she pays $5 and $13,      Answer: she pays 5 and 13,      remove markdown and currency;
    so **18**.                        ->  so 18.                          `**` is a power only between two operands
"""

import re
from fractions import Fraction

from whet_sandbox.boxed import last_boxed

LONGEST = 1000
"""Most characters of an answer that is passed on to a grader."""
TAIL = 500
"""An answer without a box is searched in this many characters at the end of the text."""
MARK = "####"
PLAIN = re.compile(r"(-?)(\d{1,3}(?:,\d{3})+|\d{1,30})(\.\d{1,30})?", re.ASCII)
SPACED = re.compile(r"(?<=\d)(?<![_^]\d)(?:\\[,;:! ]|\{,\}|~|\u00a0|\u202f)+(?=\d{3}(?!\d))", re.ASCII)
"""Separators of thousands other than a comma: `1\\,450`, `1{,}450`."""
THOUSANDS = re.compile(r"\d{1,3}(?: \d{3})+", re.ASCII)
ADJACENT = re.compile(r"(?<![_^\d])(?<!frac)(?<!frac\s)\d+(?:\s|~|\\[,;:! ]|\\q?quad(?![a-zA-Z]))+\d", re.ASCII)
"""Two numbers without an operator, which math-verify adds."""
MAGNITUDE = re.compile(r"\b(?:hundred|thousand|million|billion|trillion)s?\b", re.IGNORECASE)
"""A word that multiplies, which math-verify takes for a unit."""
_NO_UNIT = (
    "or|and|to|not|than|less|plus|minus|times|over|mod|percent|per\\s+(?:cent|mille)|pi|squared|cubed|factorial|half|"
    "halves|thirds?|quarters?|"
    "(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|(?:thir|four|fif|six|seven|eigh|nine)teen|"
    "(?:twen|thir|for|fif|six|seven|eigh|nine)tie|hundred|thousand|million|billion|trillion)ths?|"
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|"
    "(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|"
    "hundreds?|thousands?|millions?|billions?|trillions?|"
    "doubled?|tripled?|halved|multiplied|divided|raised|negative|negated|inverse|inverted|reciprocal|"
    "choose|base|binary|octal|hex|hexadecimal|remainder|roots?|sqrt|below"
)
"""Words after a number that change its value."""
_WORD = "(?:[a-z]{3,20}|km|cm|mm|kg|mg|ml|ft|mi|oz|lbs?|hrs?|in|of)"
UNIT = re.compile(rf"((?:\\?\$)?-?[\d,.]+)(?:\s+(?!(?:{_NO_UNIT})\b){_WORD}\b){{1,4}}\.?", re.ASCII | re.IGNORECASE)
"""A number and a few words: `18 dollars`, `1,450 miles per hour`."""
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
"""Emphasis and code of markdown. A power such as `2**10` has operands on both sides; emphasis has none."""
ITEM = re.compile(r"^[ \t]*(?:#{1,6}|[-*\u2022>])[ \t]+", re.MULTILINE)
"""The marks before a heading, a list item or a quotation."""
LINES = re.compile(r"(?<=\d)\s*\n\s*(?=\d)")
"""A line end between two numbers. The numbers on both sides are separate."""
DOLLARS = re.compile(
    r"\$\$.*?\$\$|\\\(.*?\\\)|\\\[.*?\\\]"
    r"|\$(?=[^\s$])[^$\n]*(?<=[^\s\\])\$(?!\d)"  # as in pandoc: `$5 and $13` is not a formula
    r"|(?P<currency>\\?\$(?=\.?\d))",
    re.DOTALL,
)
"""Formulas, and dollar signs of amounts of money."""

SPELLING = re.compile(r"\\[dt]frac(?![a-zA-Z])|\\(?:left|right)(?![a-zA-Z])|\\[,;:! ]|[\s$]+")
"""Characters that may differ between two spellings of the same answer."""


def gold_answer(text: str, pattern: re.Pattern[str] | None = None) -> str | None:
    r"""Return the right answer of a field: the pattern's first group, or the text after `####`, in `\boxed{}`, or all.

    Separators of thousands other than commas are removed. None if there is no answer.
    """
    if pattern is not None:
        found = pattern.search(text)
        return SPACED.sub("", (found.group(1) or "").strip()) or None if found else None
    _, mark, after = text.rpartition(MARK)
    answer = after if mark else last_boxed(text)
    return SPACED.sub("", (text if answer is None else answer).strip()) or None


def given_answer(text: str, boxed_only: bool) -> str | None:
    r"""Return the answer in a model's text: the last `\boxed{...}` with its box, else the end as plain text.

    None if there is no answer. Markdown is removed in both cases, and separators of thousands in a box.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return f"\\boxed{{{SPACED.sub('', _unpainted(boxed))}}}" if boxed.strip() and len(boxed) <= LONGEST else None
    return None if boxed_only else plain_text(text[-TAIL:]) or None


def plain_text(text: str) -> str:
    """Return a short text on one line, without markdown and without the dollar signs of amounts of money."""
    text = LINES.sub(" ; ", ITEM.sub("", _unpainted(text)))
    return " ".join(DOLLARS.sub(lambda found: "" if found["currency"] else found[0], text).split())


def _unpainted(text: str) -> str:
    for _ in range(3):  # emphasis is rarely nested deeper than three levels
        text = PAINT.sub(lambda found: found["starred"] or found["lined"] or found["code"], text)
    return text


def normal_answer(text: str, boxed_only: bool) -> str | None:
    r"""Return the answer in a model's text in a normal form, so that equal answers are mostly equal strings.

    Plain numbers are normalised by value: `1,450.0` becomes `1450`. In other boxes only white space and size commands
    are removed, and `\dfrac` and `\tfrac` become `\frac`; `\frac{1}{2}` and `1/2` stay two answers. Without a box the
    answer is the last plain number near the end, unless `boxed_only`. None: no answer.
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


def plain_amount(answer: str) -> Fraction | None:
    """Return the value of a plain number, or of one with a unit in plain words. None: neither."""
    number, found = plain_number(answer), UNIT.fullmatch(answer.strip())
    return plain_number(found[1]) if number is None and found else number


def reads_otherwise(answer: str, gold: str) -> bool:
    """Return whether a formula has what a grader would misread, and the right answer has not: `3 4`, `2 million`."""
    return any(odd.search(answer) and not odd.search(gold) for odd in (ADJACENT, MAGNITUDE))


def is_bomb(answer: str) -> bool:
    """Return whether a formula is too large to evaluate, such as `9^{9^{9}}`. Expects a formula, not text around it."""
    return BOMB.search(answer) is not None


def plain_number(answer: str) -> Fraction | None:
    r"""Return the value of `18`, `-3.50`, `1,450`, `1\,450`, `$18` or `\$18`. None: not a plain number."""
    text = SPACED.sub("", answer.strip())
    text = text.replace(" ", "") if THOUSANDS.fullmatch(text) else text
    text = text.removeprefix("\\").removeprefix("$").removesuffix(".").strip()
    found = PLAIN.fullmatch(text)
    if found is None:
        return None
    sign, whole, decimals = found.groups()
    return Fraction(f"{sign}{whole.replace(',', '')}{decimals or ''}")
