"""The page that says what fits what, asked of the plan: see `whet_testing.combinations`."""

from collections.abc import Iterable, Mapping, Sequence

from attrs import evolve

from whet.plugins.registry import Registry
from whet_testing.combinations import Combination, asked_roles, combinations, facts_of, reasons

BASE = {
    "run": {"folder": "run", "steps": 2},
    "model": {"path": "model"},
    "backend": {"use": "fsdp2", "reference": True, "teacher": "model"},
    "generator": {"use": "hf"},
    "rollout": {"max_tokens": 16},
    "environments": [{"use": "arithmetic"}],
    "data": {"train": [{"path": "data.jsonl"}]},
}
"""All else of the config: a backend that holds a reference and a teacher, so that none is refused for lack of one."""
EXTRA: Mapping[str, Mapping[str, object]] = {"rm": {"backend": {"use": "fsdp2", "head": "value"}, "generator": None}}
"""Sections that an algorithm wants to be otherwise, by its name."""
SEVERAL = 4
"""Answers to each prompt, so that what compares them fits algorithms that need only one, too."""
HEAD = """\
# Combinations

What can stand beside what, as each part's facts say: found by asking the plan about every pair, with all other settings
at their defaults, several answers to each prompt, a backend that holds a reference and a teacher, and the roles that
the algorithm asks for.
`tests/test_combinations.py` takes two steps with combinations in which every pair that fits occurs. What does not fit
is refused by `whet check` with the reason given here."""


def page(registry: Registry, algorithms: Sequence[str]) -> str:
    """Write the page for some algorithms."""
    return "\n\n".join([HEAD, *(one_algorithm(registry, name) for name in algorithms)])


def problems_of(one: Combination, registry: Registry) -> list[str]:
    """Return what does not fit in a combination, besides the folder of the teacher, which is made up."""
    keys = registry.find("algorithms", one.algorithm).component.config.__annotations__
    several = {"group_size": SEVERAL} if "group_size" in keys else {}
    found = reasons(one, {**BASE, **further(one, registry)}, registry, **several)
    return [problem for problem in found if not problem.startswith("backend.teacher: ")]


def further(one: Combination, registry: Registry) -> dict[str, object]:
    """Return the sections that a combination cannot do without: the roles that its algorithm asks for, and `EXTRA`."""
    roles = asked_roles(facts_of(one, registry), {"use": "fsdp2"})
    return {**({"roles": roles} if roles else {}), **EXTRA.get(one.algorithm, {})}


def one_algorithm(registry: Registry, name: str) -> str:
    """Write the tables of one algorithm."""
    every = list(combinations(registry, [name]))
    notes: list[str] = []
    parts = [f"## `{name}`"]
    pairs = {(one.loss, one.advantages): Combination(name, one.loss, one.advantages) for one in every}
    across = "advantages" if any(one.advantages for one in every) else ""
    if any(one.loss for one in every):
        parts.append(table("loss", across, pairs, registry, notes))
    else:
        parts.append("It has no parts to choose.")
    critics = {(one.value_loss, ""): Combination(name, value_loss=one.value_loss) for one in every if one.value_loss}
    if critics:
        parts.append(table("value_loss", "", critics, registry, notes))
    fitting = [one for one in pairs.values() if not problems_of(one, registry)]
    filters = {
        (chosen, one.advantages): evolve(one, filters=chosen)
        for one in fitting for chosen in dict.fromkeys(other.filters for other in every) if chosen
    }  # fmt: skip
    if filters:
        parts.append(table("filter", across, filters, registry, notes))
    return "\n\n".join([*parts, *(["\n".join(f"{i}. {note}" for i, note in enumerate(notes, 1))] if notes else [])])


def table(
    down: str, across: str, cells: Mapping[tuple[str, str], Combination], registry: Registry, notes: list[str]
) -> str:
    """Write a table with a mark where a pair fits, and the number of the reason where it does not."""
    rows, columns = (sorted({key[i] for key in cells}) for i in (0, 1))
    head = " | ".join(f"`{column}`" for column in columns) if across else "fits"
    corner = f"{down}, {across}" if across else down
    lines = [f"| {corner} | {head} |", f"| --- |{' --- |' * len(columns)}"]
    for row in rows:
        marks = (mark(problems_of(cells[row, column], registry), notes) for column in columns)
        lines.append(f"| `{row}` | {' | '.join(marks)} |")
    return "\n".join(lines)


def mark(problems: Iterable[str], notes: list[str]) -> str:
    """Return a cell: yes, or the numbers of the reasons, which are added to the notes."""
    numbers = []
    for problem in problems:
        if problem not in notes:
            notes.append(problem)
        numbers.append(notes.index(problem) + 1)
    return ", ".join(f"({number})" for number in sorted(numbers)) or "yes"
