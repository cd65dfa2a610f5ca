"""Find the fields of a config class that have no string beneath them, and numbers without bounds."""

import ast
import inspect
import itertools
import re
import textwrap

import attrs

from whet.config.messages import type_words
from whet_start.explain import allowed, walk


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


def unbounded(cls: type) -> list[str]:
    """Return the fields of a config class, and of classes inside it, whose numbers lack a lower or an upper bound."""
    found = []
    for prefix, _, field in walk(cls):
        bound = allowed(field.validator)
        bounds = [re.search("at least|more than", bound), re.search("at most|less than", bound)]
        number = "kind" not in field.metadata and re.search(
            "(a|an) (number|integer)|numbers|integers", type_words(field.type)
        )
        if number and bounds.count(None) > int(bool(field.metadata.get("infinite"))):
            found.append(f"{prefix}{field.alias}")
    return found
