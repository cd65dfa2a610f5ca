"""Who takes turns in memory follows from where roles run, and what cannot be is refused."""

from collections.abc import Mapping
from typing import Any

import pytest
from attrs import frozen

from whet.component import AlgorithmFacts, BackendFacts, Component, EnvironmentFacts, Facts, RoleNeed, Selection
from whet.config.sections import (
    ClusterSection,
    Config,
    EndpointSection,
    ModelSection,
    RoleSection,
    RolloutSection,
    RunSection,
)
from whet.plan.colocation import find_turns
from whet.plan.roles import make_roles

BOTH = BackendFacts(sleeps=("cpu", "cuda"))
ON_GPUS = BackendFacts(sleeps=("cuda",))
GPUS = {"backend": 2, "generator": 2}


@frozen
class Plain:
    """A component without settings."""


def chosen(kind: Any, name: str) -> Selection:
    return Selection(kind, Component(name, Plain, "x:Y"), Plain())


def make_config(
    staleness: int = 0, generator: bool = True, serve: bool = False, roles: Any = (), **cluster: Any
) -> Config:
    return Config(
        run=RunSection("runs/x", 10), model=ModelSection("models/x"), algorithm=chosen("algorithms", "loop"),
        backend=chosen("backends", "trainer"), generator=chosen("generators", "sampler") if generator else None,
        rollout=RolloutSection(max_staleness=staleness), endpoint=EndpointSection(serve=serve),
        roles={name: RoleSection(component=chosen("backends", "trainer")) for name in roles},
        cluster=ClusterSection(**cluster),
    )  # fmt: skip


def facts(backend: Facts = BOTH, generator: Facts = BOTH, **others: Facts) -> Mapping[str, Facts]:
    named = {path.replace("__", "."): found for path, found in others.items()}
    return {"algorithm": AlgorithmFacts(), "backend": backend, "generator": generator, **named}


def found_turns(config: Config, found: Mapping[str, Facts] | None = None) -> Any:
    staleness, roles = config.rollout.max_staleness, make_roles(config, found or facts())
    return find_turns(config.cluster.offload, staleness, config.endpoint.serve, roles)


def turns(config: Config, found: Mapping[str, Facts] | None = None) -> tuple[tuple[str, ...], ...]:
    sides: tuple[tuple[str, ...], ...] = found_turns(config, found)[0]
    return sides


def refusals(config: Config, found: Mapping[str, Facts] | None = None) -> list[str]:
    return [str(problem) for problem in found_turns(config, found)[2]]


@pytest.mark.parametrize(
    "cluster",
    [
        {}, {"gpus": {"backend": 2}}, {"gpus": {"generator": 2}}, {"gpus": GPUS, "colocate": []},
        {"gpus": GPUS, "offload": "never"}, {"gpus": GPUS, "python": {"generator": "vllm"}},
    ],
)  # fmt: skip
def test_by_themselves_only_roles_that_share_gpus_take_turns(cluster: dict[str, Any]) -> None:
    assert turns(make_config(**cluster)) == ()
    assert turns(make_config(gpus=GPUS)) == (("backend",), ("generator",))


def test_where_generation_overlaps_training_nobody_sleeps() -> None:
    assert turns(make_config(staleness=1, gpus=GPUS, colocate=[["backend", "generator"]])) == ()
    (said,) = refusals(make_config(staleness=1, offload="always"))
    assert "cluster.offload: is always, but with rollout.max_staleness 1 the generator works while the backend" in said


def test_always_is_on_cpus_and_of_roles_that_are_apart() -> None:
    assert turns(make_config(offload="always")) == (("backend",), ("generator",))
    assert turns(make_config(offload="always", colocate=[])) == (("backend",), ("generator",))
    assert refusals(make_config(offload="always")) == []


def test_without_a_generator_there_is_nobody_to_take_turns_with() -> None:
    assert turns(make_config(generator=False, gpus={"backend": 2})) == ()
    assert "there is no generator" in refusals(make_config(generator=False, offload="always"))[0]


def test_what_cannot_give_memory_back_is_named() -> None:
    found = facts(generator=ON_GPUS)
    (said,) = refusals(make_config(offload="always"), found)
    assert said == (
        "cluster.offload: is always, but sampler of the generator can give memory back on cuda alone, and runs on cpu; "
        "set cluster.offload: auto"
    )
    assert refusals(make_config(offload="always", gpus=GPUS), found) == []
    config = make_config(gpus=GPUS)
    chosen, (note,), _ = found_turns(config, facts(backend=BackendFacts()))
    assert chosen == ()
    assert note == "all keep their memory while others work: trainer of the backend can give memory back nowhere"


def test_further_models_have_their_turn_with_who_asks_for_them() -> None:
    roles = ("critic", "judge", "both")
    needs = {name: RoleNeed() for name in roles}
    found = {
        **facts(environments__0=EnvironmentFacts(roles={"judge": needs["judge"], "both": needs["both"]})),
        "algorithm": AlgorithmFacts(roles={"critic": needs["critic"], "both": needs["both"]}),
        **{f"roles.{name}": BOTH for name in roles},
    }
    assert turns(make_config(roles=roles, offload="always"), found) == (("backend", "critic"), ("generator", "judge"))
    some = make_config(roles=roles, gpus={**GPUS, "critic": 2})
    assert turns(some, found) == (("backend", "critic"), ("generator",)), "the judge is on no GPU"


def test_who_asks_at_the_endpoint_is_told_of_the_wait() -> None:
    rollouts = {**facts(), "algorithm": AlgorithmFacts(inputs=("rollouts",))}
    config = make_config(serve=True, gpus=GPUS)
    chosen, (note,), _ = found_turns(config, rollouts)
    assert chosen
    assert "who asks while the backend trains waits" in note


def test_where_nothing_would_wake_the_generator_for_who_asks_at_the_endpoint_it_stays_awake() -> None:
    config = make_config(serve=True, gpus=GPUS)
    chosen, (note,), _ = found_turns(config, facts())
    assert chosen == ()
    assert "endpoint.serve is on, and an algorithm without rollouts hardly ever wakes" in note
    (said,) = refusals(make_config(serve=True, offload="always"))
    assert said.endswith("remove endpoint.serve, or set cluster.offload: auto")
