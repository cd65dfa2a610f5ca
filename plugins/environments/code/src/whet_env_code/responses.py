"""Find the program in what a model wrote.

The text is hostile: it is searched in time linear in its length, and never parsed. What a record has before it is.
"""

import ast
import re
import warnings

from attrs import frozen

# possessive: a long line of spaces or letters before a backtick would otherwise take quadratic time
_FENCE = re.compile(r"^[ \t]{0,3}(`{3,}+)[ \t]*+([\w+-]*+)[^\n`]*+$", re.MULTILINE)
_LANGUAGES = ("python", "py", "python3", "")
LONGEST = 1 << 18
"""Most characters of a response that are searched; a longer one has no program."""


@frozen
class Block:
    """A fenced block of code."""

    language: str
    code: str


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a text. A fence is closed by one of as many backquotes, or more. A last block that is
    not closed counts, too.
    """
    if len(text) > LONGEST:
        return []
    found, begun = list[Block](), None
    for fence in _FENCE.finditer(text):
        if begun is None:
            begun = fence
        elif not fence[2] and len(fence[1]) >= len(begun[1]):
            found.append(Block(begun[2].lower(), text[begun.end() + 1 : fence.start()]))
            begun = None
    if begun is not None:
        found.append(Block(begun[2].lower(), text[begun.end() + 1 :]))
    return found


def program_in(text: str, before: str, name: str) -> str:
    """Return the whole program: `before`, and the response's code.

    The code is the last fenced block of Python that defines `name`, or else the last block. If there is no block, the
    whole response is the code, as the continuation of `before`. Empty: there is no program.

    :param before: the beginning of the program, e.g. imports and the head of the function. :param name: the function
        that is graded; empty: none in particular.
    """
    if len(text) > LONGEST:
        return ""
    if not _FENCE.search(text):
        return before + text
    codes = [block.code for block in blocks(text) if block.language in _LANGUAGES]
    defining = [code for code in codes if defines(code, name)] if name else []
    if defining:
        return whole(before, defining[-1])
    return before + codes[-1] if codes else ""


def whole(before: str, code: str) -> str:
    """Return the program of a beginning and of code that defines the function itself."""
    return f"{before}{ending(before) or ''}\n\n{code}" if before else code


def ending(before: str) -> str | None:
    """Return what makes a beginning whole: nothing, or a body for the function at its end. None: it is no Python."""
    for end in ("", "\n    pass\n", "\n        pass\n"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse(before + end)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        return end
    return None


def defines(code: str, name: str) -> bool:
    """Return whether code defines a function, a class or a variable of a name, at its outermost level."""
    return (
        re.search(
            rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{re.escape(name)}\b|^{re.escape(name)}[ \t]*=", code, re.MULTILINE
        )
        is not None
    )


def tool_call(text: str) -> str | None:
    """Return the code of the last block if its language is `run`. None: the model calls no tool."""
    found = blocks(text)
    return found[-1].code if found and found[-1].language == "run" else None
