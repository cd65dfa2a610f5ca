"""Converts records of common data sets to the columns that algorithms read.

    sharegpt   {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}], "system": ...}
    alpaca     {"instruction": ..., "input": ..., "output": ..., "system": ..., "history": [[question, answer], ...]}
    plain      {"messages": ...}, {"prompt": ..., "completion": ...}, {"text": ...}, {"prompt", "chosen", "rejected"}

The result has `messages`, or `prompt` and `completion`. Preference data has `prompt`, `chosen` and `rejected`.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from whet.config.sections import DataFile
from whet.errors import DataError
from whet_data.readers import Row, find_file, format_of, format_words, read
from whet_data.turns import BESIDE, TurnsInText, from_json, listed

SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
    "tool": "tool", "observation": "tool",
}  # fmt: skip
"""Message roles by ShareGPT's name of the speaker."""
CONVERSATIONS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
"""Columns whose value may be a list of turns."""
PLAIN = (("messages",), ("prompt", "completion"), ("prompt", "chosen", "rejected"))
"""A record that has all columns of one of these tuples is plain, whatever else it has."""
LABELS = {
    "true": True, "1": True, "1.0": True, "yes": True, "false": False, "0": False, "0.0": False, "no": False,
}  # fmt: skip
"""Labels by their text, for files that have only text."""
TABLES = ("csv", "tsv", "parquet", "saved", "hub")
"""Formats of tables. Only there may a prompt or a response be the JSON text of its turns."""
FIRST_RECORDS = 20
"""Number of records of a data file that a check looks at."""


def records(file: DataFile, names: Mapping[str, str]) -> Iterator[Row]:
    """Yield the records of a file in the columns that an algorithm reads. `names` maps fields to the algorithm's
    columns.
    """
    return (laid_out(row, file, names) for row in read(file))


def laid_out(row: Row, file: DataFile, names: Mapping[str, str]) -> Row:
    """Return a row in the columns that an algorithm reads, or with a problem if it cannot be converted."""
    if row.problem:
        return row
    try:
        return evolve(row, record=_laid_out(dict(row.record), file, names))
    except DataError as error:
        return evolve(row, record={}, problem=str(error))


def with_turns(row: Row, file: DataFile, column: str) -> Row:
    """Return a row with a prompt in a column as messages, if it has ShareGPT's turns, or is a table's cell with the
    JSON text of turns. Raises `DataError`.
    """
    record = dict(row.record)
    _read_turns(record, column, "prompt", file)
    return evolve(row, record=record)


def layout_of(record: Mapping[str, Any], file: DataFile, names: Mapping[str, str]) -> str:
    """Return the layout of a record: the one that the config states, or else the one that its columns show.

    A column that the config gives another meaning shows nothing, nor does an empty column. Plain columns come first: a
    record that has them is never converted.
    """
    if file.layout != "auto":
        return file.layout
    record = _renamed(record, file, names)
    taken = {*names.values(), *(own for name, own in file.fields.items() if name != own)}
    if any(all(_has(record, name, names) for name in wanted) for wanted in PLAIN):
        return "plain"
    if "conversations" not in taken and _turns(record.get("conversations")) is not None:
        return "sharegpt"
    answered = record.get("output") is not None or _has(record, "chosen", names)
    asked = "instruction" not in taken and record.get("instruction") is not None
    return "alpaca" if asked and answered else "plain"


@frozen
class Recognised:
    """What the first records of a file show."""

    rows: tuple[Row, ...]
    """The first records, in the columns that the algorithm reads."""
    columns: tuple[str, ...]
    """Columns of the file, by the file's own names."""
    missing: tuple[str, ...]
    """Columns that `fields` names and that no record has."""
    words: str
    """Format, columns and layout as text, for the plan."""


def recognise(file: DataFile, names: Mapping[str, str]) -> Recognised:
    """Return what the first records of a file show. Raises `DataError` if the file cannot be read."""
    rows = list(itertools.islice(read(file), FIRST_RECORDS))
    good = [row for row in rows if not row.problem]
    columns = tuple(dict.fromkeys(name for row in good for name in row.record))
    layouts = sorted({layout_of(row.record, file, names) for row in good} - {"plain"})
    shown = {"sharegpt": "ShareGPT: `messages`", "alpaca": "Alpaca: `prompt` and `completion`"}
    if any(_has(_renamed(row.record, file, names), "chosen", names) for row in good):
        shown = {"sharegpt": "ShareGPT: `prompt` and two responses", "alpaca": "Alpaca: `prompt` and two responses"}
    words = [format_words(file), f"columns {_listed(columns)}", *(shown[layout] for layout in layouts)]
    return Recognised(
        rows=tuple(laid_out(row, file, names) for row in rows),
        columns=columns,
        missing=tuple(own for own in file.fields.values() if good and own not in columns),
        words="; ".join(words),
    )


def found_words(record: Mapping[str, Any]) -> str:
    """Return the columns of a record as text for an error. Empty columns are marked."""
    first = itertools.islice(record.items(), 12)
    shown = [f"{name!r:.40}{' (empty)' if value is None else ''}" for name, value in first]
    return ", ".join([*shown, *["..."] * (len(record) > 12)]) or "none"


def _laid_out(record: Mapping[str, Any], file: DataFile, names: Mapping[str, str]) -> dict[str, Any]:
    layout, record = layout_of(record, file, names), _renamed(record, file, names)
    for column in BESIDE:
        if column in file.fields.values() and column not in (*file.fields, *names.values()):
            record.pop(column, None)  # the file gives it another meaning
    for name in CONVERSATIONS:
        _read_turns(record, names.get(name, name), name, file)
    for name, read_text in (("label", _label), ("margin", _number)):
        own = names.get(name, name)
        if isinstance(record.get(own), str):
            record[own] = read_text(record[own])
    if layout == "sharegpt":
        record |= _written(_sharegpt(record, names), names)
    if layout == "alpaca":
        record |= _written(_alpaca(record), names)
    return record


