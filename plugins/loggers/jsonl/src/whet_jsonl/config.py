"""The config of the logger `jsonl`."""

from attrs import Factory, frozen

STANDARD_OUTPUT = "-"


@frozen
class JsonlConfig:
    """Metrics as JSON lines, one object for each step."""

    path: str = "metrics-log.jsonl"
    """File, relative to the run folder; it belongs to this run alone. `-` writes to standard output."""
    include: list[str] = Factory(lambda: ["*"])
    """Names or patterns of the metrics to write, e.g. `evaluation/*`."""
    exclude: list[str] = Factory(list)
    """Names or patterns of metrics to leave out of those."""
