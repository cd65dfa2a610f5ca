"""The Python tool: run pieces of code in one set of names, and show the value of a last expression."""

import ast
import json
import sys
import traceback
from typing import Any


def main() -> None:
    """Run code until nobody sends any."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # half of a character is shown so
    with open(3) as questions, open(4, "w") as answers:
        for line in questions:
            try:
                _run(json.loads(line), names)
            except SystemExit as error:
                print(f"SystemExit: {error}")
            except BaseException as error:
                own = (
                    error.__traceback__.tb_next.tb_next if error.__traceback__ and error.__traceback__.tb_next else None
                )
                traceback.print_exception(type(error), error, own, file=sys.stdout)
            sys.stdout.flush()
            sys.stderr.flush()
            print("done", file=answers, flush=True)


def _run(code: str, names: dict[str, Any]) -> None:
    tree = ast.parse(code, "tool.py")
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    exec(compile(tree, "tool.py", "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "tool.py", "eval"), names)
        if value is not None:
            print(repr(value))


main()
