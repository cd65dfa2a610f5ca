"""The Python tool: run pieces of code one after another in one set of names, and show the value of a last expression."""

import ast
import json
import sys
import traceback


def main():  # type: ignore[no-untyped-def]
    """Run code until nobody sends any."""
    names = {"__name__": "__main__"}
    with open(3) as questions, open(4, "w") as answers:
        for line in questions:
            try:
                _run(json.loads(line), names)
            except SystemExit as error:
                print(f"SystemExit: {error}")
            except BaseException:
                traceback.print_exc(limit=-3, file=sys.stdout)
            sys.stdout.flush()
            sys.stderr.flush()
            print("done", file=answers, flush=True)


def _run(code, names):  # type: ignore[no-untyped-def]
    tree = ast.parse(code, "tool.py")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "tool.py", "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "tool.py", "eval"), names)
        if value is not None:
            print(repr(value))


main()
