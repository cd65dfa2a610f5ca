"""Keeps answers from being programs where a scorer of reasoning-gym evaluates them as Python.

Such a scorer would run the answer in its own process, where the answer could write any score. A right answer is a list
or a formula. An answer that could call anything else counts as no answer.
"""

import ast
import re

LISTS = frozenset({"binary_matrix", "spiral_matrix", "string_insertion", "n_queens"})
"""Data sets whose scorers call `eval`."""
FORMULAS = frozenset(
    {"countdown", "puzzle24", "polynomial_multiplication", "simple_integration", "intermediate_integration"}
)
"""Data sets whose scorers call `sympy.parse_expr`."""

_PLAIN = (
    ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Load,
    ast.UnaryOp, ast.USub, ast.UAdd, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div,
)  # fmt: skip
_MATHEMATICS = """
sin cos tan cot sec csc asin acos atan acot asec acsc sinh cosh tanh coth asinh acosh atanh exp log ln sqrt cbrt root
Abs abs sign erf erfc erfi gamma factorial binomial floor ceiling Min Max min max Pow Mul Add Rational Integer Float
int float round
"""
_FUNCTIONS = frozenset(_MATHEMATICS.split())
_WORD = re.compile(r"[A-Z]+")
_TEXT_OR_PART = re.compile(r"""["'\\#]|\.\s*[^\W\d]|__""")
_CALLED_RESULT = re.compile(r"[)\]}!]\s*\(")
_CALL = re.compile(r"([^\W\d]\w*)\s*\(")
_BY_KEYWORD = re.compile(r"\b(?:and|or|not|in|is|if|else)\s*\(")


def is_program(dataset: str, answer: str) -> bool:
    """Return whether an answer could do more than state a value, where the scorer evaluates it."""
    if dataset in LISTS:
        return _is_no_list(answer)
    return dataset in FORMULAS and _is_no_formula(answer)


def _is_no_list(answer: str) -> bool:
    try:
        tree = ast.parse(answer.strip(" \t"), mode="eval")
    except (SyntaxError, ValueError):
        return False  # the scorer's `eval` raises the same
    except (MemoryError, RecursionError):
        return True
    if isinstance(tree.body, ast.Name):  # a name could be a variable of the scorer, such as the right answer
        return not _WORD.fullmatch(tree.body.id)
    return not all(isinstance(node, _PLAIN) for node in ast.walk(tree))


def _is_no_formula(answer: str) -> bool:
    if _TEXT_OR_PART.search(answer) or _CALLED_RESULT.search(answer):
        return True
    return any(name not in _FUNCTIONS for name in _CALL.findall(_BY_KEYWORD.sub(" ", answer)))
