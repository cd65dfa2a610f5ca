"""What a plan takes of hosts and GPUs, worked out by hand on a few roles."""

from collections.abc import Mapping
from typing import Any

import pytest
from attrs import evolve, frozen

from whet.component import (
    AdapterInfo,
    AlgorithmFacts,
    BackendFacts,
    Component,
    Facts,
    GeneratorFacts,
    MemoryTerm,
    Selection,
)  # fmt: skip
from whet.config.cluster import RecoverySection
from whet.config.sections import ClusterSection, Config, ModelSection, RolloutSection, RunSection
from whet.data.model_info import ModelInfo
from whet.plan.placement import Machine
from whet.plan.plan import Plan, make_plan
from whet.plan.roles import make_roles

GIB = 2**30
MODEL = ModelInfo("models/x", {"max_position_embeddings": 128})


@frozen
class Plain:
    """A component without settings."""


def chosen(kind: Any, name: str) -> Selection:
    return Selection(kind, Component(name, Plain, "x:Y"), Plain())


def training(ranks: int, trained: bool) -> list[MemoryTerm]:
    return [
        MemoryTerm("weights", 8 * GIB // ranks),
        MemoryTerm("gradients", 4 * GIB // ranks, kept_asleep=False, change="train less"),
        MemoryTerm("whole while it is loaded", 5 * GIB, "loading", "host"),
    ]


def sampling(ranks: int, trained: bool) -> list[MemoryTerm]:
    return [
        MemoryTerm("copy", 6 * GIB, change="copy less"), MemoryTerm("cache", 1 * GIB, kept_asleep=False, gpu_share=0.5)
    ]  # fmt: skip


FACTS = {
    "algorithm": AlgorithmFacts(inputs=frozenset({"rollouts"})),
    "backend": BackendFacts(memory=training, transports=("shared", "shared-memory"), sleeps=("cpu", "cuda")),
    "generator": GeneratorFacts(memory=sampling, transports=("shared", "shared-memory"), sleeps=("cpu", "cuda")),
}


def planned(machine: Machine, facts: Mapping[str, Facts] = FACTS, model: ModelInfo = MODEL, **cluster: Any) -> Plan:
    from whet.config.sections import EnvironmentSection

    config = Config(
        run=RunSection("runs/x", 10), model=ModelSection("models/x"), algorithm=chosen("algorithms", "loop"),
        backend=chosen("backends", "trainer"), generator=chosen("generators", "sampler"),
        environments=[EnvironmentSection(component=chosen("environments", "sums"))],
        rollout=RolloutSection(max_tokens=32), cluster=ClusterSection(**cluster),
    )  # fmt: skip
    plan, problems = make_plan(config, model, make_roles(config, facts), machine)
    assert plan is not None, problems
    return plan


def needs(plan: Plan) -> dict[str, float]:
    return {f"{room.node} {room.place}": room.needs / GIB for room in plan.memory}


def test_on_processors_all_ranks_of_all_roles_add_up_on_their_host() -> None:
    assert needs(planned(Machine(8))) == {"0 the host": 12 + 7}
    two = planned(Machine(8), ranks={"backend": 2, "generator": 3})
    assert needs(two) == {"0 the host": 12 + 3 * 7}, "the backend's ranks share theirs out, the generator's do not"
    assert "backend: trainer, 2 ranks x 4 threads on cpu" in two.describe()


def test_weights_that_processes_share_wait_on_the_host() -> None:
    shape = {"hidden_size": 1 << 12, "num_attention_heads": 32, "num_hidden_layers": 16, "vocab_size": 1 << 15}
    model = ModelInfo("models/x", {**MODEL.config, **shape})
    apart, together = (planned(Machine(4), model=model, colocate=share) for share in ([], [["backend", "generator"]]))
    assert apart.way is not None
    assert together.way is not None
    assert (apart.way.transport, together.way.transport) == ("shared-memory", "shared")
    (here,), (there,) = apart.memory, together.memory
    assert dict(here.terms)["backend: weights for the generator"] == 2 * model.parameters > 2 * GIB
    assert "backend: weights for the generator" not in dict(there.terms)


def test_the_copy_for_replicas_that_are_restarted_waits_on_the_host_of_the_trainer() -> None:
    shape = {"hidden_size": 1 << 12, "num_attention_heads": 32, "num_hidden_layers": 16, "vocab_size": 1 << 15}
    model = ModelInfo("models/x", {**MODEL.config, **shape})
    ways = ("shared", "broadcast", "shared-memory")
    facts = {**FACTS, **{name: evolve(FACTS[name], transports=ways) for name in ("backend", "generator")}}
    for replicas, wanted in ((8, 2 * model.parameters), (0, 0)):
        plan = planned(
            Machine(8, 2, 64 * GIB, (40 * GIB, 40 * GIB)), facts, model, gpus={"backend": 1, "generator": 1},
            colocate=[], recovery=RecoverySection(replicas=replicas),
        )  # fmt: skip
        assert plan.way is not None
        assert plan.way.transport == "broadcast"
        (host,) = (room for room in plan.memory if room.place == "the host")
        assert dict(host.terms).get("backend: weights for the generator", 0) == wanted


def test_what_every_rank_loads_whole_counts_where_it_is_more_than_all_hold_later() -> None:
    assert needs(planned(Machine(8), ranks={"backend": 4})) == {"0 the host": 4 * 5}


def test_roles_that_take_turns_count_the_larger_side_and_not_the_sum() -> None:
    assert needs(planned(Machine(8), offload="always")) == {"0 the host": 12}
    small = {**FACTS, "backend": evolve(FACTS["backend"], memory=lambda ranks, trained: [MemoryTerm("w", GIB)])}
    assert needs(planned(Machine(8), small, offload="always")) == {"0 the host": 7}


ON_GPUS = {"gpus": {"backend": 2, "generator": 2}}
TWO = Machine(8, 2, 64 * GIB, (10 * GIB, 10 * GIB))


def test_on_gpus_what_sleeps_waits_on_the_host_but_for_what_is_made_anew() -> None:
    plan = planned(TWO, **ON_GPUS)
    assert plan.turns == (("backend",), ("generator",))
    # Of the backend 12 / 2; of the generator 6 and what the others leave of half a GPU, which is nothing.
    assert needs(plan) == {"0 GPU 0": 6, "0 GPU 1": 6, "0 the host": 8 + 2 * 6}


def test_a_share_of_a_gpu_that_weights_fill_is_refused_by_its_key() -> None:
    (refusal,) = planned(TWO, **ON_GPUS).refusals
    assert refusal == (
        "generator.memory_fraction: is 0.5, 5.0 GiB of a GPU of 10.0 GiB, and the weights take 6.0 GiB, so there is no "
        "cache: raise it above 0.6; copy less"
    )
    assert planned(TWO, **ON_GPUS, memory="ignore").refusals == ()
    assert planned(evolve(TWO, gpu_bytes=(10 * GIB, 13 * GIB)), **ON_GPUS).refusals == ()


SHARED = ("shared-memory",)


@pytest.mark.parametrize(
    ("woken", "adapter", "ways", "gpu"),
    [
        ("", None, SHARED, 8 + 3),
        ("weights", None, SHARED, 8 + 3 + 6),
        ("weights", AdapterInfo(8, 16), SHARED, 8 + 3),
        ("adapter", AdapterInfo(8, 16), SHARED, 8 + 3 + 6),
        ("weights", None, ("in-place",), 8 + 6 + 1),  # no weights travel, so the generator does not wake
    ],
)
def test_weights_for_which_a_generator_wakes_count_beside_the_idle_backend(
    woken: Any, adapter: AdapterInfo | None, ways: tuple[str, ...], gpu: int
) -> None:
    terms = [MemoryTerm("copy", 6 * GIB, woken=woken), MemoryTerm("cache", GIB, kept_asleep=False, woken="")]
    facts = {
        **FACTS,
        "backend": BackendFacts(memory=lending, transports=ways, adapter=adapter, sleeps=("cuda",)),
        "generator": GeneratorFacts(
            memory=lambda ranks, trained: terms, transports=ways, adapters=frozenset({"linear"}), sleeps=("cuda",)
        ),
    }
    plan = planned(Machine(8, gpus=1), facts, gpus={"backend": 1, "generator": 1})
    assert needs(plan)["0 GPU 0"] == gpu


def test_during_a_weight_sync_a_backend_holds_what_it_sends_and_a_critic_sleeps() -> None:
    facts = {
        **FACTS,
        "backend": BackendFacts(memory=sending, transports=SHARED, sleeps=("cuda",)),
        "generator": GeneratorFacts(
            memory=lambda ranks, trained: [MemoryTerm("copy", 6 * GIB, woken="weights")],
            transports=SHARED,
            sleeps=("cuda",),
        ),
    }
    plan = planned(Machine(8, gpus=1), facts, gpus={"backend": 1, "generator": 1})
    assert needs(plan)["0 GPU 0"] == 8 + 6, "more than the 8 + 3 of training"


def sending(ranks: int, trained: bool) -> list[MemoryTerm]:
    return [MemoryTerm("weights", 8 * GIB, woken="adapter"), MemoryTerm("moments", 3 * GIB)]


def lending(ranks: int, trained: bool) -> list[MemoryTerm]:
    return [MemoryTerm("weights", 8 * GIB, lent=True), MemoryTerm("moments", 3 * GIB)]


def cache(ranks: int, trained: bool) -> list[MemoryTerm]:
    return [MemoryTerm("cache", 5 * GIB, kept_asleep=False)]


@pytest.mark.parametrize(
    ("transport", "offload", "gpu", "host"),
    [
        ("in-place", "auto", 8 + 5, 3),  # the weights stay, and the cache is more than the moments
        ("in-place", "never", 8 + 3 + 5, None),
        ("shared", "auto", 8 + 3, 8 + 3),
    ],
)
def test_weights_that_a_generator_borrows_stay_on_the_gpu_and_count_once(
    transport: str, offload: str, gpu: int, host: int | None
) -> None:
    facts = {
        **FACTS,
        "backend": BackendFacts(memory=lending, transports=(transport,), sleeps=("cuda",)),
        "generator": GeneratorFacts(memory=cache, transports=(transport,), sleeps=("cuda",)),
    }
    plan = planned(Machine(8, gpus=1), facts, gpus={"backend": 1, "generator": 1}, offload=offload)
    assert needs(plan) == {"0 GPU 0": gpu, **({} if host is None else {"0 the host": host})}


def test_on_gpus_roles_that_do_not_sleep_add_up() -> None:
    plan = planned(TWO, **ON_GPUS, offload="never")
    assert needs(plan) == {"0 GPU 0": 12, "0 GPU 1": 12, "0 the host": 2 * 5}
    refusal, _ = plan.refusals
    assert refusal.startswith(
        "cluster.memory: GPU 0 of this machine has 10.0 GiB of memory, and the plan takes at least 12.0 GiB of it: "
        "6.0 GiB generator: copy, 4.0 GiB backend: weights, 2.0 GiB backend: gradients"
    )
    assert "What helps: copy less; train less; " in refusal


def test_a_share_of_a_gpu_is_taken_whatever_its_size() -> None:
    big = evolve(TWO, gpu_bytes=(80 * GIB, 80 * GIB))
    assert needs(planned(big, **ON_GPUS, offload="never"))["0 GPU 0"] == 6 + 40


def test_a_rank_on_several_gpus_spreads_its_memory_over_them() -> None:
    wide = {**FACTS, "generator": evolve(FACTS["generator"], processes=2)}
    plan = planned(TWO, wide, gpus={"generator": 2}, colocate=[])
    assert needs(plan) == {"0 GPU 0": 5, "0 GPU 1": 5, "0 the host": 12}, "a half of 10 each"


def test_an_engine_on_two_gpus_takes_turns_with_the_ranks_of_the_trainer_there() -> None:
    wide = {**FACTS, "generator": evolve(FACTS["generator"], processes=2)}
    plan = planned(TWO, wide, **ON_GPUS)
    assert plan.turns == (("backend",), ("generator",))
    # Of the backend 12 / 2; of the generator, half of each GPU: 6 / 2 and the cache.
    assert needs(plan) == {"0 GPU 0": 6, "0 GPU 1": 6, "0 the host": 8 + 6}
    assert needs(planned(TWO, wide, **ON_GPUS, offload="never")) == {"0 GPU 0": 11, "0 GPU 1": 11, "0 the host": 2 * 5}


def test_on_a_cluster_processes_that_share_gpus_are_on_one_machine() -> None:
    wide = {**FACTS, "generator": evolve(FACTS["generator"], processes=2)}
    node = Machine(16, 2, 64 * GIB, (40 * GIB, 40 * GIB), given=True)
    shared = {**CLUSTER, "colocate": [["backend", "generator"]], "gpus": {"backend": 4, "generator": 4}}
    plan = planned(evolve(node, others=(node,)), wide, **shared)
    assert plan.refusals == ()
    assert {name for name in needs(plan) if "GPU" in name} == {f"{n} GPU {gpu}" for n in (0, 1) for gpu in (0, 1)}
    (refusal,) = planned(evolve(node, gpus=3, others=(evolve(node, gpus=1),)), wide, **shared).refusals
    assert "room left for rank 2, 3 of backend and rank 1 of generator (2 cores, 2 GPUs)" in refusal


def test_more_than_there_is_is_refused_with_what_takes_most_and_what_to_change() -> None:
    plan = planned(Machine(8, memory_bytes=16 * GIB))
    (refusal,) = plan.refusals
    assert refusal == (
        "cluster.memory: this machine has 16.0 GiB of memory, and the plan takes at least 19.0 GiB of it: "
        "8.0 GiB backend: weights, 6.0 GiB generator: copy, 4.0 GiB backend: gradients, 1.0 GiB the rest. What "
        "helps: copy less; train less; put roles on GPUs (cluster.gpus), a machine with more memory, or a smaller "
        "model. `cluster.memory: ignore` tries it all the same"
    )
    assert planned(Machine(8, memory_bytes=16 * GIB), memory="ignore").refusals == ()
    assert planned(Machine(8, memory_bytes=19 * GIB)).refusals == ()
    assert planned(Machine(8)).refusals == (), "nobody knows what there is"


def test_gpus_that_are_not_here_leave_the_memory_of_this_machine_out_of_it() -> None:
    plan = planned(Machine(8, memory_bytes=GIB), **ON_GPUS)
    assert (plan.memory, plan.refusals) == ((), ())
    assert plan.warnings == ("cluster.gpus: asks for 2 GPUs; this machine has 0",)


CLUSTER = {"launcher": "ray", "address": "10.0.0.1:6379", "colocate": [], "threads": {"backend": 1, "generator": 1}}


def test_on_a_cluster_each_machine_holds_what_lives_there() -> None:
    node = Machine(16, 2, 32 * GIB, (40 * GIB, 40 * GIB), given=True)
    both = evolve(node, others=(evolve(node, gpus=0, gpu_bytes=(), memory_bytes=8 * GIB),))
    plan = planned(both, **CLUSTER, gpus={"backend": 2})
    assert needs(plan) == {"0 GPU 0": 6, "0 GPU 1": 6, "0 the host": 2 * 5, "1 the host": 7}
    spread = planned(evolve(node, others=(node,)), **CLUSTER, gpus={"backend": 2}, placement={"backend": "spread"})
    assert {name for name in needs(spread) if "GPU" in name} == {"0 GPU 0", "1 GPU 0"}


def test_a_cluster_that_nobody_described_is_not_judged() -> None:
    plan = planned(Machine(2, memory_bytes=GIB), **CLUSTER, gpus={"backend": 64})
    assert (plan.memory, plan.refusals, plan.warnings) == ((), (), ())


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        ({"gpus": {"backend": 5}}, "cluster.gpus: asks for 5 GPUs; the 2 given machines have 4"),
        (
            {"gpus": {"backend": 4}, "placement": {"backend": "one-node"}},
            "cluster: no machine of the 2 given machines has room left for rank 0 of backend (1 cores, 1 GPUs)",
        ),
        ({"resources": {"generator": {"sampler": 1}}}, "rank 0 of generator (1 cores, 1 sampler)"),
        ({"threads": {"backend": 9}}, "rank 0 of backend (9 cores)"),
    ],
)
def test_what_no_machine_of_a_cluster_has_room_for_is_told(cluster: dict[str, Any], told: str) -> None:
    node = Machine(8, 2, given=True)
    (refusal,) = planned(evolve(node, others=(node,)), **{**CLUSTER, **cluster}).refusals
    assert told in refusal
