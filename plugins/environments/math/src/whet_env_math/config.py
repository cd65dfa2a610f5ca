"""The configs of the environments `arithmetic` and `math`."""

from attrs import field, frozen, validators


@frozen
class ArithmeticConfig:
    """Chains of additions and subtractions such as `Compute 7+8-3+6-1.`, made up as they are needed."""

    terms: int = field(default=5, validator=validators.ge(2))
    """Numbers in a chain."""
    largest_operand: int = field(default=9, validator=validators.ge(1))
    """Each number is between 1 and this."""
    largest_total: int = field(default=20, validator=validators.ge(1))
    """Every running total is between 0 and this."""
    train_tasks: int = field(default=1_000_000, validator=validators.ge(1))
    """Tasks in the split `train`."""
    test_tasks: int = field(default=512, validator=validators.ge(1))
    """Tasks in the split `test`: of the tenth of all expressions that `train` never shows."""
    seed: int = 0
    """Another seed gives other tasks."""
