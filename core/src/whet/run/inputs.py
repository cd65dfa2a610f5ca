"""The inputs of a run: tokenizer, data files and environments. The driver prepares them while workers start."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from attrs import evolve

from whet.config.build import build_selection
from whet.errors import ConfigError, PluginError, WhetError, in_words
from whet.plan.evaluation import passes, scoring
from whet.plan.prepare import Prepared, encode_of, field_names
from whet.rollout.routing import Route

if TYPE_CHECKING:
    from whet.config.sections import EnvironmentSection
    from whet.data.chat import ChatTokenizer
    from whet.data.offline import OfflineData
    from whet.data.spans import Spans
    from whet.interfaces.backend import Backend
    from whet.rollout.scorer import Scorer

Scorers = Callable[[Sequence[str]], "dict[str, Scorer]"]
"""(names of further models) -> what an environment asks of each."""


def open_chat(prepared: Prepared, began: Any, role: str = "backend") -> "ChatTokenizer":
    """Return the tokenizer of a role's model, with its chat template. `began`: when the run began, for templates."""
    from whet.data.chat import ChatTokenizer

    config = prepared.config
    section = (config.roles[role].model if role in config.roles else None) or config.model
    model = prepared.models.get(role, prepared.model)
    chat = ChatTokenizer(model.path, section.chat_template, now=began)
    if config.environments or config.evaluation.environments:
        _ = chat.template  # one that is missing or cannot be read would fail every episode
    return chat


def open_data(
    prepared: Prepared, chat: "ChatTokenizer", spans: "Spans", status: Callable[[str], None]
) -> "OfflineData | None":
    """Return the data files of a run, which are read when they are first needed; None where there are none."""
    from whet.data.offline import OfflineData

    config = prepared.config
    if config.data is None:
        return None
    limit = config.data.max_length or prepared.model.max_positions
    return OfflineData(
        config.data, chat, config.run.seed, limit, status,
        timed=partial(spans.phase, "data", "tokenise"),
        encode=encode_of(config, prepared.facts["algorithm"], prepared.model), names=field_names(config),
        epochs=config.run.epochs,
    )  # fmt: skip


def training_routes(prepared: Prepared, scorers: Scorers, closers: list[Callable[[], None]]) -> list[Route]:
    """Build the environments of training."""
    scored = passes(prepared.config)
    routes = _routes(prepared, "environments", prepared.config.environments, "train", scorers, closers)
    return [evolve(route, scoring=scored) for route in routes]


def evaluation_routes(prepared: Prepared, scorers: Scorers, closers: list[Callable[[], None]]) -> list[Route]:
    """Build the environments of `evaluation`."""
    entries = prepared.config.evaluation.environments
    routes = _routes(prepared, "evaluation.environments", entries, "test", scorers, closers)
    return [evolve(r, scoring=scoring(prepared.config, i, r.environment)) for i, r in enumerate(routes)]


def make_scorers(
    prepared: Prepared, names: Sequence[str], roles: "Mapping[str, Backend]",
    chat: "Callable[[str], ChatTokenizer]", closers: list[Callable[[], None]],
) -> "dict[str, Scorer]":  # fmt: skip
    """Return what an environment asks of further models, which are in `roles` when they have been started."""
    from whet.rollout.scorer import RoleScorer

    made: dict[str, Scorer] = {}
    for name in names:
        longest = prepared.models.get(name, prepared.model).max_positions
        made[name] = scorer = RoleScorer(partial(roles.__getitem__, name), cache(partial(chat, name)), longest, name)
        closers.append(scorer.close)
    return made


def _routes(
    prepared: Prepared, path: str, entries: "Sequence[EnvironmentSection]", split: str, scorers: Scorers,
    closers: list[Callable[[], None]],
) -> list[Route]:  # fmt: skip
    """Build the environments of a section at this path into the config."""
    routes = []
    for i, entry in enumerate(entries):
        needs = prepared.facts[f"{path}.{i}"].roles
        route = build_route(entry, entry.split or split, *([scorers(list(needs))] if needs else []))
        closers.append(route.environment.close)
        routes.append(route)
    return routes


def build_route(entry: "EnvironmentSection", split: str, *roles: Any) -> Route:
    """Build an environment, with the scorers of the roles that it asks for where it does."""
    name = entry.name or entry.component.name
    with _environment_errors(name, split):
        environment = build_selection(entry.component, *roles)
        route = Route(name, environment, split, entry.weight, samples=entry.samples, limit=entry.limit)
        try:
            route.tasks()
        except BaseException:
            environment.close()
            raise
    return route


@contextmanager
def _environment_errors(name: str, split: str) -> Iterator[None]:
    """Raise errors that name the environment, whatever its own code raised."""
    try:
        yield
    except WhetError as error:
        raise ConfigError(f"environment {name!r}, split {split!r}: {error}") from error
    except Exception as error:  # an environment's own code
        raise PluginError(f"environment {name!r} cannot be built: {in_words(error)}") from error
