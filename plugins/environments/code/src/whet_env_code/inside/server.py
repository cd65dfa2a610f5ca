"""Beside the program: call its functions for the tests, which are elsewhere.

Nothing here is trusted: the program can change it all.
"""

import json
import sys
from typing import Any

from whet_env_code.inside import plain

sys.set_int_max_str_digits(0)


def main() -> None:
    """Load the program at the first question, and answer calls of its functions from then on."""
    names: dict[str, Any] = {"__name__": "program", "__builtins__": __builtins__}
    with open(3) as questions, open(4, "w") as answers:
        for line in questions:
            try:
                answer = _answer(json.loads(line), names)
            except BaseException as error:
                answer = {"error": type(error).__name__, "words": str(error)[:500]}
            sys.stdout.flush()
            print(json.dumps(answer), file=answers, flush=True)


def _answer(question: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    if "call" not in question:
        with open("program.py") as file:
            source = file.read()
        exec(compile(source, "program.py", "exec"), names)
        return {"value": None}
    arguments = [plain.unpacked(one) for one in question["arguments"]]
    keywords = {name: plain.unpacked(one) for name, one in question["keywords"].items()}
    return {"value": plain.packed(names[question["call"]](*arguments, **keywords))}


main()
