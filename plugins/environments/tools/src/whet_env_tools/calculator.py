r"""The environment `calculator`: the model may call it in one turn and must box the product in a later turn.

    user       Compute 47*83.
    assistant  calc 47*83
    user       3901                 the environment's text: part of the sequence, but never trained on
    assistant  \boxed{3901}

Only the product is rewarded. The model has to learn that calling the calculator helps. One product in ten is held out
by its hash for the split `test`.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from whet.data.messages import Conversation, Message
from whet.data.randomness import derive_seed
from whet.data.records import Task
from whet.errors import ContextFull, DataError
from whet.interfaces.environment import Model
from whet_data.generated import GeneratedTasks
from whet_data.generated import held_out as by_hash
from whet_env_tools.calculation import CALL, called
from whet_env_tools.config import CalculatorConfig
from whet_sandbox.boxed import boxed_integer, is_integer, last_boxed

QUESTION = "Compute {}*{}."
MOST_DRAWS = 10_000
FEW_FACTORS = 200


class Calculator:
    """The environment `calculator`: rewards `correct` and `calls`."""

    def __init__(self, config: CalculatorConfig) -> None:
        self._config = config
        self._splits = {"train": train_products(config), "test": _test_products(config)}

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Weight 1 for `correct`. `calls` has weight 0: it is only recorded."""
        return {"correct": 1.0, "calls": 0.0}

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of `train` or `test`."""
        if split not in self._splits:
            raise DataError(f"there is no split {split!r}; there are {', '.join(self._splits)}")
        return self._splits[split]

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Play an episode: compute calls until a response has none or no turn is left. Returns the rewards."""
        answer, calls = await model.reply(task.prompt), 0
        with suppress(ContextFull):  # the last response is then graded
            while calls + 1 < self._config.turns and (result := called(answer.text)) is not None:
                answer, calls = await model.reply(Message(self._config.reply_role, result)), calls + 1
        boxed = last_boxed(answer.text)
        correct = boxed is not None and is_integer(boxed, task.data["answer"])
        return {"correct": float(correct), "calls": float(calls)}

    def final_answer(self, messages: Conversation) -> str | None:
        """Return the boxed product of the last response."""
        return boxed_integer(messages[-1].text)

    def close(self) -> None:
        """Do nothing: no resource is held."""


def train_products(config: CalculatorConfig) -> Sequence[Task]:
    """Return the tasks of `train`."""

    def task(index: int) -> Task:
        return _task(*draw_factors(random.Random(derive_seed(config.seed, "calculator-train", index)), config), config)

    return GeneratedTasks(config.train_tasks, task)


def draw_factors(draw: random.Random, config: CalculatorConfig) -> tuple[int, int]:
    """Return two drawn factors whose product is not held out. Raises `DataError` if none are found."""
    for _ in range(MOST_DRAWS):
        a, b = (draw.randint(config.smallest, config.largest) for _ in range(2))
        if not held_out(a, b):
            return a, b
    raise DataError(f"no product of factors from {config.smallest} to {config.largest} is left to train on")


def held_out(a: int, b: int) -> bool:
    """Return whether a product is held out for the split `test`. One in ten is."""
    return by_hash(f"{a}*{b}")


def demonstrations(
    count: int, seed: int = 0, direct_share: float = 0.5, config: CalculatorConfig | None = None
) -> Iterator[dict[str, Any]]:
    """Yield records for supervised fine-tuning, `{"messages": [...]}`.

    A share of `direct_share` states the product directly; the other records call the calculator.
    """
    draw, config = random.Random(derive_seed(seed, "calculator-demonstrations")), config or CalculatorConfig()
    for _ in range(count):
        a, b = draw_factors(draw, config)
        messages = list(_task(a, b, config).prompt)
        if draw.random() >= direct_share:
            messages += [Message("assistant", f"{CALL}{a}*{b}"), Message(config.reply_role, str(a * b))]
        messages.append(Message("assistant", f"\\boxed{{{a * b}}}"))
        yield {"messages": [{"role": message.role, "content": message.text} for message in messages]}


def _task(a: int, b: int, config: CalculatorConfig) -> Task:
    system: Conversation = (Message("system", config.system),) if config.system else ()
    return Task((*system, Message("user", QUESTION.format(a, b))), {"answer": str(a * b)}, id=f"{a}*{b}")


def _test_products(config: CalculatorConfig) -> Sequence[Task]:
    """Return tasks of distinct held-out products. If there are few factors, they are drawn from all such products."""
    factors = range(config.smallest, config.largest + 1)
    draw = random.Random(derive_seed(config.seed, "calculator-test"))
    if len(factors) <= FEW_FACTORS:
        every = [(a, b) for a in factors for b in factors if held_out(a, b)]
        found = draw.sample(every, min(config.test_tasks, len(every)))
    else:
        pairs = ((draw.choice(factors), draw.choice(factors)) for _ in range(100 * config.test_tasks))
        distinct = dict.fromkeys(pair for pair in pairs if held_out(*pair))
        found = list(itertools.islice(distinct, config.test_tasks))
    if not found:
        raise DataError(f"no product of factors from {config.smallest} to {config.largest} is held out for `test`")
    return tuple(_task(a, b, config) for a, b in found)
