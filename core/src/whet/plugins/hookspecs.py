"""The hooks of whet. This page is the plugin documentation: implement any of these in `hooks.py`.

A plugin's distribution names its hook module in the entry-point group `whet`:

    [project.entry-points.whet]
    my-plugin = "my_plugin.hooks"

and marks the functions there with `@whet.hookimpl`. Hooks run on the driver only. They see configs, plain numbers and
core records, never a tensor.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from whet.component import Component, Problem
    from whet.config.sections import Config
    from whet.interfaces.algorithm import Algorithm, Parts
    from whet.interfaces.workers import WorkerGroup

hookspec = pluggy.HookspecMarker("whet")


@hookspec
def whet_backends() -> "Iterable[Component]":  # type: ignore[empty-body]
    """Offer training backends. A backend holds the model and takes optimizer steps."""


@hookspec
def whet_generators() -> "Iterable[Component]":  # type: ignore[empty-body]
    """Offer generators. A generator gets tokens and returns tokens and logprobs."""


@hookspec
def whet_losses() -> "Iterable[Component]":  # type: ignore[empty-body]
    """Offer losses. A loss is a pure function of model outputs and a batch."""


@hookspec
def whet_environments() -> "Iterable[Component]":  # type: ignore[empty-body]
    """Offer environments. An environment has tasks, and plays episodes that end in named rewards."""


@hookspec
def whet_loggers() -> "Iterable[Component]":  # type: ignore[empty-body]
    """Offer loggers. A logger gets plain numbers after each step."""


@hookspec
def whet_algorithms() -> "Iterable[Component]":  # type: ignore[empty-body]
    """Offer algorithms. An algorithm is the loop of a run."""


@hookspec
def whet_advantages() -> "Iterable[Component]":  # type: ignore[empty-body]
    """Offer advantage estimators. An estimator is a pure function of rewards and groups."""


@hookspec
def whet_filters() -> "Iterable[Component]":  # type: ignore[empty-body]
    """Offer filters. A filter keeps or drops a group of episodes inside the rollout stream."""


@hookspec
def whet_hooks() -> "Iterable[Component]":  # type: ignore[empty-body]
    """Offer hooks with settings: objects, built as `target(config, run)` with a `RunInfo`, whose methods are hooks."""


@hookspec
def whet_sandboxes() -> "Iterable[Component]":  # type: ignore[empty-body]
    """Offer sandboxes. A sandbox is a place where programs run that a model wrote."""


@hookspec
def whet_rewards() -> "Iterable[Component]":  # type: ignore[empty-body]
    """Offer rewards. A reward is a function of a finished response, for environments that take a list of them."""


@hookspec(firstresult=True)
def whet_worker_group(role: str, group: "WorkerGroup") -> "WorkerGroup":  # type: ignore[empty-body]
    """Return what starts the workers of a role. Core's own implementation returns `group`; every other one wraps it.

    :param role: e.g. `backend`. :param group: starts the workers as the plan has it.
    """


@hookspec
def whet_endpoints() -> "Iterable[str]":  # type: ignore[empty-body]
    """Offer endpoints: OpenAI-compatible addresses of the model, for one episode or for a whole run.

    Each item is a `package.module:Class` that obeys `whet.interfaces.endpoint.Endpoints`; it is imported when the first
    endpoint is opened, and called with the section `endpoint` of the config.
    """


@hookspec
def whet_check_config(config: "Config") -> "Iterable[Problem]":  # type: ignore[empty-body]
    """Return problems that only the plugin can find, before any resource is claimed.

    :param config: the whole structured config.
    """


@hookspec(firstresult=True)
def whet_run(algorithm: "Algorithm[Any]", parts: "Parts") -> object:
    """Run the algorithm. Core's own implementation calls `algorithm.run(parts)`; every other one is a wrapper of it.

    :param algorithm: the built algorithm. :param parts: the parts of the run, which the algorithm uses.
    """


@hookspec
def whet_step_finished(step: int, metrics: Mapping[str, float]) -> None:
    """Receive the numbers of a finished step, on the driver.

    :param step: number of the step, counted from 1. :param metrics: every metric of the step as a plain number.
    """
