r"""Find the answer that a model wrote in `\boxed{...}`, in time linear in the length of the text."""

OPENING = "\\boxed{"


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`, with balanced braces. None: there is none, or it is not closed."""
    begin = text.rfind(OPENING)
    if begin < 0:
        return None
    begin += len(OPENING)
    depth = 1
    for at in range(begin, len(text)):
        if text[at] == "{":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                return text[begin:at]
    return None


def is_integer(text: str, answer: str) -> bool:
    """Return whether text is the integer `answer`, written in ASCII digits. White space around it is allowed."""
    text = text.strip()
    digits = text.removeprefix("-")
    # compared as text: a number of a million digits costs nothing
    return digits.isascii() and digits.isdigit() and _canonical(text) == _canonical(answer)


def boxed_integer(text: str) -> str | None:
    r"""Return the last boxed integer in its shortest form, `\boxed{ -007 }` as `-7`. None: the box holds no integer."""
    boxed = last_boxed(text)
    return _canonical(boxed.strip()) if boxed is not None and is_integer(boxed, boxed.strip()) else None


def _canonical(text: str) -> str:
    digits = text.removeprefix("-").lstrip("0") or "0"
    return f"-{digits}" if text.startswith("-") and digits != "0" else digits
