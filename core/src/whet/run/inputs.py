"""The inputs of a run: tokenizer, data files and environments. The driver prepares them while workers start."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from whet.component import EnvironmentFacts, resolve
from whet.config.build import named_errors
from whet.data.records import Sampling
from whet.errors import ConfigError, PluginError, WhetError
from whet.interfaces.environment import check_weights
from whet.plan.compatibility import DEFAULT_SPLIT
from whet.plan.evaluation import scoring
from whet.plan.prepare import Prepared, encode_of, field_names
from whet.plugins.endpoints import InstalledEndpoints
from whet.plugins.features import APART, chats, reader
from whet.rollout.routing import Route
from whet.rollout.scoring import Passing, Scoring

if TYPE_CHECKING:
    from pathlib import Path

    from whet.config.sections import DeadlinesSection, EnvironmentSection, SamplingSection
    from whet.data.spans import Spans
    from whet.evaluation.result import EvaluationResult
    from whet.interfaces.chat import Tokenizer
    from whet.interfaces.data import OfflineData
    from whet.interfaces.environment import Responder, Scorer
    from whet.rollout.event_loop import EpisodeLoop
    from whet.run.run_folder import RunFolder


@frozen(eq=False)
class Inputs:
    """The tokenizer, data files and environments of a run."""

    chat: "Tokenizer"
    """The tokenizer of the policy, with its chat template."""
    data: "OfflineData | None"
    """The data files, which are read while models start, or when they are first needed; None: there are none."""
    training: Sequence[Route]
    """The environments of training."""
    evaluation: Sequence[Route]
    """The environments of `evaluation`."""


def read_inputs(
    prepared: Prepared, folder: "RunFolder", roles: Mapping[str, Any], spans: "Spans", status: Callable[[str], None],
    closers: list[Callable[[], None]], *, training: bool = True, evaluation: bool = True,
) -> Inputs:  # fmt: skip
    """Open the inputs of a run: of training, of evaluation, or of both.

    `roles` will hold the further models that environments ask, when these have been started.
    """
    config, facts, began = prepared.config, prepared.roles.of(EnvironmentFacts), folder.began()

    def chat_of(role: str) -> "Tokenizer":
        section = (config.roles[role].model if role in config.roles else None) or config.model
        folder, arguments = prepared.models.get(role, prepared.model).path, section.template
        chat: Any = chats().ChatTokenizer(folder, section.chat_template, began, arguments)
        if config.environments or config.evaluation.environments:
            _ = chat.template  # raises now: without a template, every episode would fail
        found: Tokenizer = chat
        return found

    @cache  # one for all environments: its thread alone asks the role
    def role_for(name: str) -> "Scorer | Responder":
        from whet.rollout.responder import RoleResponder
        from whet.rollout.scorer import RoleScorer

        longest = prepared.models.get(name, prepared.model).max_positions
        handle, chat = partial(roles.__getitem__, name), cache(partial(chat_of, name))
        if prepared.roles[name].generates:
            return RoleResponder(handle, chat, config.rollout.max_tokens, longest, name)
        made = RoleScorer(handle, chat, longest, name)
        closers.append(made.close)
        return made

    def routes(path: str, entries: "Sequence[EnvironmentSection]") -> Iterator[Route]:
        for i, entry in enumerate(entries):
            needs = facts[f"{path}.{i}"].roles
            asked = [{name: role_for(name) for name in needs}] if needs else []
            split, logs = entry.split or DEFAULT_SPLIT[path], folder.logs / f"{path}.{i}"
            route = build_route(entry, split, *asked, deadlines=config.cluster.deadlines, logs=logs)
            closers.append(route.close)
            yield route

    chat, data = chat_of("backend"), None
    if config.data is not None and training:
        data = reader().open(
            config.data, chat, config.run.seed, config.data.max_length or prepared.model.max_positions, status,
            timed=partial(spans.phase, "data", "tokenise"), names=field_names(config.algorithm),
            encode=encode_of(config.algorithm, prepared.roles.algorithm, prepared.model), epochs=config.run.epochs,
        )  # fmt: skip
    passing, warned = config.evaluation.passing, set[str]()
    criterion = Scoring(passing=Passing(passing.reward, passing.at_least))
    here = routes("environments", config.environments if training else ())
    there = routes("evaluation.environments", config.evaluation.environments if evaluation else ())
    return Inputs(
        chat, data,
        [evolve(route, scoring=criterion, warned=warned) for route in here],
        [evolve(r, scoring=scoring(config.evaluation, i, r.environment), warned=warned) for i, r in enumerate(there)],
    )  # fmt: skip


def build_route(
    entry: "EnvironmentSection", split: str, *roles: Any, deadlines: "DeadlinesSection | None" = None,
    logs: "Path | None" = None,
) -> Route:  # fmt: skip
    """Build an environment, with the scorers of the roles that it asks for. Errors name the environment.

    `logs`: folder for the logs of its processes, if it has any; None: a temporary folder.
    """
    name = entry.name or entry.component.name
    with named_errors(f"environment {name!r} cannot be built"):
        try:
            if entry.worker is not None:
                environment = APART.load()(entry, name, deadlines, *roles, logs=logs)
            else:
                environment = resolve(entry.component.component.target)(entry.component.config, *roles)
            if environment is None:
                raise PluginError(f"`{entry.component.component.target}` returned None; return the environment")
            _ = environment.close  # raises now where there is none
            usual = partial(_sampling, entry.sampling)
            route = Route(name, environment, split, entry.weights, entry.group_size, usual, entry.samples, entry.limit)
            try:
                check_weights(environment.reward_weights)
                route.tasks()
            except BaseException:
                route.close()
                raise
        except WhetError as error:
            raise ConfigError(f"environment {name!r}, split {split!r}: {error}") from error
    return route


def make_evaluator(
    prepared: Prepared, routes: "Sequence[Route]", generator: Any, chat: "Tokenizer",
    status: Callable[[str], None], endpoints: InstalledEndpoints, loop: "EpisodeLoop | None" = None,
) -> "Callable[[], EvaluationResult]":  # fmt: skip
    """Return a function that plays all tasks of these environments, always the same ones, and returns the result."""
    from whet.evaluation.evaluate import evaluate

    section, rollout = prepared.config.evaluation, prepared.config.rollout
    sampling = Sampling(
        max_tokens=section.max_tokens or rollout.max_tokens, temperature=section.temperature, top_p=section.top_p,
        top_k=section.top_k, stop=tuple(rollout.stop),
    )  # fmt: skip
    return partial(
        evaluate, routes, generator, chat, sampling, prepared.config.run.seed, max_context=prepared.plan.max_context,
        retries=rollout.retries, infrastructure_retries=rollout.infrastructure_retries,
        deadline_seconds=prepared.config.cluster.deadlines.episode, status=status, loop=loop, endpoints=endpoints,
    )  # fmt: skip


def _sampling(own: "SamplingSection", usual: Sampling) -> Sampling:
    temperature = usual.temperature if own.temperature is None else own.temperature
    stop = (*usual.stop, *own.stop)
    return evolve(usual, max_tokens=own.max_tokens or usual.max_tokens, temperature=temperature, stop=stop)
