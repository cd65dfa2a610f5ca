"""Parse and compute calculator calls. The text comes from a model, so it is parsed and never evaluated as code."""

OPERATORS = "*+-"
MOST_DIGITS = 12
CALL = "calc "


def called(text: str) -> str | None:
    """Return the result of the call at the end of a text, `calc INT*INT` on a line of its own. None: no call."""
    last = text[-(len(CALL) + 2 * MOST_DIGITS + 8) :].rstrip().rpartition("\n")[2].strip()
    if not last.startswith(CALL):
        return None
    return calculate(last.removeprefix(CALL).strip())


def calculate(expression: str) -> str | None:
    """Return the value of INT op INT, with `*`, `+` or `-` and at most 12 digits each. None for any other text."""
    for operator in OPERATORS:
        left, found, right = expression.partition(operator)
        if found:
            return _result(left.strip(), operator, right.strip())
    return None


def _result(left: str, operator: str, right: str) -> str | None:
    if not all(text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS for text in (left, right)):
        return None
    a, b = int(left), int(right)
    return str(a * b if operator == "*" else a + b if operator == "+" else a - b)
