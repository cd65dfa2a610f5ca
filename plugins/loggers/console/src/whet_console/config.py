"""The config of the logger `console`."""

from attrs import Factory, field, frozen

from whet.config.bounds import GROUP, SECONDS, STEPS, TOKENS, between
from whet.config.renamed import renamed


@frozen
class ConsoleConfig:
    """Shows progress, rows of metrics and a final summary, in the terminal or as plain lines."""

    every: int = field(default=10, validator=between(1, STEPS))
    """Steps between rows. The first and the last step always have a row."""
    metrics: list[str] = Factory(list)
    """Metrics of a row, as names or patterns such as `reward/*`. Empty: the usual metrics that the run has."""
    responses: int = field(default=2, validator=between(0, GROUP), metadata=renamed("answers"))
    """Number of evaluation tasks in the summary. Their first and last responses are shown side by side."""
    response_characters: int = field(default=300, validator=between(1, TOKENS), metadata=renamed("answer_characters"))
    """Longer prompts and responses are cut to this number of characters."""
    quiet_seconds: float = field(default=30.0, validator=between(0, SECONDS))
    """Without a terminal: after this time without output, a line shows what the run waits for."""
