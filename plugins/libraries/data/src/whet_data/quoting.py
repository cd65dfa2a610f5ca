r"""Prompts for a model that reads what another model wrote, and what it answers.

    asked = filled("Judge this:\n{response}\nEnd with a line `Score: NUMBER`.", {"response": quoted(text)})
    answer_line(await judge.reply(asked, seed=seed), "Score", r"\d+")

Text that a model wrote is hostile. It is quoted line by line, so that it cannot end its own quotation, and it is never
read as a template.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from whet.data.records import Reply

_NAME = re.compile(r"\{([A-Za-z_]\w*)\}")
_MARKERS = re.compile(r"<(?=[|｜])|<(?=/?s>)|<(?=(?:start|end)_of_turn>)|<(?=(?:bos|eos|pad)>)|\[(?=/?INST\])")
"""What the special tokens of usual chat templates begin with."""


def without_markers(text: str) -> str:
    """Return a text in which a space breaks the special tokens of usual chat templates: `<|im_end|>`, `</s>`, `[INST]`.

    A chat template would take them for the end of a message.
    """
    return _MARKERS.sub(lambda found: f"{found[0]} ", text)


def cut(text: str, most: int) -> str:
    """Return a text without special tokens. One of more than `most` characters loses its middle; a line says how many.

    The line is added to `most` characters.
    """
    if len(text) > most:
        left_out, end = len(text) - most, len(text) - most // 2
        text = f"{text[: most - most // 2]}\n[{left_out} characters left out]\n{text[end:]}"
    return without_markers(text)


def shown(output: str, most: int) -> str:
    """Return the output of a tool as a message, `cut` and never empty."""
    return cut(output, most).strip("\n") or "[no output]"


def quoted(text: str, most: int = 0) -> str:
    """Return a text with `> ` before each line, without special tokens.

    most: a longer text loses characters in its middle; a line that is not quoted says how many. 0: no limit.
    """
    if most and len(text) > most:
        left_out, end = len(text) - most, len(text) - most // 2
        return f"{quoted(text[: most - most // 2])}\n[{left_out} characters left out]\n{quoted(text[end:])}"
    lines = without_markers(text).splitlines() or [""]
    return "\n".join(f"> {line}".rstrip() for line in lines)


def filled(template: str, values: Mapping[str, str]) -> str:
    """Return a template with each `{name}` of `values` replaced. What is put in is not read again."""
    return _NAME.sub(lambda found: values.get(found[1], found[0]), template)


def answer_line(reply: Reply, name: str, value: str) -> str | None:
    """Return the value in the last line of the form `NAME: VALUE`, also `**NAME:** VALUE.`. None: there is none.

    A line that begins with ">" never counts, so a model that repeats a quotation does not answer by it. The last line
    of a text that was cut by its length does not count either: it may be incomplete.

    :param value: a regular expression of the value. Case does not matter.
    """
    text = "\n".join(reply.text.splitlines())
    if reply.stop != "stop":
        text = text.rpartition("\n")[0]
    paint = r"[ \t*_#]{0,8}"
    found = re.findall(rf"(?aim)^{paint}{name}{paint}:{paint}({value})\.?{paint}$", text)
    return found[-1] if found else None


def template_with(names: Collection[str], wanted: Collection[str]) -> Any:
    """Return a validator that refuses a template with an unknown `{name}`, or without any of the wanted ones."""

    def check(instance: object, attribute: Any, value: str) -> None:
        held = set(_NAME.findall(value))
        known = ", ".join(f"{{{name}}}" for name in names)
        if unknown := sorted(held - set(names)):
            raise ValueError(f"has the placeholder {{{unknown[0]}}}, wanted some of {known}")
        if wanted and not held & set(wanted):
            raise ValueError(f"has none of the placeholders {', '.join(f'{{{name}}}' for name in wanted)}")

    return check
