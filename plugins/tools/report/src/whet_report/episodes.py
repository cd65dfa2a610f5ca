"""Which episodes of a run the page holds, and what of each. Rows were written by anybody: nothing in them is trusted.

Steps: those recorded token by token come first (the first, the last, those with the widest gaps, and some between),
then others spread over the run. Each step gets an equal share of the room, and what it leaves goes to the next.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whet.data.files import read_rows, step_of
from whet.errors import WhetError

ROOM = 12_000_000
"""Characters that all episodes may take on the page."""
STEPS, RECORDED_STEPS, EVALUATIONS = 36, 24, 8
MOST_EPISODES = 256
"""Episodes of one step."""
MOST_CHARACTERS = 20_000
"""Characters of one message."""
MOST_IMAGE = 1_000_000
"""Characters of one image."""
SHOWN_IMAGE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+")
"""Images that the page shows. Other kinds, such as SVG, may hold markup."""
MOST_TOKENS = 16_384
"""Tokens of one sequence."""
NUMBERS = ("group", "task", "sample", "reward", "advantage", "turns", "response_length")
TOKEN_NUMBERS = ("sampler_logprobs", "trainer_logprobs")

Json = dict[str, Any]


def rollouts(folder: Path, every: int, gaps: dict[int, float]) -> Json:
    """Return training episodes. `every` is `rollout.record.every`; `gaps` has the widest gap of steps, if known."""
    found = ((step_of(file.name), file) for file in folder.glob("rollouts/step-*.jsonl") if file.is_file())
    files = {step: file for step, file in found if step is not None}
    chosen = choose_steps(sorted(files), every, gaps)
    return {**_sources((("training", step, "", files[step]) for step in chosen), ROOM), "steps": len(files)}


def evaluations(folder: Path) -> Json:
    """Return evaluation episodes: of each environment the first and the last evaluation, and some between."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for file in sorted(folder.glob("evaluations/step-*.jsonl")):
        if (step := step_of(file.name)) is not None and file.is_file():
            name = file.name.removesuffix(".jsonl").split("-", 2)[2:]
            found.setdefault("".join(name), []).append((step, file))
    chosen = [(name, *files[i]) for name, files in found.items() for i in reversed(spread(len(files), EVALUATIONS))]
    made = _sources((("evaluation", step, name, file) for name, step, file in chosen), ROOM // 4)
    return {**made, "steps": sum(map(len, found.values()))}


def choose_steps(steps: Sequence[int], every: int, gaps: dict[int, float]) -> list[int]:
    """Choose steps in order of importance; see the module."""
    recorded = [step for step in steps if every and (step == 1 or step % every == 0)]
    widest = sorted((s for s in recorded if s in gaps), key=lambda s: -gaps[s])[: RECORDED_STEPS // 3]
    ends = recorded[-1:] + recorded[:1]
    between = [recorded[i] for i in spread(len(recorded), RECORDED_STEPS)]
    first = list(dict.fromkeys([*ends, *widest, *between]))[:RECORDED_STEPS]
    others = [step for step in steps if step not in set(recorded)]
    return [*first, *(others[i] for i in spread(len(others), STEPS - len(first)))]


def spread(count: int, most: int) -> list[int]:
    """Return positions spread evenly over a list, its ends among them."""
    return sorted(set(np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist())) if count else []


def _sources(chosen: Iterable[tuple[str, int, str, Path]], room: int) -> Json:
    chosen, sources = list(chosen), []
    for left, (kind, step, name, file) in zip(range(len(chosen), 0, -1), chosen, strict=True):
        episodes, total = _read(file)
        kept, used = _fitting(episodes, room // left)
        room -= used
        sources.append({"kind": kind, "step": step, "name": name, "total": total, "episodes": kept})
    return {"sources": sorted(sources, key=lambda source: (source["step"], source["name"]))}


def _read(file: Path) -> tuple[list[Json], int]:
    """Read episodes, those recorded token by token first, and the number of all."""
    count = 0

    def wanted(line: str) -> bool:
        nonlocal count
        count += 1
        return count <= MOST_EPISODES or '"sequences"' in line

    try:
        found = [episode(row) for row in read_rows(file, wanted)]
    except (OSError, WhetError):  # removed meanwhile by a run that was resumed
        return [], 0
    found.sort(key=lambda one: not one["sequences"])
    return found[:MOST_EPISODES], count


def _fitting(episodes: Sequence[Json], room: int) -> tuple[list[Json], int]:
    kept, used = [], 0
    for one in episodes:
        size = len(json.dumps(one, ensure_ascii=False))
        if used + size <= room:
            kept.append(one)
            used += size
    return sorted(kept, key=lambda one: (one["group"] or 0, one["sample"] or 0)), used


def episode(row: Json) -> Json:
    """Return what the page shows of a row; a value of another form than the row should have is shown as text."""
    rewards, messages, sequences = row.get("rewards"), row.get("messages"), row.get("sequences")
    return {
        **{name: number(row.get(name)) for name in NUMBERS},
        **{name: text(row.get(name, "")) for name in ("environment", "id", "stop")},
        **{name: text(row[name]) for name in ("gold", "answer") if row.get(name) is not None},
        "versions": [number(version) for version in listed(row.get("versions"))[:2]],
        "rewards": {str(k): number(v) for k, v in rewards.items()} if isinstance(rewards, dict) else {},
        "messages": [message(one) for one in listed(messages)],
        "recorded": recorded(row.get("recorded")),
        "addressed": [addressed(one) for one in listed(row.get("addressed")) if isinstance(one, dict)],
        "sequences": [made for one in listed(sequences) if (made := sequence(one))],
    }


def message(found: Any) -> Json:
    """Return a message of the conversation."""
    if not isinstance(found, dict):
        return {"role": "", "content": text(found)}
    content = found.get("content", "")
    parts = [part for part in listed(content) if isinstance(part, dict)]
    said = "".join(text(part.get("text", "")) for part in parts) if parts else text(content)
    return {"role": text(found.get("role", "")), "content": said, "images": [i for part in parts if (i := image(part))]}


def image(part: Any) -> str:
    """Return the data URL of an image that the page may show, else "". The page loads nothing from elsewhere."""
    url = part.get("url") if isinstance(part, dict) and part.get("type") == "image" else None
    return url if isinstance(url, str) and len(url) <= MOST_IMAGE and SHOWN_IMAGE.fullmatch(url) else ""


def recorded(found: Any) -> list[Json]:
    """Return what the environment recorded: name, text, and image where there is one."""
    shown = []
    for name, value in (found if isinstance(found, dict) else {}).items():
        seen = image(value)
        shown.append({"name": text(name), "content": "" if seen else text(value), "images": [seen] if seen else []})
    return shown


def addressed(found: Json) -> Json:
    """Return the rewards of a sequence: its agent, its reward, and the rewards of its turns."""
    turns = [one for one in listed(found.get("turns")) if isinstance(one, dict)]
    return {
        "agent": text(found.get("agent", "")),
        "reward": number(found.get("reward")),
        "turns": [
            {"turn": number(one.get("turn")), "name": text(one.get("name", "")), "value": number(one.get("value"))}
            for one in turns
        ],
    }


def sequence(found: Any) -> Json | None:
    """Return a recorded sequence, cut to a length that can be shown; None where it is none."""
    if not isinstance(found, dict) or not isinstance(found.get("tokens"), list):
        return None
    count = len(found["tokens"])

    def column(name: str, convert: Callable[[Any], Any]) -> list[Any]:
        values = found.get(name)
        fits = isinstance(values, list) and len(values) == count
        return [convert(value) for value in values[:MOST_TOKENS]] if fits and values is not None else []

    columns = found.get("columns")
    numbers = {name: column(name, number) for name in TOKEN_NUMBERS}
    return {
        "prompt_length": number(found.get("prompt_length")) or 0,
        "length": count,
        "tokens": column("tokens", number),
        "pieces": column("pieces", text) or [""] * min(count, MOST_TOKENS),
        "loss_mask": column("loss_mask", lambda value: int(bool(value))) or [0] * min(count, MOST_TOKENS),
        "versions": column("versions", number),
        **numbers,
        "columns": {
            str(name): [number(v) for v in value[:MOST_TOKENS]] if isinstance(value, list) else number(value)
            for name, value in (columns.items() if isinstance(columns, dict) else ())
        },
    }


def listed(value: Any) -> list[Any]:
    """Return a list; an empty one for anything else."""
    return value if isinstance(value, list) else []


def number(value: Any) -> float | int | None:
    """Return a finite number that a float can hold; None for anything else."""
    if isinstance(value, bool | int):
        return int(value) if abs(value) < sys.float_info.max else None
    if isinstance(value, float) and abs(value) < float("inf"):
        return int(value) if value == 0 else value
    return None


def text(value: Any) -> str:
    """Return text, cut to a length that can be shown."""
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(shown) <= MOST_CHARACTERS:
        return shown
    return f"{shown[:MOST_CHARACTERS]} [{len(shown) - MOST_CHARACTERS} more characters]"
