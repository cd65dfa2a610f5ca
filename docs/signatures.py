"""The page of every contract on a screen, and of the signatures of all their methods."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

from whet import interfaces

HEAD = """\
# Interfaces

What each kind of plugin implements. The table is every contract on a screen. Below it are the signatures and their
first sentences; the [API pages](api/interfaces.md) have the whole text."""
OWN = "own-environment", "own-reward", "own-loss", "own-advantages-or-filter", "own-hooks"
KINDS = (
    ("environment", "Environment", "Answering, GroupRewarding, Adaptive, Stateful", "EnvironmentFacts", OWN[0]),
    ("reward", "RewardFunction", "", "", OWN[1]),
    ("algorithm", "Algorithm", "Stateful", "AlgorithmFacts", "write-a-plugin"),
    ("loss", "Loss", "", "LossFacts", OWN[2]),
    ("advantages", "`(batch) -> [B] or [N]`", "Stateful", "AdvantagesFacts", OWN[3]),
    ("filter", "`(group) -> bool`", "Stateful", "FilterFacts", OWN[3]),
    ("generator", "Generator", "", "GeneratorFacts", "own-generator"),
    ("backend", "Backend", "ParallelAxes", "BackendFacts", "own-backend"),
    ("logger", "Logger", "event, Stateful", "", "write-a-plugin"),
    ("hook", "[any hook](hooks.md)", "settings", "", OWN[4]),
    ("sandbox", "`whet_sandbox.provider.Provider`", "", "", "run-programs"),
    ("launcher", "Launching", "", "", "ray"),
    ("endpoint", "Endpoints", "", "", "foreign-agent"),
)
"""Kind, contract, optional extensions, class of facts, and the guide."""


def page() -> str:
    """Return the page."""
    found = dict(protocols())
    rows = ["| kind | contract | methods | optional | facts | guide |", "| --- | --- | --- | --- | --- | --- |"]
    for kind, contract, optional, facts, guide in KINDS:
        methods = ", ".join(f"`{name}`" for name, _ in members(found[contract])) if contract in found else ""
        linked = f"[`{contract}`](#{contract.lower()})" if contract in found else contract
        rows.append(f"| {kind} | {linked} | {methods} | {optional} | {facts} | [how](../how-to/{guide}.md) |")
    return "\n\n".join([HEAD, "\n".join(rows), *(section(name, cls) for name, cls in found.items())])


def protocols() -> Iterator[tuple[str, type]]:
    """Yield the Protocols of `whet.interfaces` by name, in the order of modules and of their source."""
    for module in sorted(found.name for found in pkgutil.iter_modules(interfaces.__path__)):
        names = importlib.import_module(f"{interfaces.__name__}.{module}")
        own = [cls for cls in vars(names).values() if inspect.isclass(cls) and cls.__module__ == names.__name__]
        yield from ((cls.__name__, cls) for cls in own if getattr(cls, "_is_protocol", False))


def members(cls: type) -> list[tuple[str, Any]]:
    """Return the public methods and properties of a Protocol."""
    return [
        (name, value)
        for name, value in vars(cls).items()
        if (inspect.isfunction(value) or isinstance(value, property))
        and (name == "__call__" or not name.startswith("_"))
    ]


def section(name: str, cls: type) -> str:
    """Return the signatures of one Protocol."""
    lines = [f"## `{name}`", sentence(cls), f"From `{cls.__module__}`."]
    shown = []
    for method, value in members(cls):
        function = value.fget if isinstance(value, property) else value
        comment = sentence(function)
        shown.append((f"# {comment}\n" if comment else "") + signature(method, function, isinstance(value, property)))
    return "\n\n".join([*lines, "```text\n" + "\n\n".join(shown) + "\n```"] if shown else lines)


def sentence(documented: Any) -> str:
    """Return the first sentence of a docstring, on one line."""
    text = " ".join((inspect.getdoc(documented) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[a-z`)\]]\.)\s", text, maxsplit=1)[0]


def signature(name: str, function: Any, is_property: bool) -> str:
    """Return a signature as one would write it, without quotes around types."""
    plain, parts = inspect.signature(function), list[str]()
    for one in plain.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not any(part.startswith("*") for part in parts):
            parts.append("*")
        shown = "*" * (one.kind is one.VAR_POSITIONAL) + "**" * (one.kind is one.VAR_KEYWORD) + one.name
        typed = shown if one.annotation is one.empty else f"{shown}: {annotation(one.annotation)}"
        equals = " = " if ":" in typed else "="
        parts.append(typed if one.default is one.empty else f"{typed}{equals}{one.default!r}".replace("'", '"'))
        if one.kind is one.POSITIONAL_ONLY:
            parts.append("/")
    arrow = "" if plain.return_annotation is plain.empty else f" -> {annotation(plain.return_annotation)}"
    word = "async def" if inspect.iscoroutinefunction(function) else "def"
    return ("@property\n" if is_property else "") + f"{word} {name}({', '.join(parts)}){arrow}: ..."


def annotation(found: Any) -> str:
    """Return a type as one would write it."""
    text = found if isinstance(found, str) else inspect.formatannotation(found)
    text = re.sub(r"ForwardRef\('([^']*)'\)", r"\1", text)
    text = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)  # the modules of types
    text = text.replace("numpy.ndarray[tuple[Any, ...], numpy.dtype[numpy.int64]]", "IntArray")
    text = re.sub(r"(?<!\w)[-~+](?=\w)", "", text)  # the variance of a type variable
    return text.replace("'", '"') if "Literal" in text else text.replace("'", "")
