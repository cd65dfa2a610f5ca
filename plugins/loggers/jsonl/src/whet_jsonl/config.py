"""The config of the logger `jsonl`."""

from attrs import Factory, field, frozen, validators

STANDARD_OUTPUT = "-"


@frozen
class JsonlConfig:
    """Writes metrics as JSON lines, one object for each step."""

    path: str = field(default="metrics-log.jsonl", validator=validators.min_len(1), metadata={"writes": True})
    """File, relative to the run folder. Only this run may use it. `-`: standard output."""
    include: list[str] = Factory(lambda: ["*"])
    """Names or patterns of the metrics to write, e.g. `evaluation/*`."""
    exclude: list[str] = Factory(list)
    """Names or patterns of included metrics that are not written."""
