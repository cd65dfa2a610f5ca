"""`whet data look`: what a config's data becomes, token by token."""

import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from whet.cli.command import Command, config_arguments, warn_of_broken

if TYPE_CHECKING:
    from whet.component import AlgorithmFacts, EnvironmentFacts
    from whet.config.sections import Config
    from whet.data.messages import Conversation
    from whet.data.model_info import ModelInfo
    from whet.interfaces.chat import Tokenizer
    from whet_data.look import Counts, Piece, Shown

Split = Literal["train", "validation"]


@click.group()
def data() -> None:
    """Show the data of a config as it is trained on."""


@data.command(cls=Command)
@config_arguments
@click.option("--rows", default=3, show_default=True, type=click.IntRange(0), help="Records to show.")
@click.option("--split", type=click.Choice(["train", "validation"]), default="train", help="By default train.")
@click.option(
    "--records", "most", default=10_000, show_default=True, type=click.IntRange(0), help="Records to count; 0: all."
)
@click.option("--tokens", "by_token", is_flag=True, help="Print each token on a line of its own, with its number.")
@click.option("--plain", is_flag=True, help="Print without colours, as if the output were no terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def look(
    config: str, overrides: tuple[str, ...], rows: int, split: Split, most: int, by_token: bool, plain: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Show what the data of CONFIG becomes: a few records as tokens, and which tokens are trained on.

    Then print counts: records that are left out and why, and how long the sequences are. For a config that trains on
    rollouts, show the prompts of its environments. Needs the tokenizer of the model, but no weights and no torch.
    """
    seen = _seen(config, overrides, rows, split, most, quiet=as_json)
    if as_json:
        click.echo(json.dumps(_as_json(seen), indent=2))
        return
    coloured = not plain and sys.stdout.isatty()
    click.echo("\n".join(_lines(seen, "tokens" if by_token else "coloured" if coloured else "plain")))


class Seen(NamedTuple):
    """What is shown."""

    title: str
    files: tuple[str, ...]
    """The recognised format of each file, one line per file."""
    shown: "list[Shown]"
    counts: "Counts"
    chat: "Tokenizer"
    limit: int
    limit_words: str
    what: str
    """The word for a record: `record` or `prompt`."""
    length: str = ""
    """The relation of the run's steps and epochs, as text."""
    allowed: float = 1.0
    """Share of the records that may be malformed."""
    allowed_too_long: float = 1.0
    """Share of the records that may be too long."""


def _seen(config: str, overrides: tuple[str, ...], rows: int, split: Split, most: int, quiet: bool) -> Seen:
    from whet.cli.progress import Progress
    from whet.component import EnvironmentFacts
    from whet.plan.load import load_config
    from whet.plan.plan import gather_facts
    from whet.plan.prepare import find_models
    from whet.plan.roles import make_roles
    from whet.plugins.features import chats

    loaded = load_config(config, overrides)
    warn_of_broken(loaded.registry)
    model, models = find_models(loaded.config.model, loaded.config.roles)
    roles = make_roles(loaded.config, gather_facts(loaded.config, model, models))
    section = loaded.config.model
    chat = chats().ChatTokenizer(model.path, section.chat_template, arguments=section.template)
    if "rollouts" in roles.algorithm.inputs:
        return _prompts(loaded.config, model, roles.of(EnvironmentFacts), chat, rows, split, most)
    with closing(_Status(None if quiet else Progress())) as status:
        return _records(loaded.config, model, roles.algorithm, chat, rows, split, most, status)


class _Status:
    """Shows the progress of reading, if there is a display."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress

    def __call__(self, text: str) -> None:
        if self._progress is not None:
            self._progress.status(text)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close(failed=False)


def _records(
    config: "Config", model: "ModelInfo", facts: "AlgorithmFacts", chat: "Tokenizer", rows: int, split: Split,
    most: int, status: _Status,
) -> Seen:  # fmt: skip
    from whet.errors import ConfigError
    from whet.plan.prepare import encode_of, field_names, look_at_data
    from whet_data.look import look_at_records

    files = getattr(config.data, split) if config.data else []
    if config.data is None or not files:
        raise ConfigError(f"data.{split}: there is no file to look at")
    names = field_names(config.algorithm)
    problems, recognised = look_at_data(config.data, facts.record_fields, names)
    if problems := [problem for problem in problems if problem.path.startswith(f"data.{split}.")]:
        raise ConfigError([str(problem) for problem in problems])
    encode = encode_of(config.algorithm, facts, model)
    if encode is None:
        raise ConfigError(f"algorithm: {config.algorithm.name} states no `encode` in its facts: how it reads records")
    limit = config.data.max_length or model.max_positions
    shown, counts = look_at_records(files, encode, names, chat, limit=limit, rows=rows, most=most, status=status)
    return Seen(
        f"data.{split} of {config.algorithm.name}",
        tuple(line for line in recognised if line.startswith(f"data.{split}.")),
        shown,
        counts,
        chat,
        limit,
        "data.max_length" if config.data.max_length else "the model's positions",
        "record",
        _length(config, facts, counts) if split == "train" else "",
        config.data.max_bad_records,
        config.data.max_too_long,
    )


def _length(config: "Config", facts: "AlgorithmFacts", counts: "Counts") -> str:
    """Return how many steps the run's epochs are, or the reverse, as text. Empty unless all records were counted."""
    from whet_data.offline import steps_of

    size, run = facts.records_per_step, config.run
    if not size or not counts.kept or not counts.complete:
        return ""
    if run.epochs is not None:
        return f"{run.epochs:g} epochs are {steps_of(run.epochs, counts.kept, size):,} steps of {size} records"
    return f"{run.steps:,} steps of {size} records are {(run.steps or 0) * size / counts.kept:.2f} epochs"


def _prompts(
    config: "Config", model: "ModelInfo", facts: "dict[str, EnvironmentFacts]", chat: "Tokenizer", rows: int,
    split: Split, most: int,
) -> Seen:  # fmt: skip
    from whet.errors import ConfigError
    from whet.run.inputs import build_route
    from whet_data.look import look_at_prompts

    where = "environments" if split == "train" else "evaluation.environments"
    entries = config.environments if split == "train" else config.evaluation.environments
    if not entries:
        raise ConfigError(f"{where}: there is none to look at")
    limit = config.rollout.max_context or model.max_positions
    longest = config.rollout.max_tokens
    if limit and longest >= limit:
        raise ConfigError(f"rollout.max_tokens: is {longest}, which leaves no room for a prompt in {limit} tokens")
    room = max(0, limit - longest)
    titles, shown, counts = list[str](), list[Any](), None
    for i, entry in enumerate(entries):
        needs = facts[f"{where}.{i}"].roles
        default = "train" if split == "train" else "test"
        route = build_route(entry, entry.split or default, *([dict(needs)] * bool(needs)))
        with closing(route.environment):
            tasks = route.tasks()
            titles.append(f"{where}.{i}: {route.name}, split {route.split!r}, {len(tasks):,} tasks")
            found, counted = look_at_prompts(_walk(route.name, tasks), chat, limit=room, rows=rows, most=most)
        shown += found
        counts = counted if counts is None else _added(counts, counted)
    assert counts is not None  # there is an environment
    words = f"what rollout.max_tokens: {config.rollout.max_tokens} leaves of {limit}"
    return Seen(f"{where} of {config.algorithm.name}", tuple(titles), shown, counts, chat, room, words, "prompt")


def _walk(name: str, tasks: Any) -> "Iterator[tuple[str, Conversation]]":
    for i in itertools.count():
        if i >= len(tasks):
            return
        yield f"{name}[{i}]", tasks[i].prompt


def _added(one: "Counts", other: "Counts") -> "Counts":
    one.records += other.records
    one.too_long += other.too_long
    one.lengths += other.lengths
    one.complete = one.complete and other.complete
    return one


def _lines(seen: Seen, style: str) -> Iterator[str]:
    from whet_data.layouts import escaped
    from whet_data.look import pieces, whole_characters

    yield seen.title
    yield from (f"  {escaped(line)}" for line in seen.files)
    for record in seen.shown:
        for one in record.sequences:
            trained = f", {int(one.trained.sum()):,} trained" if seen.what == "record" else ""
            head = f"{record.where}{f' {one.name}' if one.name else ''}"
            yield ""
            yield f"{click.style(escaped(head), bold=True)}  {len(one.tokens):,} tokens{trained}"
            found = list(pieces(one, seen.chat))
            yield from _STYLES[style](found if style == "tokens" else whole_characters(found, seen.chat))
    yield ""
    yield from _summary(seen)
    if seen.shown and seen.what == "record":
        yield _MARKS[style]


def _spans(found: "list[Piece]") -> Iterator[str]:
    """Yield each run of trained, or untrained, tokens on a line of its own."""
    for trained, run in itertools.groupby(found, lambda piece: piece.trained):
        yield f"  {'+' if trained else '-'} {''.join(piece.text for piece in run)}"


def _coloured(found: "list[Piece]") -> Iterator[str]:
    """Yield the text with trained tokens in colour and special tokens bold. A line break is shown and made."""
    text = "".join(
        click.style(piece.text, fg="green" if piece.trained else None, bold=piece.special, dim=not piece.trained)
        + ("\n    " if piece.text.endswith("\\n") else "")
        for piece in found
    )
    yield f"    {text.rstrip()}"


def _by_token(found: "list[Piece]") -> Iterator[str]:
    for i, piece in enumerate(found):
        yield f"  {i:5} {piece.token:7}  {'+' if piece.trained else '-'}{'*' if piece.special else ' '} {piece.text}"


_STYLES = {"plain": _spans, "coloured": _coloured, "tokens": _by_token}
_MARKS = {
    "plain": "marks: + trained, - not trained",
    "coloured": "marks: coloured tokens are trained, bold ones special",
    "tokens": "marks: + trained, - not trained, * special",
}


def _summary(seen: Seen) -> Iterator[str]:
    from whet_data.layouts import escaped

    counts, spread = seen.counts, seen.counts.spread()
    read = f"{counts.records:,} {seen.what}s{'' if counts.complete else ' (the first; --records 0 reads all)'}"
    yield f"{read}: {counts.kept:,} kept, {counts.too_long:,} too long, {counts.malformed:,} malformed"
    if counts.too_long:
        yield f"  too long: over {seen.limit:,} tokens ({seen.limit_words}); left out whole, no {seen.what} is cut"
    yield from (f"  malformed: {escaped(example)}" for example in counts.examples)
    refused = "  a run refuses this data: "
    if counts.malformed > seen.allowed * counts.records:
        share = f"{counts.malformed / counts.records:.1%} of the records are malformed"
        yield f"{refused}{share}, and data.max_bad_records allows {seen.allowed:.1%}"
    elif counts.too_long > seen.allowed_too_long * counts.records:
        share = f"{counts.too_long / counts.records:.1%} of the records are too long"
        yield f"{refused}{share}, and data.max_too_long allows {seen.allowed_too_long:.0%}"
    elif not counts.kept and seen.what == "record":
        yield f"{refused}no record is left"
    if counts.untrained:
        yield f"  {counts.untrained:,} of those kept have no trained token"
    if spread:
        total = sum(counts.lengths)
        share = f", {counts.trained:,} of them trained ({counts.trained / total:.1%})" if seen.what == "record" else ""
        yield f"tokens: {total:,}{share}"
        yield "tokens of a sequence: " + ", ".join(f"{name} {value:,.0f}" for name, value in spread.items())
    if seen.length:
        yield seen.length


def _as_json(seen: Seen) -> dict[str, Any]:
    import attrs

    from whet_data.look import pieces

    counts = seen.counts
    return {
        "title": seen.title, "files": list(seen.files), "limit": seen.limit,
        "rows": [
            {
                "where": record.where,
                "sequences": [
                    {"name": one.name, "tokens": [attrs.asdict(piece) for piece in pieces(one, seen.chat)]}
                    for one in record.sequences
                ],
            }
            for record in seen.shown
        ],
        "counts": {
            "records": counts.records, "kept": counts.kept, "too_long": counts.too_long, "malformed": counts.malformed,
            "untrained": counts.untrained, "examples": counts.examples, "tokens": sum(counts.lengths),
            "trained": counts.trained, "complete": counts.complete, "lengths": counts.spread(),
        },
    }  # fmt: skip
