"""A plugin of one file with a part of each kind that an algorithm is put together from, as people write them."""

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from whet import hookimpl
from whet.component import Component, LossFacts
from whet.data.metrics import mean
from whet.interfaces.loss import LossResult


@frozen
class Plain:
    """Nothing to set."""


class OwnPg:
    """The mean of -advantage * logprob over tokens."""

    columns: tuple[str, ...] = ("advantages",)
    outputs: tuple[str, ...] = ("logprobs",)
    weights: Mapping[str, float] = {"policy": 1.0}

    def __init__(self, config: Plain) -> None:
        self.config = config

    def counts(self, batch: Any) -> Mapping[str, Any]:
        """Count tokens."""
        return {"policy": batch["loss_mask"].sum()}

    def live(self, batch: Any) -> Any:
        """All sequences are live."""
        return batch["lengths"] > 0

    def __call__(self, outputs: Mapping[str, Any], batch: Any) -> LossResult:
        """Sum."""
        from whet_ops.reductions import of_tokens

        tokens = -of_tokens(batch, "advantages") * outputs["logprobs"]
        return LossResult({"policy": tokens[batch["loss_mask"]].sum()}, {})


class OwnValue:
    """The mean absolute error of a critic over tokens."""

    columns: tuple[str, ...] = ("returns",)
    outputs: tuple[str, ...] = ("values",)
    weights: Mapping[str, float] = {"error": 1.0}

    def __init__(self, config: Plain) -> None:
        self.config = config

    def counts(self, batch: Any) -> Mapping[str, Any]:
        """Count tokens."""
        return {"error": batch["loss_mask"].sum()}

    def live(self, batch: Any) -> Any:
        """All sequences are live."""
        return batch["lengths"] > 0

    def __call__(self, outputs: Mapping[str, Any], batch: Any) -> LossResult:
        """Sum."""
        mask = batch["loss_mask"]
        total = (outputs["values"] - batch["returns"]).abs()[mask].sum()
        return LossResult({"error": total}, {"own_error": mean(total.detach(), mask.sum())})


class OwnAdvantages:
    """Rewards as they are."""

    def __init__(self, config: Plain) -> None:
        self.config = config

    def __call__(self, batch: Any) -> Any:
        """Return the advantage of each sequence [B]."""
        return batch["reward"]


class OwnFilter:
    """Keeps groups that have a reward at all."""

    def __init__(self, config: Plain) -> None:
        self.config = config

    def __call__(self, group: Any) -> bool:
        """Return whether to keep a group."""
        return all(episode.rewards for episode in group.episodes)


def of_policy(config: Plain, model: Any) -> LossFacts:
    """Return what the loss of the policy reads."""
    read = frozenset({"advantages"})
    return LossFacts(outputs_needed=frozenset({"logprobs"}), columns_read=read, token_advantages=True)


def of_critic(config: Plain, model: Any) -> LossFacts:
    """Return what the loss of the critic reads."""
    return LossFacts(role="critic", outputs_needed=frozenset({"values"}), columns_read=frozenset({"returns"}))


@hookimpl
def whet_losses() -> list[Component]:
    """Offer both."""
    return [
        Component("own-pg", Plain, f"{__name__}:OwnPg", f"{__name__}:of_policy"),
        Component("own-value", Plain, f"{__name__}:OwnValue", f"{__name__}:of_critic"),
    ]


@hookimpl
def whet_advantages() -> list[Component]:
    """Offer rewards as advantages."""
    return [Component("own-advantages", Plain, f"{__name__}:OwnAdvantages")]


@hookimpl
def whet_filters() -> list[Component]:
    """Offer a filter."""
    return [Component("own-filter", Plain, f"{__name__}:OwnFilter")]
