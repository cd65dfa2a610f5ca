"""Format names, numbers and untrusted text: columns, digits, and no control characters."""

import unicodedata
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

OF_ROLLOUTS = (
    "reward/mean", "*/reward/mean", "reward/std", "response_length/mean", "response_length/cut", "kl/reverse",
)  # fmt: skip
OF_DATA = ("loss", "rewards/accuracies", "rewards/margins", "accuracy", "margin")
"""Default columns of a row: of a run with rollouts, and of a run on data files. A run shows the metrics that it has."""

OBEYED = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode categories of characters that move the cursor, reorder text or cannot be shown."""


def chosen(names: Iterable[str], patterns: Sequence[str] = ()) -> list[str]:
    """Return the metrics of a row: in the order of the patterns, by name within a pattern."""
    ordered = sorted(names)
    picked: dict[str, None] = {}
    for pattern in patterns or (OF_ROLLOUTS if "reward/mean" in ordered else OF_DATA):
        picked.update((name, None) for name in ordered if fnmatchcase(name, pattern))
    return list(picked)


def number(value: float) -> str:
    """Return a number as text with four significant digits. Whole numbers have no decimals."""
    if abs(value) < 1e9 and value == int(value):
        return str(int(value))
    return f"{value:.4g}"


def with_interval(value: float, bounds: Sequence[float] = ()) -> str:
    """Return a number as text, with the two ends of its interval if it has one."""
    return f"{number(value)} ({' to '.join(map(number, bounds))})" if len(bounds) == 2 else number(value)


def harmless(text: str, limit: int, encoding: str = "utf-8") -> str:
    """Return untrusted text that is safe to print: control and bidirectional characters as escapes, cut to a length.

    Line ends become ` / `. Characters that the encoding lacks become escapes, too.
    """
    flat = " / ".join(part.strip() for part in text[: 2 * limit].splitlines() if part.strip())
    shown = "".join(c if unicodedata.category(c) not in OBEYED else ascii(c)[1:-1] for c in flat)
    shown = shown.encode(encoding, "backslashreplace").decode(encoding)
    return shown if len(shown) <= limit and len(text) <= 2 * limit else shown[: max(limit - 3, 0)] + "..."
