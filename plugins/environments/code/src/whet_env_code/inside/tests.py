"""In a sandbox of their own: run the tests of a task. A call of the program's function is a question to the driver.

    order     {"before": code, "setup": code, "tests": code, "name": "f", "check": true, "every": true}
    answers   {"call": "f", "arguments": [..], "keywords": {..}} as often as needed, then
              {"passed": 3, "total": 4, "failed": "..."}

Each `assert` that runs counts. Without `every` the first that fails ends the tests.
"""

import ast
import builtins
import json
import sys
from collections.abc import Callable
from typing import Any

from whet_env_code.inside import plain

sys.set_int_max_str_digits(0)
WORDS = 300


class Stop(BaseException):
    """Ends the tests at the first that fails."""


class Gone(Exception):  # noqa: N818 - it says what happened
    """The program does not run any more, so no test can pass, also no test that wants an exception."""


class Tally:
    """Counts the asserts of the tests."""

    def __init__(self, every: bool) -> None:
        self.every, self.passed, self.total, self.failed, self.gone = every, 0, 0, "", ""

    def succeed(self) -> None:
        """Count an assert that held: as passed while the program runs."""
        self.passed, self.total = self.passed + (not self.gone), self.total + 1
        self.failed = self.failed or self.gone

    def fail(self, source: str, error: Exception) -> None:
        """Count an assert that did not hold."""
        self.total += 1
        words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self.failed = self.failed or f"{source[:WORDS]} -> {words[:WORDS]}"
        if not self.every:  # else also after the program has ended: a share of fewer tests would reward an early end
            raise Stop


class Counting(ast.NodeTransformer):
    """Rewrites `assert x` as `try: assert x` with a call of the tally."""

    def __init__(self) -> None:
        self.asserts = 0

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """Return the statement that counts."""
        self.asserts += 1
        failed = ast.parse("_tally.fail(_source, _error)").body[0]
        assert isinstance(failed, ast.Expr) and isinstance(failed.value, ast.Call)  # noqa: PT018 - no test
        failed.value.args[0] = ast.Constant(ast.unparse(node))
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), "_error", [failed])
        counted = ast.Try([node], [handler], ast.parse("_tally.succeed()").body, [])
        return ast.copy_location(counted, node)


def main() -> None:
    """Read the order, run the tests, and answer how they came out."""
    # one answer is one line, whatever bytes the program wrote: otherwise the rest would answer the next call
    with open(3, newline="\n", errors="replace") as questions, open(4, "w") as answers:

        def ask(call: dict[str, Any]) -> Any:
            if not tally.gone:
                print(json.dumps(call), file=answers, flush=True)
                answer = json.loads(questions.readline())
                if type(answer) is not dict or "gone" not in answer:
                    return answer
                tally.gone = str(answer["gone"])[:WORDS] or "the program has ended"
            raise Gone(tally.gone)

        order = json.loads(questions.readline())
        tally = Tally(order["every"])
        code = Counting()
        tree = ast.fix_missing_locations(code.visit(ast.parse(order["tests"])))
        names: dict[str, Any] = {"__name__": "tests"}
        _define(order["before"], names)
        exec(compile(order["setup"], "setup", "exec"), names)
        called = [order["name"]] if order["name"] else _undefined(tree, names)
        names.update({name: _stub(name, ask) for name in called}, _tally=tally)
        try:
            exec(compile(tree, "tests", "exec"), names)
            if order["check"]:
                names["check"](names[called[0]])
        except Stop:
            pass
        except Exception as error:
            tally.total += 1
            tally.failed = tally.failed or f"{type(error).__name__}: {error}"[:WORDS]
        total = max(tally.total, code.asserts if tally.failed else 0)
        print(json.dumps({"passed": tally.passed, "total": total, "failed": tally.failed}), file=answers, flush=True)
        questions.readline()


def _define(before: str, names: dict[str, Any]) -> None:
    """Define what stands before the program: helper functions and imports that the tests may use, too."""
    for end in ("", "\n    pass\n"):  # the head of a function may lack a body
        try:
            code = compile(before + end, "before", "exec")
        except SyntaxError:
            continue
        exec(code, names)
        return


def _undefined(tree: ast.AST, names: dict[str, Any]) -> list[str]:
    """Return the functions that the tests call by name and nobody defines."""
    called = [n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    stored |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    stored |= {
        (a.asname or a.name).partition(".")[0]
        for n in ast.walk(tree)
        if isinstance(n, (ast.Import, ast.ImportFrom))
        for a in n.names
    }
    known = {*names, *stored, *dir(builtins)}
    return [name for name in dict.fromkeys(called) if name not in known]


def _stub(name: str, ask: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Return a function that calls a function of the program."""

    def function(*arguments: Any, **keywords: Any) -> Any:
        call = {"call": name, "arguments": [plain.packed(one) for one in arguments]}
        answer = ask({**call, "keywords": {key: plain.packed(one) for key, one in keywords.items()}})
        if type(answer) is not dict:
            raise TypeError("the program answered with no message")
        if "value" in answer:
            return plain.unpacked(answer["value"])
        kind = getattr(builtins, str(answer.get("error")), RuntimeError)
        known = isinstance(kind, type) and issubclass(kind, Exception)
        # as from a generator: in `all(map(candidate, ...))` the end of an iteration would end the tests as passed
        known = known and not issubclass(kind, StopIteration | StopAsyncIteration)
        raise RuntimeError(str(answer)[:WORDS]) if not known else kind(str(answer.get("words"))[:WORDS])

    function.__name__ = name
    return function


main()
