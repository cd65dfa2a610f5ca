"""Metrics that merge by their kind, in any grouping: over micro-batches, ranks and minibatches alike."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from attrs import frozen


@frozen
class Metric:
    """A number with the rule by which it is merged. Inside a worker the numbers may be 0-d tensors."""

    kind: Literal["mean", "sum", "max", "min", "histogram"]
    value: Any
    """For a mean, the sum of the values; for a histogram, the number of values from each edge up [K]; for other kinds
    the value itself."""
    count: Any = 1.0
    """For a mean or a histogram, how many values there were, or the sum of their weights."""
    edges: tuple[float, ...] | None = None
    """The fixed grid of a histogram, ascending. Histograms on one grid merge by addition, which is exact."""

    def merge(self, other: "Metric") -> "Metric":
        """Return the combination of two metrics of one kind. Raises `ValueError` if the kinds differ."""
        if self.kind != other.kind:
            raise ValueError(f"cannot merge a metric of kind {self.kind} with one of kind {other.kind}")
        if self.edges != other.edges:
            raise ValueError("cannot merge histograms on different grids")
        if self.kind in ("mean", "histogram"):
            return Metric(self.kind, self.value + other.value, self.count + other.count, self.edges)
        if self.kind == "sum":
            return Metric("sum", self.value + other.value)
        pick = max if self.kind == "max" else min  # which keeps a NaN only where it is first
        return other if other.value != other.value else Metric(self.kind, pick(self.value, other.value))

    def number(self) -> float:
        """Return the plain number. The mean of nothing is 0. A histogram's number is its count."""
        if self.kind == "mean":
            return float(self.value) / float(self.count) if float(self.count) else 0.0
        return float(self.value if self.edges is None else self.count)


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


def histogram(values: Any, edges: Sequence[float]) -> Metric:
    """Return a histogram of an array or a tensor of any shape, on a grid of ascending edges. NaN is left out."""
    values = values[values == values]
    if hasattr(values, "new_tensor"):  # a tensor is counted on its own device
        upward = (values.float()[:, None] >= values.float().new_tensor(edges)).sum(0)
    else:
        places = np.searchsorted(edges, values, "right")
        upward = len(values) - np.bincount(places, minlength=len(edges) + 1).cumsum()[:-1]
    return Metric("histogram", upward, len(values), tuple(edges))


def histogram_rows(metrics: Metrics) -> list[dict[str, Any]]:
    """Return name, edges [K] and counts [K + 1] of each histogram, sorted by name."""
    found = [(name, m.edges, [m.count, *m.value, 0]) for name, m in sorted(metrics.items()) if m.edges is not None]
    return [{"name": n, "edges": list(edges), "counts": (-np.diff(up)).astype(int).tolist()} for n, edges, up in found]


def merge(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Merge metrics by name, in the order given."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def plain(metrics: Metrics) -> dict[str, float]:
    """Return the plain numbers, sorted by name. Histograms are left out."""
    return {name: metrics[name].number() for name in sorted(metrics) if metrics[name].edges is None}


def detached(metrics: Metrics) -> dict[str, Metric]:
    """Return the metrics with floats and arrays in place of tensors, as is needed before metrics leave a worker."""
    values = {name: float(m.value) if m.edges is None else np.array(m.value.tolist()) for name, m in metrics.items()}
    return {name: Metric(m.kind, values[name], float(m.count), m.edges) for name, m in metrics.items()}
