"""Find the fields of an attrs class that have no string beneath them."""

import ast
import inspect
import itertools
import textwrap

import attrs


def undocumented_fields(cls: type) -> list[str]:
    """Return the names of the public fields that no string documents. Inherited fields are included."""
    documented: set[str] = set()
    for owner in cls.__mro__:
        if attrs.has(owner):
            documented |= _documented(owner)
    return [field.name for field in attrs.fields(cls) if field.name not in documented and field.init]


def _documented(cls: type) -> set[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found = set()
    for statement, following in itertools.pairwise(body):
        says = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and says:
            found.add(statement.target.id)
    return found
