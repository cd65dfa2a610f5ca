"""Metrics that merge by their kind, in any grouping: over micro-batches, ranks and minibatches alike."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from attrs import frozen

MetricKind = Literal["mean", "sum", "max", "min"]


@frozen
class Metric:
    """A number with the rule by which it is merged. Inside a worker the numbers may be 0-d tensors."""

    kind: MetricKind
    value: Any
    """For a mean, the sum of the values; for other kinds the value itself."""
    count: Any = 1.0
    """For a mean, how many values were summed, or the sum of their weights."""

    def merge(self, other: "Metric") -> "Metric":
        """Return the combination of two metrics of one kind. Raises `ValueError` if the kinds differ."""
        if self.kind != other.kind:
            raise ValueError(f"cannot merge a metric of kind {self.kind} with one of kind {other.kind}")
        if self.kind == "mean":
            return Metric("mean", self.value + other.value, self.count + other.count)
        if self.kind == "sum":
            return Metric("sum", self.value + other.value)
        pick = max if self.kind == "max" else min
        return Metric(self.kind, pick(self.value, other.value))

    def number(self) -> float:
        """Return the plain number. The mean of nothing is 0."""
        if self.kind == "mean":
            return float(self.value) / float(self.count) if float(self.count) else 0.0
        return float(self.value)


Metrics = Mapping[str, Metric]


def mean(total: Any, count: Any = 1.0) -> Metric:
    """Return a mean, from the sum of the values and their count."""
    return Metric("mean", total, count)


def total(value: Any) -> Metric:
    """Return a metric that is the sum of all merged values."""
    return Metric("sum", value)


def largest(value: Any) -> Metric:
    """Return a metric that is the largest of all merged values."""
    return Metric("max", value)


def smallest(value: Any) -> Metric:
    """Return a metric that is the smallest of all merged values."""
    return Metric("min", value)


def merge(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Merge metrics by name, in the order given."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def plain(metrics: Metrics) -> dict[str, float]:
    """Return the plain numbers, sorted by name."""
    return {name: metrics[name].number() for name in sorted(metrics)}


def detached(metrics: Metrics) -> dict[str, Metric]:
    """Return the metrics with floats in place of tensors, as is needed before metrics leave a worker."""
    return {name: Metric(m.kind, float(m.value), float(m.count)) for name, m in metrics.items()}
