"""The kinds of cases. Each changes a copy of something, uses it as people do, and returns the faults that it finds.

A fault is an exception that is not one of whet's own, or something accepted that a reader would call wrong: an unknown
key, a number that is not finite or out of bounds, a value of another type, a damaged checkpoint, a record that
vanishes.
"""

import gzip
import io
import json
import logging
import math
import os
import random
import shutil
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import click
from attrs import define, field
from ground import DATA, STEPS, Ground, copy_of_run, run_config
from mutations import (
    BAD_RECORDS,
    INFINITE,
    LONG,
    NEVER,
    change_document,
    change_folder,
    change_text,
    dotted,
    found,
    leaves,
    nested,
    put,
    to_text,
    wrong_for,
)

from whet.cli.app import group
from whet.config.sections import DataFile, DataSection
from whet.errors import WhetError
from whet.plan.prepare import prepare
from whet_chat.tokenizer import ChatTokenizer
from whet_data.demonstrations import encode
from whet_data.offline import OfflineData
from whet_data.preferences import encode_pair
from whet_start.sources import explain, settings


@define
class Case:
    """One case: what was changed, how it ended, and what was wrong."""

    kind: str
    words: str = ""
    """What was changed."""
    outcome: str = ""
    """`refused` or `accepted`."""
    faults: list[str] = field(factory=list)

    @contextmanager
    def judged(self, must: bool = False) -> Iterator[None]:
        """Use what was changed: refused in whet's own words, or accepted where it need not be refused."""
        self.outcome = "refused"
        try:
            with quiet():
                yield
        except (WhetError, click.ClickException) as error:
            if "Traceback (most recent call last)" in str(error):
                self.faults.append(f"a traceback in an error: {str(error)[:300]}")
            if not str(error).strip():
                self.faults.append("an error without words")
        except SystemExit as end:
            self.faults.append(f"it exits with {end.code}")
        except BaseException:
            self.faults.append(f"a traceback:\n{traceback.format_exc()[-3000:]}")
        else:
            self.outcome = "accepted"
            if must:
                self.faults.append("it was accepted")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what is printed and logged to itself."""
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def command(case: Case, *arguments: str, must: bool = False) -> None:
    """Run a command in this process, as `whet` does."""
    with case.judged(must):
        if any("\0" in argument for argument in arguments):
            raise WhetError("no system passes a NUL on")
        code = group.main(args=list(arguments), standalone_mode=False)
        if code not in (0, None):
            raise WhetError(f"exit code {code}")


def recipe(chance: random.Random, ground: Ground, folder: Path) -> Case:
    """A recipe with one to three changes, checked or explained."""
    case = Case("recipe")
    base = chance.choice(ground.bases)
    document, must, words = dict(base.document), False, []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        try:
            document, change = change_document(chance, document)
        except (KeyError, IndexError, TypeError):  # an earlier change has taken it away
            continue
        words.append(change.words)
        must = change.must if len(words) == 1 else False  # a later change may take an earlier one back
    case.words = f"{base.name}: {'; '.join(words)}"
    file = folder / "it.yaml"
    file.write_text(to_text(document), encoding="utf-8")
    way = chance.choices(("prepare", "explain", "command"), (80, 12, 8))[0]
    if way == "prepare":
        with case.judged(must):
            prepare(file, registry=ground.registry).plan.describe()
    elif way == "explain":
        with case.judged(must):
            from whet.plan.load import load_config

            loaded = load_config(file, registry=ground.registry)
            explain(loaded, chance.choice(settings(loaded)).key)
    else:
        name = chance.choices(("check", "explain", "eval", "doctor"), (5, 5, 5, 1))[0]
        # Nothing to evaluate on: whatever is accepted ends there.
        more = ["evaluation.environments=[]"] if name == "eval" else []
        words_of = {"explain": ["config", "explain"]}.get(name, [name])
        command(case, *words_of, str(file), *more, must=must and name in ("check", "explain"))
    return case


def text(chance: random.Random, ground: Ground, folder: Path) -> Case:
    """A recipe whose text is damaged, or that gives a key twice."""
    case = Case("text")
    base = chance.choice(ground.bases)
    lines = to_text(base.document).splitlines()
    file, must = folder / "it.yaml", chance.random() < 0.2
    if must:
        at = chance.choice([i for i, line in enumerate(lines) if line.rstrip().endswith(",") and '": ' in line])
        lines.insert(at, lines[at])
        file.write_text("\n".join(lines))
        case.words = f"{base.name}: {lines[at].strip()!r:.60} is given twice"
    else:
        content, words = change_text(chance, "\n".join(lines).encode())
        file.write_bytes(content)
        case.words = f"{base.name}: {words}"
    with case.judged(must):
        prepare(file, registry=ground.registry)
    return case


def override(chance: random.Random, ground: Ground, folder: Path) -> Case:
    """Overrides of a recipe: wrong values, paths that lead nowhere, and what is none at all."""
    case = Case("override")
    base = chance.choice(ground.bases)
    file = folder / "it.yaml"
    file.write_text(to_text(base.document), encoding="utf-8")
    at, before = chance.choice(list(leaves(dict(base.document))))
    value, must = wrong_for(chance, at, before)
    how = chance.choices(("value", "path", "odd"), (65, 15, 20))[0]
    if how == "value":
        given = f"{dotted(at)}={to_text({'v': value})[len('{ v') + 5 : -1].strip()}"
        must = must and all(str(key) and "." not in str(key) for key in at)
    elif how == "path":
        given = f"{dotted(at)}.{chance.choice(('more', '0', '99', 'use.x', '-1', LONG))}=1"
        must = not isinstance(before, (dict, list)) and before is not None and at[-1] != "use" and _is_plain(before)
    else:
        given = chance.choice((
            "", "=", "a", "=1", ".=1", "a..b=1", "run.steps", "run.steps=[1", "run.steps={", "run.steps=!!int x",
            f"run.folder={LONG}", f"model.path={LONG}", f"{'a.' * 100}b=1", f"run.steps={'[' * 100}{']' * 100}",
            f"run.steps={'[' * 3000}", f"run.name={json.dumps(nested(100, 'mapping'))}", "run.folder=\ud800",
            'run.folder="a\\0b"', 'run.folder="a\\nb"', "run.folder=~nobody-here/x", "plugins=[x.py]",
            f"plugins=[{LONG}]", 'plugins=["\\0"]', "extends=it.yaml", "run=null", "run=[]", "\ud800.a=1",
            "environments.-1=x", "environments.0=null", "cluster.python={backend: ~nobody-here/x}",
            f"cluster.python={{backend: /{LONG}}}", 'cluster.python={backend: "/\\0"}', "run.seed=99999999999999999999",
            "algorithm.use=[]", "algorithm=null", "algorithm.loss.use=\u202e", "run.steps=&a [*a]",
            "data.train=[{path: ''}]", "model.chat_template=/dev/null/x",
            f"data.train=[{{path: {LONG}.jsonl}}]", 'data.train=[{path: "\\0.jsonl"}]',
            f"model.chat_template={LONG}", "model.chat_template=/", "roles.critic.model={path: /nowhere}",
        ))  # fmt: skip
        must = True
    case.words = f"{base.name} {given!r:.100}"
    with case.judged(must):
        prepare(file, [given], registry=ground.registry)
    return case


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def words(chance: random.Random, ground: Ground, folder: Path) -> Case:
    """Commands with odd arguments."""
    case = Case("command")
    odd = chance.choice((
        "", ".", "/", "nowhere", LONG, "a\nb", "\ud800", "\u202e", "-", "--", "~nobody-here", str(folder), "/dev/null",
        str(ground.run), "run.yaml", "backend/fsdp2", "losses", "losses/", "/losses", "a=b", "0", "-1", "é" * 200,
    ))  # fmt: skip
    file = str(ground.folder / "run.yaml")
    arguments = chance.choice((
        ("schema", odd), ("schema", "--json", odd), ("plugins", "why", odd), ("plugins", "list", odd), ("check", odd),
        ("config", "explain", file, odd), ("config", "explain", odd), ("report", odd),
        ("report", str(folder), "--out", odd), ("export", odd, str(folder / "out")), ("export", file, odd),
        ("export", str(ground.run), str(ground.folder)),
        ("export", str(ground.run), str(folder / "out"), "--step", "7"), ("eval", file, "--against", odd),
        ("export", str(ground.run), str(folder / "out"), "--step", odd), ("eval", odd),
        ("new", odd, odd), ("new", "environment", odd, "--into", str(folder)), ("env", "list", odd),
        (odd,), ("run", odd), ("run", file, odd.replace("=", "")),
    ))  # fmt: skip
    case.words = " ".join(repr(argument)[:60] for argument in arguments)
    before = Path.cwd()
    os.chdir(folder)
    try:
        command(case, *arguments)
    finally:
        os.chdir(before)
    return case


def data(chance: random.Random, ground: Ground, folder: Path) -> Case:
    """A data file with broken records or broken bytes: each record is kept, or counted and reported."""
    kind = chance.choice(list(DATA))
    case = Case("data")
    records: list[Any] = [json.loads(json.dumps(record)) for record in DATA[kind]]
    bad = 0
    if harmed := chance.random() < 0.7:
        for at in chance.sample(range(len(records)), chance.randint(1, 3)):
            which = chance.randrange(len(BAD_RECORDS))
            records[at], bad = BAD_RECORDS[which](records[at]), bad + 1
            case.words += f"record {at} is {str(records[at])[:60]!r}; "
    name = chance.choices(("it.jsonl", "it.json", "it.jsonl.gz", "it.parquet"), (60, 18, 18, 4))[0]
    whole = name != "it.jsonl"
    file = folder / name
    content = json.dumps(records) if name == "it.json" else "".join(json.dumps(record) + "\n" for record in records)
    packed = gzip.compress(content.encode(), mtime=0) if name.endswith("gz") else content.encode()
    if name == "it.parquet":
        harmed = False
    if not harmed:
        packed, case.words = change_text(chance, packed)
    file.write_bytes(packed)
    case.words = f"{name}: {case.words}"
    section = DataSection([DataFile(str(file))], max_bad_records=1.0, max_too_long=1.0)
    with case.judged():
        report = (
            OfflineData(section, ChatTokenizer(ground.model), 0, 200)
            .prepare(
                lambda record, chat: (
                    encode(record, chat, {}) if kind == "demonstrations" else encode_pair(record, chat, {})
                )
            )
            .report
        )
        per_unit = 1 if kind == "demonstrations" else 2
        if report.sequences / per_unit + report.too_long + report.malformed != report.records:
            case.faults.append(f"records are lost: {report}")
        if report.malformed and not report.examples:
            case.faults.append("malformed records are not shown")
        if harmed and report.records != len(records):
            case.faults.append(f"{report.records} records were read of {len(records)}")
        if harmed and report.malformed != bad:
            case.faults.append(f"{report.malformed} records were found malformed, {bad} are: {report.examples}")
        if not whole and not harmed:
            lines = sum(bool(line.strip(b"\n\r\t \x0b\x0c")) for line in file.read_bytes().split(b"\n"))
            if report.records != lines:
                case.faults.append(f"{report.records} records were read of {lines} lines")
    return case


READ = ("*.jsonl", "*.json", "*.yaml", "rollouts/*", "evaluations/*", "evaluations/tasks/*", "rollouts", "evaluations",
        "logs/*", "logs")  # fmt: skip
STRANGE = (
    "evaluations/tasks/step-x.jsonl", "rollouts/step-.jsonl", "rollouts/step-00000x.jsonl",
    "rollouts/step-²²²²²².jsonl",
    "evaluations/step-000001", "evaluations/step-.json", "rollouts/step-99999999999999999999.jsonl", "logs/x.log",
    "checkpoints/step-x", "checkpoints/step-²²²²²²", "checkpoints/x", "journal.jsonl.partial",
    "rollouts/step-000009.jsonl",
)  # fmt: skip
"""Files that no run writes."""


def evaluation(chance: random.Random, ground: Ground, folder: Path) -> Case:
    """A written evaluation with broken files, that another is compared with."""
    from whet.evaluation.estimators import estimate
    from whet_jobs.comparison import read_written

    case = Case("evaluation")
    (folder / "tasks").mkdir()
    figures = {"reward": {"value": 0.5}}
    summary = {"format": 1, "model": "m", "environments": {
        "sums": {"split": "test", "samples": 1, "passing": {"reward": "", "at_least": 1.0}, "tasks": 3,
                 "figures": figures, "task_rows": "tasks/sums.jsonl", "episode_rows": "sums.jsonl"}}}  # fmt: skip
    (folder / "evaluation.json").write_text(json.dumps(summary))
    rows = [{"task": task, "asked": f"a{task}", "values": {"reward": float(task % 2)}} for task in range(3)]
    (folder / "tasks" / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if chance.random() < 0.5:
        case.words = change_folder(chance, folder, ("*.json", "tasks/*"))
    else:
        file = folder / chance.choice(("evaluation.json", "tasks/sums.jsonl"))
        document = json.loads(file.read_text().splitlines()[0])
        at, before = chance.choice(list(leaves(document)))
        put(document, at, wrong_for(chance, at, before)[0])
        file.write_text(json.dumps(document) + "\n")
        case.words = f"{file.name} {dotted(at)} = {str(found(document, at))!r:.60}"
    with case.judged():
        written = read_written(folder)
        for tasks in written.rows.values():
            values = [value for row in tasks.values() for value in (row.get("values") or {}).values()]
            if values and not math.isfinite(estimate(values).value):
                case.faults.append("a figure that is not finite")
    return case


def reading(chance: random.Random, ground: Ground, folder: Path) -> Case:
    """A run folder with broken or strange files, of which a report is written."""
    case = Case("run folder")
    run = copy_of_run(ground, folder)
    case.words = _spoilt(chance, run)
    command(case, "report", str(run))
    if case.outcome == "accepted" and "step-000001" in (page := (run / "report.html").read_text(encoding="utf-8")):
        data = page.partition('type="application/json">')[2].partition("</script>")[0]
        with case.judged():
            json.loads(data, parse_constant=lambda word: case.faults.append(f"{word} on the page"))
    return case


def _spoilt(chance: random.Random, run: Path) -> str:
    """Change up to three things in a run folder."""
    done = []
    for _ in range(chance.randint(1, 3)):
        if chance.random() < 0.3:
            path = run / chance.choice(STRANGE)
            if path.parent.is_file():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.mkdir() if chance.random() < 0.3 else path.write_text(chance.choice(("", "x", '{"step": 1}\n')))
            done.append(f"{path.relative_to(run)} is there")
        else:
            try:
                done.append(change_folder(chance, run, READ))
            except NotADirectoryError:
                continue
    return "; ".join(done)


def resuming(chance: random.Random, ground: Ground, folder: Path) -> Case:
    """A run folder with broken or strange files, in which the run goes on for a step."""
    from whet.run.compose import run as run_config_file

    case = Case("resume")
    run = copy_of_run(ground, folder)
    case.words = _spoilt(chance, run)
    config = run_config(ground.folder, run, ground.model)
    config["run"]["steps"] = STEPS + 1
    file = folder / "run.yaml"
    file.write_text(json.dumps(config))
    with case.judged():
        outcome = run_config_file(file)
        if not outcome.finished or outcome.steps != STEPS + 1:
            case.faults.append(f"it ended after {outcome.steps} steps")
        steps = [json.loads(line).get("step") for line in (run / "metrics.jsonl").read_text().splitlines()]
        if steps[-1:] != [STEPS + 1] or len(steps) != len(set(steps)):
            case.faults.append(f"metrics.jsonl has the steps {steps}")
    return case


def checkpoint(chance: random.Random, ground: Ground, folder: Path) -> Case:
    """The newest checkpoint damaged: exporting and resuming refuse it, and no older one takes its place."""
    from whet.run import checkpoint as checkpoints
    from whet.run.run_folder import RunFolder
    from whet_jobs.jobs import exported

    case = Case("checkpoint")
    run = copy_of_run(ground, folder)
    newest, older = (run / "checkpoints" / f"step-{step:06d}" for step in (STEPS, STEPS - 1))
    must = True
    how = chance.choices(("file", "removed", "swapped", "older in its place", "harmless"), (70, 6, 8, 8, 8))[0]
    case.words = how
    if how == "file":
        before = _contents(newest)
        case.words = change_folder(chance, newest, ("*", "backend/*"))
        must = _contents(newest) != before
    elif how == "removed":
        shutil.rmtree(newest)
    elif how == "swapped":
        newest.rename(run / "x")
        older.rename(newest)
        (run / "x").rename(older)
    elif how == "older in its place":
        shutil.rmtree(newest)
        shutil.copytree(older, newest)
    else:
        must = False
        (run / "checkpoints" / "step-000009.partial").mkdir()
        (newest / "note.txt").write_text("mine")
    with case.judged(must):
        taken = exported(RunFolder(run), None)
        if taken.step != STEPS:
            case.faults.append(f"step {taken.step} would be exported")
    if how != "removed":  # whoever removes a checkpoint resumes from the one before it, as the error says
        with case.judged(must):
            checkpoints.latest(RunFolder(run))
    if how in ("file", "removed", "harmless"):
        asked = Case(case.kind)
        with asked.judged():
            if exported(RunFolder(run), STEPS - 1).step != STEPS - 1:
                case.faults.append("another step was exported than was asked for")
        if asked.outcome == "refused":
            case.faults += ["an older checkpoint cannot be exported by its step", *asked.faults]
    return case


def _contents(folder: Path) -> Mapping[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def state(chance: random.Random, ground: Ground, folder: Path) -> Case:
    """The state of a checkpoint changed and its manifest made to match: what is wrong in it is refused all the same."""
    from whet.run.checkpoint import MANIFEST, _checksum
    from whet.run.compose import run as run_config_file

    case = Case("state")
    run = copy_of_run(ground, folder)
    newest = run / "checkpoints" / f"step-{STEPS:06d}"
    must, case.words = _poisoned(chance, newest)
    listed = json.loads((newest / MANIFEST).read_text())
    listed["files"] = {
        str(path.relative_to(newest)): [path.stat().st_size, _checksum(path)]
        for path in newest.rglob("*") if path.is_file() and path.name != MANIFEST
    }  # fmt: skip
    (newest / MANIFEST).write_text(json.dumps(listed))
    config = run_config(ground.folder, run, ground.model)
    config["run"]["steps"] = STEPS + 1
    (folder / "run.yaml").write_text(json.dumps(config))
    with case.judged(must):
        run_config_file(folder / "run.yaml")
    return case


def _poisoned(chance: random.Random, newest: Path) -> tuple[bool, str]:
    """Change numbers of a checkpoint; return whether it must be refused, and what was changed."""
    import torch
    from safetensors.torch import load_file, save_file

    how = chance.choice(("tensor", "tensor", "index", "state"))
    if how == "tensor":
        file = chance.choice(sorted((newest / "backend").glob("*.safetensors")))
        tensors = load_file(file)
        name = chance.choice(sorted(name for name in tensors if not name.startswith("buffers/")))
        value = chance.choice((math.nan, math.inf, -math.inf))
        with torch.no_grad():
            tensors[name].view(-1)[chance.randrange(tensors[name].numel())] = value
        save_file(tensors, file)
        return True, f"{name} has {value}"
    file = newest / ("backend/backend.json" if how == "index" else "state.json")
    document = json.loads(file.read_text())
    at, before = chance.choice([(at, one) for at, one in leaves(document) if how == "index" or at[0] != "identity"])
    value = chance.choice((*NEVER[:2], None, -1, [], {}, "x", 1e300, 10**30))
    holder = document
    for key in at[:-1]:
        holder = holder[key]
    holder[at[-1]] = value
    file.write_text(json.dumps(document))
    return value != before and how == "index", f"{file.name} {dotted(at)} = {value!r}"


Kind = Callable[[random.Random, Ground, Path], Case]
KINDS: Mapping[Kind, int] = {
    recipe: 45, text: 8, override: 14, words: 4, data: 14,
    reading: 6, evaluation: 2, checkpoint: 6, resuming: 1, state: 1,
}  # fmt: skip
"""Kinds of cases, and how often each comes."""


def play(seed: int, number: int, ground: Ground, folder: Path) -> Case:
    """Play a case, which seed and number decide alone."""
    chance = random.Random(f"{seed} {number}")
    kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        return kind(chance, ground, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


__all__ = ["INFINITE", "KINDS", "Case", "play"]
