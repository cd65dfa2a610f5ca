"""What this plugin offers to whet."""

from collections.abc import Iterable

from whet import hookimpl
from whet.component import Component, Problem
from whet.config.sections import Config
from whet_fsdp2.config import Fsdp2Config


@hookimpl
def whet_backends() -> Iterable[Component]:
    """Offer the backend `fsdp2`."""
    return [
        Component(
            name="fsdp2",
            config=Fsdp2Config,
            target="whet_fsdp2.backend:Fsdp2Backend",
            facts="whet_fsdp2.config:facts",
        )
    ]


@hookimpl
def whet_check_config(config: Config) -> Iterable[Problem]:
    """Find numbers that cannot be meant."""
    backend = config.backend.config
    if not isinstance(backend, Fsdp2Config):
        return []
    schedule = backend.schedule
    rules = (
        (backend.optimizer.lr > 0, "optimizer.lr", f"is {backend.optimizer.lr}, wanted more than 0"),
        (all(0 <= b < 1 for b in backend.optimizer.betas), "optimizer.betas", "must lie between 0 and 1"),
        (backend.micro_batch_tokens > 0, "micro_batch_tokens", "must be at least 1"),
        (backend.logprob_chunk >= 0, "logprob_chunk", "must be at least 0"),
        ((backend.max_grad_norm or 0) >= 0, "max_grad_norm", "must not be negative"),
        (schedule.warmup_steps >= 0, "schedule.warmup_steps", "must be at least 0"),
        (0 <= schedule.min_ratio <= 1, "schedule.min_ratio", "must lie between 0 and 1"),
    )
    return [Problem(f"backend.{path}", message) for holds, path, message in rules if not holds]
