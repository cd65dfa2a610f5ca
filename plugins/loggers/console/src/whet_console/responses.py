"""Responses of the first and the last evaluation to the same tasks, from the records of the run folder."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import frozen

Key = tuple[str, int]  # environment, task


@frozen
class Response:
    """One episode: its prompt, the messages after the prompt, and its reward."""

    prompt: str
    text: str
    reward: float


@frozen
class Pair:
    """One task with its responses from the first and from the last evaluation."""

    environment: str
    task: int
    before: Response
    after: Response
    steps: tuple[int, int]


def pairs(folder: Path, wanted: int) -> list[Pair]:
    """Return the responses to the first tasks of the evaluation, in pairs. The tasks are not selected by result."""
    files: dict[int, list[Path]] = {}
    for path in sorted((folder / "evaluations").glob("step-*.jsonl")):
        found = re.match(r"step-(\d+)", path.name)
        if found:
            files.setdefault(int(found.group(1)), []).append(path)
    if wanted < 1 or len(files) < 2:
        return []
    first, last = min(files), max(files)
    before, after = _responses(files[first]), _responses(files[last])
    common = [key for key in before if key in after][:wanted]
    return [Pair(*key, before[key], after[key], (first, last)) for key in common]


def _responses(paths: list[Path]) -> dict[Key, Response]:
    """Return the first sample of each task, in the order of the files."""
    found: dict[Key, Response] = {}
    for path in paths:
        for record in _records(path):
            try:
                key = (str(record["environment"]), int(record["task"]))
                found.setdefault(key, _response(record))
            except (KeyError, TypeError, ValueError):
                continue
    return found


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def _response(record: dict[str, Any]) -> Response:
    messages = [(str(message["role"]), str(message["content"])) for message in record["messages"]]
    start = next((i for i, (role, _) in enumerate(messages) if role == "assistant"), len(messages))
    prompt = "\n".join(text for _, text in messages[:start])
    text = "\n".join(text if role == "assistant" else f"({role}) {text}" for role, text in messages[start:])
    return Response(prompt, text, float(record["reward"]))
