"""What a run folder says about its run, as a plain dict: the data of the page. Missing files leave gaps, no errors."""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from attrs import asdict

from whet.data.files import read_rows
from whet.errors import WhetError
from whet_memory.compared import compare
from whet_report import curves, episodes, gaps, timing
from whet_report.findings import findings

EVENTS = 400
"""Events of the journal that are kept, the last ones; finished steps are not counted among them."""
LOG_CHARACTERS, LOGS = 6_000, 16
"""The end of each worker's log, and the number of workers whose logs are shown."""

Json = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]


def read_run(folder: Path) -> Json:
    """Read a run folder, also of a run that goes on. Raises `WhetError` where it holds no run."""
    if not any(is_file(folder / name) for name in ("metrics.jsonl", "journal.jsonl", "config.yaml")):
        raise WhetError(
            f"{folder} holds no run: there is no metrics.jsonl, journal.jsonl or config.yaml in it; "
            "give the folder that is `run.folder` in the config"
        )
    rows, events = rows_of(folder / "metrics.jsonl"), rows_of(folder / "journal.jsonl")
    metrics = curves.metrics(rows)
    config = text_of(folder / "config.yaml")
    settings = _settings(config)
    widest = {s: row["logprob_gap/max"] for s, row in metrics.items() if "logprob_gap/max" in row}
    training = episodes.rollouts(folder, _every(settings), widest)
    wanted = value(settings, "run", "steps") or _planned(events)
    plan = _json(folder / "plan.json")
    run = {
        "name": folder.resolve().name, "folder": str(folder.resolve()), "written": round(time.time()),
        **state(events, max(metrics, default=0), wanted), "facts": _facts(settings),
    }  # fmt: skip
    return {
        "run": run, "findings": findings(metrics, run),
        "curves": curves.curves(metrics),
        "time": timing.timing(rows, rows_in(folder / "spans.jsonl")),
        "training": training, "gaps": gaps.gaps(training["sources"]), "evaluation": episodes.evaluations(folder),
        "config": config, "versions": _versions(_json(folder / "versions.json")), "plan": plan,
        "memory": [asdict(one) for one in compare(plan, rows)],
        "journal": _journal(events), "logs": _logs(folder / "logs"),
    }  # fmt: skip


def is_file(file: Path) -> bool:
    """Return whether there is a file; a name that no file system can hold names none."""
    try:
        return file.is_file()
    except (OSError, ValueError):
        return False


def rows_of(file: Path) -> list[Json]:
    """Read JSON lines; none where there is no file."""
    return list(rows_in(file))


def rows_in(file: Path) -> Iterator[Json]:
    """Read JSON lines one by one; none where there is no file."""
    return read_rows(file) if is_file(file) else iter(())


def text_of(file: Path) -> str:
    """Read a text file; empty where there is none."""
    return file.read_text(encoding="utf-8", errors="replace") if is_file(file) else ""


def value(settings: Any, *path: str) -> Any:
    """Look up a key of the config; None where there is none."""
    for key in path:
        settings = settings.get(key) if isinstance(settings, Mapping) else None
    return settings


def state(events: Rows, done: int, wanted: Any) -> Json:
    """Return how the run stands, by its journal: finished, stopped, failed, or open (under way, or killed)."""
    last = next((e for e in reversed(events) if e.get("event") in ("opened", "closed", "failed")), {})
    times = [time for e in events if (time := episodes.number(e.get("time"))) is not None]
    word = {"failed": "failed", "opened": "open", "closed": "stopped"}.get(str(last.get("event")), "unknown")
    if word == "stopped" and isinstance(wanted, int) and done >= wanted:
        word = "finished"
    return {
        "state": word,
        "error": episodes.text(last.get("message") or last.get("error", "")) if word == "failed" else "",
        "done": done,
        "steps": episodes.number(wanted),
        "began": times[0] if times else None,
        "last_sign": times[-1] if times else None,
        "seconds": round(_worked(events), 1),
        "run_attempts": sum(e.get("event") == "opened" for e in events),
        "replica_restarts": sum(e.get("event") == "replica restarted" for e in events),
        "run_restarts": sum(e.get("event") == "run restarted" for e in events),
    }


def _planned(events: Rows) -> Any:
    """Return how many steps the last run attempt was to take: a run that states epochs learns it from its data."""
    return next((e.get("steps") or None for e in reversed(events) if e.get("event") == "opened"), None)


def _worked(events: Rows) -> float:
    """Return the seconds during which the run was at work, over all its run attempts."""
    seconds, before = 0.0, None
    for event in events:
        now = episodes.number(event.get("time"))
        if now is None:
            continue
        if before is not None and event.get("event") != "opened":
            seconds += max(0.0, now - before)
        before = now
    return seconds


def _settings(config: str) -> Any:
    try:
        return yaml.safe_load(config)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None


def _every(settings: Any) -> int:
    every = value(settings, "rollout", "record", "every")
    return every if isinstance(every, int) and every > 0 else 0


def _facts(settings: Any) -> list[list[str]]:
    """Return what a reader wants to know first."""
    environments = value(settings, "environments")
    named = [str(value(one, "name") or value(one, "use")) for one in episodes.listed(environments)]
    facts = [
        ("model", value(settings, "model", "path")),
        ("algorithm", value(settings, "algorithm", "use")),
        ("backend", value(settings, "backend", "use")),
        ("generator", value(settings, "generator", "use")),
        ("environments", ", ".join(named)),
        ("max staleness", value(settings, "rollout", "max_staleness") if named else None),
        ("seed", value(settings, "run", "seed")),
    ]
    return [[name, str(found)] for name, found in facts if found not in (None, "")]


def _versions(held: Any) -> Any:
    """Return the versions of roles that have a Python of their own, beside the driver's."""
    roles = value(held, "roles")
    if not isinstance(roles, Mapping):
        return held
    told = {role: found for role, found in roles.items() if isinstance(found, Mapping)}
    own = {f"{role}: {name}": one for role, found in told.items() for name, one in found.items()}
    return {**{name: one for name, one in held.items() if name != "roles"}, **own}


def _json(file: Path) -> Any:
    try:
        return json.loads(text_of(file) or "null")
    except (ValueError, RecursionError):
        return None


def _journal(events: Rows) -> list[Json]:
    told = [event for event in events if event.get("event") != "step"][-EVENTS:]
    return [
        {
            "time": episodes.number(event.get("time")),
            "event": episodes.text(event.get("event", "")),
            "details": {str(k): episodes.text(v) for k, v in event.items() if k not in ("time", "event")},
        }
        for event in told
    ]


def _logs(folder: Path) -> list[Json]:
    """Return the end of each worker's output; roles that share a process have one log between them."""
    files = [file for file in sorted(folder.glob("*.log")) if file.is_file() and not file.is_symlink()]
    return [{"name": file.name, "text": _tail(file)} for file in files[:LOGS]]


def _tail(file: Path) -> str:
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - LOG_CHARACTERS))
        text = stream.read().decode("utf-8", errors="replace")
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