def _has(record: Mapping[str, Any], name: str, names: Mapping[str, str]) -> bool:
    """Return whether a record has a value in a column. Rows of a table have empty columns."""
    return record.get(names.get(name, name)) is not None


def _renamed(record: Mapping[str, Any], file: DataFile, names: Mapping[str, str]) -> dict[str, Any]:
    """Return a record with the columns that `fields` of its file renames added."""
    own = {names.get(name, name): record[own] for name, own in file.fields.items() if own in record}
    return {**record, **own}


def _written(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in values.items()}


def _read_turns(record: dict[str, Any], column: str, name: str, file: DataFile) -> None:
    """Replace turns with `from` and `value`, turns written as JSON text, and an object of lists with messages, in
    place.
    """
    if column not in record:
        return
    value = record[column] = listed(record[column])
    if isinstance(value, str) and name not in ("messages", "conversations"):
        found = _turns(value) or ()  # a text may be JSON, too
        known = all(turn.get("role") in (None, *SPEAKERS.values()) for turn in found)
        if found and known and format_of(file, find_file(file)) in TABLES:
            value = record[column] = TurnsInText(found, value)
    if isinstance(value, str) and name in ("messages", "conversations") and value.lstrip()[:1] == "[":
        try:
            value = record[column] = from_json(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"the column `{column}` is text that is no JSON list of messages: {error}") from error
    turns = None if isinstance(value, str) else _turns(value)
    if turns is not None and name != "conversations" and any("from" in turn for turn in turns):
        messages = [_message(turn) for turn in turns]
        record[column] = TurnsInText(messages, value.text) if isinstance(value, TurnsInText) else messages


def _turns(value: Any) -> Sequence[Mapping[str, Any]] | None:
    """Return the turns of a conversation: `from` and `value`, or `role` and `content` or calls. None: the value has no
    turns.
    """
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            value = from_json(value)
        except (ValueError, RecursionError):
            return None
    value = listed(value)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list) or not value or not all(isinstance(turn, Mapping) for turn in value):
        return None
    return value if all({"from", "value"} <= set(turn) or _is_message(turn) for turn in value) else None


def _is_message(turn: Mapping[str, Any]) -> bool:
    return "role" in turn and any(key in turn for key in ("content", "tool_calls", "function_call"))


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ShareGPT turn as a message."""
    if turn.get("role") is not None:  # tables have all keys in every turn; some are empty
        return dict(turn)
    speaker, text = turn.get("from"), turn.get("value")
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise DataError(f"a turn is `from` {speaker!r:.40}, wanted one of {', '.join(SPEAKERS)}")
    if not isinstance(text, str):
        raise DataError(f"the `value` of a turn is {text!r:.60}, wanted text")
    kept = {key: turn[key] for key in ("weight", "train") if turn.get(key) is not None}
    return {"role": SPEAKERS[speaker], "content": text, **kept}


def _sharegpt(record: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the columns of a ShareGPT record: `messages`, or `prompt` if the record is a preference pair."""
    talk = record.get("conversations")
    turns = _turns(talk)
    if turns is None:
        raise DataError(
            f"the column `conversations` is {talk!r:.80}, wanted a list of turns with `from` and `value`; the record "
            f"has the columns {found_words(record)}"
        )
    messages = [_message(turn) for turn in turns]
    messages = messages if messages[0]["role"] == "system" else [*_system(record), *messages]
    return {"prompt" if _has(record, "chosen", names) else "messages": messages}


def _alpaca(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of an Alpaca record: `prompt`, and `completion` unless the record is a preference pair."""
    question, given = _text(record, "instruction"), _text(record, "input", needed=False)
    question = f"{question}\n\n{given}" if given.strip() else question
    before = [*_system(record), *_history(record)]
    prompt = [*before, {"role": "user", "content": question}] if before else question
    return {"prompt": prompt, **({} if record.get("output") is None else {"completion": _text(record, "output")})}


def _history(record: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Yield the earlier questions and answers of an Alpaca record as messages."""
    history = record.get("history")
    if not isinstance(history, list | tuple | None):
        raise DataError(f"the column `history` is {history!r:.60}, wanted a list of pairs of question and answer")
    for pair in history or ():
        if not isinstance(pair, Sequence) or len(pair) != 2 or not all(isinstance(one, str) for one in pair):
            raise DataError(f"the column `history` has {pair!r:.60}, wanted pairs of question and answer")
        yield {"role": "user", "content": pair[0]}
        yield {"role": "assistant", "content": pair[1]}


def _system(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the system message of a record in a list. Empty list: it has none."""
    text = _text(record, "system", needed=False)
    return [{"role": "system", "content": text}] if text.strip() else []


def _text(record: Mapping[str, Any], column: str, needed: bool = True) -> str:
    value = record.get(column)
    if value is None and not needed:
        return ""
    if not isinstance(value, str) or (needed and not value):
        raise DataError(f"the column `{column}` is {value!r:.60}, wanted text; the record has {found_words(record)}")
    return value


def _label(text: str) -> Any:
    return LABELS.get(text.strip().lower(), text)


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(escaped(name[:40]) for name in columns[:12]) + ", ..." * (len(columns) > 12) or "none"


def escaped(text: str) -> str:
    """Return text whose control characters, line breaks and marks of writing direction are escaped."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
