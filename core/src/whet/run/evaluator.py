"""The function that evaluates: for a run, and for a job that only evaluates."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from whet.data.records import Sampling
from whet.plan.prepare import Prepared
from whet.plugins.endpoints import InstalledEndpoints

if TYPE_CHECKING:
    from whet.evaluation.result import EvaluationResult
    from whet.interfaces.chat import Tokenizer
    from whet.rollout.event_loop import EpisodeLoop
    from whet.rollout.routing import Route


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
