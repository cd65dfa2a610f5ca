r"""The calculator of `whet demo calculator`: a typed function as a tool, and what a model is warmed up with.

    user       Compute 47*83.
    assistant  <tool_call>{"name": "calculate", "arguments": {"expression": "47*83"}}</tool_call>
    tool       3901
    assistant  \boxed{3901}

The environment is `tool-use`, which rewards the product only: the model has to find out that calling the tool helps.
"""

import random
from collections.abc import Iterator
from typing import Any

from whet.data.randomness import derive_seed
from whet_env_tools.hosted.functions import function_tool

OPERATORS = "*+-"
MOST_DIGITS = 12
SMALLEST, LARGEST = 11, 99
"""Factors of the products that are demonstrated."""


def calculate(expression: str) -> int:
    """Compute a product, a sum or a difference of two whole numbers.

    Args:
        expression: For example 12*34.
    """
    # a model wrote the text, so it is parsed and never evaluated
    operator = next((one for one in OPERATORS if one in expression), "")
    if not operator:
        raise ValueError(f"wanted two whole numbers and one of {OPERATORS} between them, as in 12*34")
    left, _, right = expression.partition(operator)
    a, b = _number(left), _number(right)
    return a * b if operator == "*" else a + b if operator == "+" else a - b


def _number(text: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) <= MOST_DIGITS):
        raise ValueError(f"{digits!r:.40} is no whole number of at most {MOST_DIGITS} digits")
    return int(digits)


def demonstrations(count: int, seed: int = 0, direct_share: float = 0.5) -> Iterator[dict[str, Any]]:
    """Yield records for supervised fine-tuning and, with `question` and `answer`, for `tool-use`.

    A share of `direct_share` states the product directly; the other records call the tool first.
    """
    draw = random.Random(derive_seed(seed, "calculator-demonstrations"))
    tool = function_tool(f"{__name__}:{calculate.__name__}")
    tools = [{"name": tool.name, "description": tool.description, "parameters": tool.parameters}]
    for _ in range(count):
        a, b = draw.randint(SMALLEST, LARGEST), draw.randint(SMALLEST, LARGEST)
        question, expression, answer = f"Compute {a}*{b}.", f"{a}*{b}", str(a * b)
        messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        if draw.random() >= direct_share:
            call = {"function": {"name": tool.name, "arguments": {"expression": expression}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": answer})
        messages.append({"role": "assistant", "content": f"\\boxed{{{answer}}}"})
        yield {"messages": messages, "tools": tools, "question": question, "answer": answer}
