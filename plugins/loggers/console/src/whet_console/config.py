"""The config of the logger `console`."""

from attrs import Factory, field, frozen

from whet.config.bounds import GROUP, SECONDS, STEPS, TOKENS, between


@frozen
class ConsoleConfig:
    """Progress, rows of metrics and a summary at the end, in the terminal or as plain lines."""

    every: int = field(default=10, validator=between(1, STEPS))
    """Steps between rows; the first and the last step always get one."""
    metrics: list[str] = Factory(list)
    """Metrics of a row, as names or patterns such as `reward/*`; by default the usual ones that the run has."""
    answers: int = field(default=2, validator=between(0, GROUP))
    """Evaluation tasks whose answers the summary shows, first and last ones side by side; the first of the set."""
    answer_characters: int = field(default=300, validator=between(1, TOKENS))
    """Longer prompts and answers are cut to so many characters."""
    quiet_seconds: float = field(default=30.0, validator=between(0, SECONDS))
    """Without a terminal: longest silence before a line says what the run waits for."""
