"""The plan is a pure function of config, model and facts, and refuses whatever it can know."""

import re
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
from attrs import evolve, frozen

from whet.component import (
    AdapterInfo,
    AdvantagesFacts,
    AlgorithmFacts,
    BackendFacts,
    Component,
    EnvironmentFacts,
    Facts,
    FilterFacts,
    GeneratorFacts,
    LossFacts,
    Problem,
    Selection,
)
from whet.config.sections import (
    ClusterSection,
    Config,
    DataFile,
    DataSection,
    EnvironmentSection,
    EvaluationSection,
    ModelSection,
    RolloutSection,
    RunSection,
    SamplingSection,
    WeightSyncSection,
    selection,
)
from whet.data.model_info import ModelInfo
from whet.errors import PluginError
from whet.plan.placement import Machine
from whet.plan.plan import Plan, facts_of, gather_facts, make_plan
from whet.plan.roles import make_roles, selections

MODEL = ModelInfo("models/x", {"max_position_embeddings": 128, "vocab_size": 10})


@frozen
class Plain:
    """A component without settings."""


@frozen
class Looped:
    """An algorithm with a loss inside."""

    loss: Selection = selection("losses")
    """The loss."""


@frozen
class Holding:
    """A backend that may hold the reference."""

    reference: bool = False
    """Whether it does."""


@frozen
class Naming:
    """A backend that is told where the reference is."""

    reference: str = ""
    """A folder."""


def chosen(kind: Any, name: str, config: object = None) -> Selection:
    return Selection(kind, Component(name, type(config or Plain()), "x:Y"), config or Plain())


def make_config(**changes: Any) -> Config:
    parts = {
        "run": RunSection("runs/x", 10),
        "model": ModelSection("models/x"),
        "algorithm": chosen("algorithms", "loop", Looped(loss=chosen("losses", "pg"))),
        "backend": chosen("backends", "trainer"),
        "generator": chosen("generators", "sampler"),
        "environments": [EnvironmentSection(component=chosen("environments", "sums"))],
        "rollout": RolloutSection(max_tokens=32),
    }
    return Config(**{**parts, **changes})


FACTS = {
    "algorithm": AlgorithmFacts(
        inputs=frozenset({"rollouts"}), columns_written=frozenset({"advantages"}), group_size=4
    ),
    "algorithm.loss": LossFacts(outputs_needed=frozenset({"logprobs"}), columns_read=frozenset({"advantages"})),
    "backend": BackendFacts(outputs_given=frozenset({"logprobs"}), transports=("shared", "shared-memory", "disk")),
    "generator": GeneratorFacts(transports=("shared", "shared-memory", "disk")),
}


def plan_of(config: Config, facts: Mapping[str, Facts], machine: Machine) -> tuple[Plan | None, list[Problem]]:
    return make_plan(config, MODEL, make_roles(config, facts), machine)


def problems(config: Config, facts: dict[str, Facts] = FACTS) -> list[str]:
    plan, found = plan_of(config, facts, Machine(8))
    assert (plan is None) == bool(found)
    return [str(problem) for problem in found]


def test_a_sound_config_gives_a_plan_that_can_be_read():
    plan, found = plan_of(make_config(), FACTS, Machine(8))
    assert not found
    assert (plan.way.transport, plan.feeds_on, plan.max_context) == ("shared", "rollouts", 128)
    assert plan.role("backend").threads == 8
    assert plan.role("backend").processes == plan.role("generator").processes == "backend+generator"
    assert "backend: trainer, 1 rank x 8 threads on cpu" in plan.describe()
    assert plan.to_dict()["roles"][0]["role"] == "backend"


def test_stale_rollouts_set_the_roles_apart_and_share_the_cores_out():
    config = make_config(rollout=RolloutSection(max_tokens=32, max_staleness=1))
    plan, _ = plan_of(config, FACTS, Machine(8))
    assert plan.role("backend").processes != plan.role("generator").processes
    assert (plan.role("backend").threads, plan.role("generator").threads) == (4, 4)
    assert plan.way.transport == "shared-memory"


def test_roles_of_different_pythons_are_apart_and_sync_weights_by_memory_that_they_share():
    plan, found = plan_of(make_config(cluster=ClusterSection(python={"generator": "x"})), FACTS, Machine(8))
    assert not found
    assert plan.role("backend").processes != plan.role("generator").processes
    assert plan.way.transport == "shared-memory"
    assert plan.role("backend").threads == plan.role("generator").threads == 8, "they take turns"
    assert "in processes 'generator' of the Python 'x'" in plan.describe()
    both = ClusterSection(python={"generator": "x", "backend": "x"})
    plan, _ = plan_of(make_config(cluster=both), FACTS, Machine(8))
    assert plan.way.transport == "shared"


def test_a_path_to_a_python_does_not_depend_on_where_it_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    section = ClusterSection(python={"a": "vllm", "b": "./venv/bin/python", "c": "~/venv", "d": "/opt/venv"})
    assert list(section.python.values()) == ["vllm", f"{tmp_path}/venv/bin/python", "/home/me/venv", "/opt/venv"]


def test_several_ranks_do_not_sync_weights_by_reference():
    config = make_config(cluster=ClusterSection(ranks={"backend": 2, "generator": 2}))
    plan, _ = plan_of(config, FACTS, Machine(8))
    assert plan.way.transport == "shared-memory"
    assert plan.role("backend").threads == 4


def test_gpus_apart_are_numbered_one_after_the_other():
    config = make_config(cluster=ClusterSection(gpus={"backend": 2, "generator": 2}, colocate=[]))
    plan, found = plan_of(config, FACTS, Machine(8, gpus=4))
    assert not found
    assert plan.role("backend").devices == ("cuda:0", "cuda:1")
    assert plan.role("generator").devices == ("cuda:2", "cuda:3")


@pytest.mark.parametrize(
    ("cluster", "transport"),
    [
        ({"ranks": {"backend": 2, "generator": 2}}, "in-place"),
        ({}, "in-place"),
        ({"ranks": {"backend": 2, "generator": 1}}, "disk"),
        ({"ranks": {"backend": 2, "generator": 2}, "colocate": []}, "disk"),
    ],
    ids=str,
)
def test_weights_stay_in_place_where_equally_many_ranks_share_processes(cluster, transport):
    ends = ("in-place", "disk")
    facts = {
        **FACTS,
        "backend": evolve(FACTS["backend"], transports=ends),
        "generator": GeneratorFacts(transports=ends),
    }
    plan, found = plan_of(make_config(cluster=ClusterSection(**cluster)), facts, Machine(8))
    assert not found
    assert plan.way.transport == transport


LENDING = BackendFacts(outputs_given=frozenset({"logprobs"}), transports=("in-place", "disk"), in_place="whole")
BORROWING = GeneratorFacts(transports=("in-place",), in_place="whole")


@pytest.mark.parametrize(
    ("backend", "generator", "cluster", "words"),
    [
        (FACTS["backend"], {}, {}, "in the form whole, and the backend trainer lends none; choose another backend"),
        (evolve(LENDING, in_place="cut"), {}, {}, "and the backend trainer lends them in the form cut"),
        (LENDING, {}, {"colocate": []}, "put both into one group of cluster.colocate"),
        (LENDING, {}, {"ranks": {"backend": 2}}, "the backend has 2 and the generator 1"),
        (LENDING, {}, {"gpus": {"backend": 1, "generator": 0}}, "on the same devices"),
        (LENDING, {}, {"gpus": {"backend": 4, "generator": 2}, "ranks": {"generator": 4}}, "on the same devices"),
        (LENDING, {}, {"python": {"generator": "x"}}, "one Python, or have the generator hold weights of its own"),
    ],
    ids=["lends none", "another form", "apart", "ranks", "devices", "fewer devices", "pythons"],
)
def test_a_generator_that_only_computes_in_place_is_refused_where_it_cannot(backend, generator, cluster, words):
    facts = {**FACTS, "backend": backend, "generator": evolve(BORROWING, **generator)}
    _, found = plan_of(make_config(cluster=ClusterSection(**cluster)), facts, Machine(8, gpus=1))
    assert [problem.path for problem in found] == ["generator"]
    assert words in found[0].message
    plan, found = plan_of(make_config(), {**facts, "backend": LENDING}, Machine(8))
    assert (plan.way.transport, found) == ("in-place", [])


def test_an_adapter_is_not_merged_into_weights_that_are_the_backends_own():
    lending = evolve(LENDING, adapter=AdapterInfo(rank=4, alpha=4.0))
    plan, found = plan_of(make_config(), {**FACTS, "backend": lending, "generator": BORROWING}, Machine(8))
    assert not found
    assert plan.way.adapter is None
    assert plan.way.reason.endswith("in the same processes; the adapter is beside them")


def test_weights_of_two_forms_travel_another_way():
    facts = {**FACTS, "backend": LENDING, "generator": GeneratorFacts(transports=("in-place", "disk"), in_place="cut")}
    plan, found = plan_of(make_config(), facts, Machine(8))
    assert not found
    assert plan.way.transport == "disk"


ALL = ("shared", "cuda-ipc", "broadcast", "shared-memory", "disk")
ENGINE = {
    **FACTS,
    "backend": evolve(FACTS["backend"], transports=ALL),
    "generator": GeneratorFacts(transports=ALL[1:], processes=2),
}


@pytest.mark.parametrize(
    ("cluster", "processes", "way"),
    [
        ({"gpus": {"backend": 2, "generator": 4}, "colocate": []}, 2, ("broadcast", 1, 4)),
        ({"gpus": {"backend": 2, "generator": 2}}, 1, ("cuda-ipc", 2, 1)),
        ({"gpus": {"backend": 2, "generator": 1}}, 1, ("shared-memory", 1, 1)),
        ({"gpus": {"backend": 4, "generator": 4}}, 2, ("cuda-ipc", 4, 1)),
        ({"gpus": {"backend": 4, "generator": 2}}, 2, ("shared-memory", 1, 1)),
        ({"gpus": {"backend": 4, "generator": 4}, "ranks": {"generator": 4}}, 2, ("shared-memory", 1, 1)),
        ({"gpus": {"generator": 4}, "colocate": []}, 2, ("shared-memory", 1, 1)),
        (
            {"gpus": {"backend": 4, "generator": 2}, "ranks": {"generator": 4}, "colocate": []},
            1,
            ("shared-memory", 1, 1),
        ),
        ({"colocate": [], "transport": "broadcast", "ranks": {"generator": 3}}, 1, ("broadcast", 1, 3)),
        (
            {"gpus": {"backend": 2, "generator": 4}, "colocate": [], "transport": "shared-memory"},
            2,
            ("shared-memory", 1, 1),
        ),
    ],
    ids=str,
)
def test_between_gpus_weights_stay_on_gpus(cluster, processes, way):
    facts = {**ENGINE, "generator": evolve(ENGINE["generator"], processes=processes)}
    plan, found = plan_of(make_config(cluster=ClusterSection(**cluster)), facts, Machine(8, gpus=8))
    assert not found
    assert (plan.way.transport, plan.way.senders, plan.way.receivers) == way


def test_ranks_that_train_do_not_share_a_gpu():
    cluster = ClusterSection(gpus={"backend": 4, "generator": 0}, ranks={"backend": 8})
    _, (problem,) = plan_of(make_config(cluster=cluster), ENGINE, Machine(8, gpus=8))
    assert str(problem).startswith("cluster.ranks.backend: is 8, and ranks that train need a GPU each: cluster.gpus.")


def test_a_role_is_not_left_on_the_cpu_beside_roles_with_gpus_by_oversight():
    _, (problem,) = plan_of(make_config(cluster=ClusterSection(gpus={"backend": 4})), ENGINE, Machine(8, gpus=8))
    assert str(problem).startswith("cluster.gpus.generator: is missing, and generator shares the devices of backend")
    config = make_config(cluster=ClusterSection(gpus={"generator": 2}))
    roles = make_roles(config, ENGINE)
    assert make_plan(config, MODEL, roles, Machine(8, gpus=8), trains=False)[1] == [], "it starts no backend"


@pytest.mark.parametrize(
    ("transport", "way"), [("broadcast", ("broadcast", 4, 6)), ("shared-memory", ("shared-memory", 4, 1))]
)
def test_as_many_ranks_send_as_the_facts_of_the_backend_say(transport, way):
    facts = {**ENGINE, "backend": evolve(ENGINE["backend"], senders=4)}
    cluster = ClusterSection(colocate=[], transport=transport, ranks={"backend": 8, "generator": 3})
    plan, found = plan_of(make_config(cluster=cluster), facts, Machine(8))
    assert not found
    assert (plan.way.transport, plan.way.senders, plan.way.receivers) == way


@pytest.mark.parametrize(
    ("content", "kinds", "applies", "cluster", "alone", "words"),
    [
        ("auto", ("linear",), {"linear"}, {}, True, "the adapter alone, which .* applies"),
        ("auto", ("linear", "experts"), {"linear"}, {}, False, "merged into them, as .* applies no adapter of experts"),
        ("auto", ("linear",), {"linear"}, {"transport": "broadcast"}, False, "merged .* broadcast carries all weights"),
        ("merged", ("linear",), {"linear"}, {}, False, "merged into them, as weight_sync.content says"),
        ("adapter", ("linear",), set(), {}, None, "weight_sync.content is adapter, but .* no adapter of linear"),
        ("adapter", None, {"linear"}, {}, None, "weight_sync.content is adapter, but the backend trains none"),
        ("auto", None, {"linear"}, {}, False, "process$"),
    ],
)  # fmt: skip
def test_an_adapter_travels_alone_where_the_generator_applies_it(content, kinds, applies, cluster, alone, words):
    adapter = AdapterInfo(8, 16.0, kinds=kinds) if kinds else None
    ways = ("shared", "broadcast", "shared-memory")
    facts = {
        **FACTS,
        "backend": attrs.evolve(FACTS["backend"], adapter=adapter, transports=ways),
        "generator": attrs.evolve(FACTS["generator"], adapters=frozenset(applies), transports=ways),
    }
    apart = {"colocate": [], **cluster} if cluster else {}
    config = make_config(cluster=ClusterSection(**apart), weight_sync=WeightSyncSection(content=content))
    plan, found = plan_of(config, facts, Machine(2))
    if alone is None:
        assert re.search(words, str(found[0]))
    else:
        assert plan.way.adapter == (adapter if alone else None)
        assert re.search(words, plan.way.reason)


def test_a_rank_that_spreads_over_two_gpus_is_given_both():
    cluster = ClusterSection(gpus={"backend": 2, "generator": 4}, colocate=[])
    plan, _ = plan_of(make_config(cluster=cluster), ENGINE, Machine(8, gpus=6))
    assert plan.role("backend").devices == ("cuda:0", "cuda:1")
    assert plan.role("generator").devices == ("cuda:2,3", "cuda:4,5")


def test_engines_on_several_gpus_share_those_of_the_trainer_s_ranks_in_processes_of_their_own():
    cluster = ClusterSection(gpus={"backend": 4, "generator": 4})
    plan, found = plan_of(make_config(cluster=cluster), ENGINE, Machine(8, gpus=4))
    assert not found
    backend, generator = plan.role("backend"), plan.role("generator")
    assert backend.devices == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert (generator.ranks, generator.devices) == (2, ("cuda:0,1", "cuda:2,3"))
    assert (backend.processes, generator.processes) == ("backend", "generator")
    assert not plan.warnings, "they take 4 GPUs, not 8"


def test_roles_of_different_pythons_may_share_gpus_but_no_process():
    shared = {"colocate": [["backend", "generator"]], "python": {"generator": "x"}}
    cluster = ClusterSection(gpus={"backend": 2, "generator": 2}, **shared)
    facts = {**ENGINE, "generator": evolve(ENGINE["generator"], processes=1)}
    plan, found = plan_of(make_config(cluster=cluster), facts, Machine(8, gpus=2))
    assert not found
    assert plan.role("backend").devices == plan.role("generator").devices == ("cuda:0", "cuda:1")
    assert plan.role("backend").processes != plan.role("generator").processes
    assert plan.way.transport == "cuda-ipc"
    plan, found = plan_of(make_config(cluster=ClusterSection(**shared)), FACTS, Machine(8))
    assert (found, plan.way.transport) == ([], "shared-memory"), "on a CPU they share no process either"


def test_gpus_of_ranks_that_overlap_without_fitting_into_each_other_are_refused():
    facts = {**ENGINE, "backend": evolve(ENGINE["backend"], processes=2)}
    facts["generator"] = evolve(ENGINE["generator"], processes=3)
    config = make_config(cluster=ClusterSection(gpus={"backend": 6, "generator": 6}))
    _, found = plan_of(config, facts, Machine(8, gpus=6))
    wanted = "wanted numbers of which the smaller divide the larger"
    (problem,) = map(str, found)
    assert problem == f"cluster.colocate: of roles that share GPUs, a rank takes backend 2, generator 3; {wanted}"


@pytest.mark.parametrize(
    ("cluster", "complaint"),
    [
        ({"gpus": {"generator": 3}, "colocate": []}, "cluster.gpus.generator: is 3, and a rank takes 2"),
        ({"transport": "broadcast"}, "cluster.transport: broadcast is no way .* `broadcast` processes of their own"),
        ({"transport": "cuda-ipc", "colocate": []}, "cluster.transport: cuda-ipc is no way to hand weights over"),
    ],
    ids=str,
)
def test_gpus_that_cannot_be_dealt_out_and_ways_that_lead_nowhere_are_refused(cluster, complaint):
    plan, found = plan_of(make_config(cluster=ClusterSection(**cluster)), ENGINE, Machine(8, gpus=8))
    assert plan is None
    assert any(re.match(complaint, str(problem)) for problem in found), found


def test_facts_are_asked_of_every_component_at_any_depth():
    paths = [path for path, _ in selections(make_config())]
    assert paths == ["algorithm", "algorithm.loss", "backend", "generator", "environments.0"]
    assert set(gather_facts(make_config(), MODEL)) == set(paths)


def test_facts_that_fail_name_their_component(tmp_path):
    (tmp_path / "own.py").write_text("def facts(config, model): return config.missing")
    component = Component("clip", Plain, "x:Y", f"file:{tmp_path / 'own.py'}:facts")
    words = r"the facts of the loss 'clip' cannot be computed: AttributeError: .*own.py:1"
    with pytest.raises(PluginError, match=words):
        facts_of(Selection("losses", component, Plain()), MODEL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environments": []}, "environments: loop is fed by rollouts and there is no environment"),
        ({"generator": None}, "generator: loop is fed by rollouts and there is no generator"),
        ({"data": DataSection([DataFile("a.jsonl")])}, "data: loop is fed by rollouts and reads no data files"),
        ({"rollout": RolloutSection(max_tokens=128)}, "rollout.max_tokens: is 128, which leaves no room"),
        ({"rollout": RolloutSection(max_tokens=8, max_context=256)}, "rollout.max_context: is 256, but the model's"),
        ({"cluster": ClusterSection(ranks={"bakcend": 2})}, "cluster.ranks.bakcend: there is no such role"),
        ({"cluster": ClusterSection(colocate=[["backend", "x"]])}, "cluster.colocate.0: names the role 'x'"),
        (
            {"cluster": ClusterSection(workers="inline", ranks={"backend": 2})},
            "cluster.ranks: inline workers are one rank each",
        ),
        (
            {"cluster": ClusterSection(workers="inline", gpus={"backend": 2})},
            "cluster.ranks: inline workers are one rank each",
        ),
        (
            {"cluster": ClusterSection(python={"generator": "vllm"}, workers="inline")},
            "cluster.python.generator: inline workers live in the driver",
        ),
        ({"cluster": ClusterSection(python={"genarator": "x"})}, "cluster.python.genarator: there is no such role"),
        (
            {"cluster": ClusterSection(colocate=[["backend"], ["generator", "backend"]])},
            "cluster.colocate: names backend more than once",
        ),
        (
            {
                "environments": [
                    EnvironmentSection(component=chosen("environments", "sums"), weight_schedule={0: 1, 9: 0})
                ]
            },
            "environments: none has a weight above 0 after step 9",
        ),
        (
            {
                "environments": [
                    EnvironmentSection(component=chosen("environments", "sums")),
                    EnvironmentSection(component=chosen("environments", "sums"), name="seconds"),
                ]
            },
            "environments.1.name: is seconds, with which other metrics begin",
        ),
        (
            {"environments": [EnvironmentSection(component=chosen("environments", "sums"))] * 2},
            "environments.1.name: there are two environments named 'sums'",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_path_and_reason(changes, message):
    assert any(found.startswith(message) for found in problems(make_config(**changes)))


def test_evaluation_needs_a_generator():
    facts = {**FACTS, "algorithm": AlgorithmFacts(inputs=frozenset({"data"}))}
    evaluation = EvaluationSection([EnvironmentSection(component=chosen("environments", "sums"))])
    config = make_config(
        environments=[], generator=None, data=DataSection([DataFile("a.jsonl")]), evaluation=evaluation
    )
    assert "generator: evaluation needs a generator; choose one by `use:`" in problems(config, facts)


@pytest.mark.parametrize(("max_length", "longest"), [(96, 96), (0, 128)])
def test_of_an_algorithm_that_trains_on_data_the_longest_sequence_is_that_of_its_data(max_length, longest):
    facts = {**FACTS, "algorithm": attrs.evolve(FACTS["algorithm"], inputs=frozenset({"data"}))}
    config = make_config(
        environments=[], data=DataSection([DataFile("a.jsonl")], max_length=max_length),
        rollout=RolloutSection(max_tokens=32, max_context=64),
    )  # fmt: skip
    plan, found = plan_of(config, facts, Machine(8))
    assert plan is not None, found
    assert f"longest sequence: {longest} tokens" in plan.describe()
    assert plan.max_context == 64, "what evaluation generates"


def test_what_several_components_note_is_told_once():
    facts = {**FACTS, **{name: attrs.evolve(FACTS[name], notes=("so it is",)) for name in ("backend", "generator")}}
    plan, _ = plan_of(make_config(), facts, Machine(8))
    assert plan.notes == ("so it is",)


def evaluating(*entries: dict[str, Any], **section: Any) -> Config:
    parts = [EnvironmentSection(component=chosen("environments", f"e{i}"), **entry) for i, entry in enumerate(entries)]
    return make_config(evaluation=EvaluationSection(parts, **section))


def test_figures_of_an_evaluation_need_as_many_samples() -> None:
    found = problems(evaluating({"samples": 4}, {"samples": 2}, {"pass_at": [1]}, pass_at=[1, 4]))
    wanted = "evaluation.environments.1.samples: is 2, too few for pass@4 of evaluation.pass_at; raise it, or give this"
    assert found == [f"{wanted} environment its own pass_at"]
    found = problems(evaluating({"samples": 4, "majority_at": [8]}))
    assert [line.split(";")[0] for line in found] == [
        "evaluation.environments.0.samples: is 4, too few for maj@8 of evaluation.environments.0.majority_at"
    ]
    assert not problems(evaluating({"samples": 4, "majority_at": []}, {"samples": 8}, majority_at=[8]))


def test_who_votes_matters_only_where_there_are_votes() -> None:
    (found,) = problems(evaluating({"samples": 4}, unanswered="vote"))
    assert found.startswith("evaluation.unanswered: has no effect without a majority vote")
    assert not problems(evaluating({"samples": 4}, majority_at=[4], unanswered="vote"))


def test_votes_of_subsets_of_too_many_samples_are_refused() -> None:
    (found,) = problems(evaluating({"samples": 1000}, majority_at=[4, 1000]))
    assert found.startswith("evaluation.environments.0.majority_at: asks for votes of fewer than all 1000 samples")
    assert not problems(evaluating({"samples": 1000}, majority_at=[1000], pass_at=[500]))


def test_votes_in_an_environment_that_states_no_answers_are_refused() -> None:
    config, place = evaluating({"samples": 4, "name": "chat"}, majority_at=[4]), "evaluation.environments.0"
    (found,) = problems(config, {**FACTS, place: EnvironmentFacts(states_answers=False)})
    assert found.startswith(f"{place}.majority_at: the environment 'chat' does not say what an answer is")
    for known in (True, None):
        assert not problems(config, {**FACTS, place: EnvironmentFacts(states_answers=known)})
    assert not problems(evaluating({"samples": 4}), {**FACTS, place: EnvironmentFacts(states_answers=False)})


@pytest.mark.parametrize("key", ["pass_at", "majority_at"])
def test_what_is_of_evaluation_is_refused_in_training(key: str) -> None:
    section = EnvironmentSection(component=chosen("environments", "sums"), **{key: [1]})
    wanted = f"environments.0.{key}: is of evaluation; move it to evaluation.environments"
    assert problems(make_config(environments=[section])) == [wanted]


def test_a_loss_gets_only_outputs_and_columns_that_are_there():
    loss = LossFacts(outputs_needed=frozenset({"values"}), columns_read=frozenset({"returns"}))
    found = problems(make_config(), {**FACTS, "algorithm.loss": loss})
    assert any("needs the model output 'values'" in line for line in found)
    assert any("reads the column 'returns'" in line for line in found)


def test_splits_that_the_facts_do_not_name_are_refused():
    entry = EnvironmentSection(component=chosen("environments", "sums"))
    other = attrs.evolve(entry, name="others", split="dev")
    config = make_config(environments=[entry], evaluation=EvaluationSection([entry, other]))
    paths = ["environments.0", "evaluation.environments.0", "evaluation.environments.1"]

    def found(*splits: str) -> list[str]:
        return problems(config, {**FACTS, **dict.fromkeys(paths, EnvironmentFacts(splits=splits or None))})

    assert not found()
    assert not found("train", "test", "dev")
    assert found("train", "dev") == ["evaluation.environments.0.split: there is no split 'test'; there are train, dev"]
    assert [problem.partition(":")[0] for problem in found("test")] == ["environments.0.split", f"{paths[2]}.split"]


@pytest.mark.parametrize(
    ("by", "kind"), [("algorithm.filters.0", FilterFacts), ("algorithm.advantages", AdvantagesFacts)]
)
def test_samples_of_an_environment_that_cannot_differ_are_refused(by, kind):
    entry = EnvironmentSection(
        component=chosen("environments", "sums"), sampling=SamplingSection(temperature=0.0), group_size=1
    )
    config = make_config(environments=[entry], evaluation=EvaluationSection([attrs.evolve(entry, group_size=2)]))
    found = problems(config, {**FACTS, by: kind(least_group_size=2)})
    assert found == [
        "environments.0.sampling.temperature: is 0, so all samples would be equal; wanted more than 0",
        f"environments.0.group_size: is 1, and {by} compares at least 2",
        "evaluation.environments.0.group_size: is of training; state `samples`",
    ]


def test_keys_of_an_environment_that_its_section_does_not_read_are_refused():
    entry = EnvironmentSection(component=chosen("environments", "sums"))
    training = attrs.evolve(entry, limit=3, samples=2)
    evaluated = attrs.evolve(entry, weight=2.0, weight_schedule={0: 1.0})
    found = problems(make_config(environments=[training], evaluation=EvaluationSection([evaluated])), FACTS)
    paths = [problem.partition(":")[0] for problem in found]
    first, second = "environments.0", "evaluation.environments.0"
    assert paths == [f"{first}.limit", f"{first}.samples", f"{second}.weight", f"{second}.weight_schedule"]


def test_responses_that_leave_no_room_for_a_prompt_are_refused_in_each_environment():
    entry = EnvironmentSection(component=chosen("environments", "sums"), sampling=SamplingSection(max_tokens=4096))
    found = problems(make_config(environments=[entry], evaluation=EvaluationSection([entry])), FACTS)
    assert [problem.partition(":")[0] for problem in found] == [
        "environments.0.sampling.max_tokens", "evaluation.environments.0.sampling.max_tokens"
    ]  # fmt: skip


def test_transports_that_do_not_meet_are_refused_with_both_sides_named():
    found = problems(make_config(), {**FACTS, "generator": GeneratorFacts(transports=("carrier-pigeon",))})
    assert any("generator" in line and "carrier-pigeon" in line for line in found)


def test_all_problems_are_reported_at_once():
    config = make_config(
        environments=[], rollout=RolloutSection(max_tokens=500), cluster=ClusterSection(ranks={"nobody": 1})
    )
    assert len(problems(config)) == 3


def test_the_plan_does_not_change_the_config():
    config = make_config()
    before = attrs.asdict(config, recurse=False)
    plan_of(config, FACTS, Machine(2))
    assert attrs.asdict(config, recurse=False) == before


def test_what_the_generator_cannot_do_with_requests_under_way_is_refused():
    rollout = RolloutSection(max_tokens=32, max_staleness=1, on_weight_update="continue")
    assert problems(make_config(rollout=rollout)) == [
        "rollout.on_weight_update: is continue; of the generator sampler it can be drain"
    ]
    assert problems(make_config(rollout=attrs.evolve(rollout, max_staleness=0))) == []
    able = {**FACTS, "generator": attrs.evolve(FACTS["generator"], on_weight_update=("drain", "continue"))}
    assert problems(make_config(rollout=rollout), able) == []


def test_weights_cannot_be_kept_up_to_date_by_a_process_that_is_busy_with_the_request():
    able = {**FACTS, "generator": attrs.evolve(FACTS["generator"], on_weight_update=("drain", "continue"))}
    config = make_config(
        rollout=RolloutSection(max_tokens=32, max_staleness=1, on_weight_update="continue"),
        cluster=ClusterSection(colocate=[["backend", "generator"]]),
    )
    (problem,) = problems(config, able)
    assert "take turns in one process" in problem
    assert problems(attrs.evolve(config, cluster=ClusterSection(workers="inline")), able) == []


def test_an_order_that_cannot_differ_is_noted():
    config = make_config(rollout=RolloutSection(max_tokens=32, max_staleness=1, order="as_completed"))
    plan, _ = plan_of(config, FACTS, Machine(8))
    assert "below a rollout.max_staleness of 2" in plan.describe()


def test_what_a_run_in_this_process_has_no_use_for_is_noted():
    config = make_config(
        rollout=RolloutSection(max_tokens=32, max_staleness=1),
        cluster=ClusterSection(launcher="ray", workers="inline"),
    )
    plan, _ = plan_of(config, FACTS, Machine(8))
    assert plan.notes == (
        "generation does not overlap training: cluster.workers: inline keeps all in this process",
        "cluster.launcher: ray is not used, as cluster.workers is inline",
    )
    assert "in processes" not in plan.describe()


JOINED = {"launcher": "ray", "address": "10.0.0.1:6379"}


@pytest.mark.parametrize(
    ("cluster", "transport", "reason"),
    [
        ({"launcher": "ray", "colocate": []}, "shared-memory", "on one machine"),
        ({**JOINED, "colocate": []}, "shared-memory", "on nodes that the launcher will choose"),
        (JOINED, "shared", "in one process"),
        ({**JOINED, "ranks": {"backend": 2}}, "shared-memory", "on nodes that the launcher will choose"),
        ({**JOINED, "ranks": {"backend": 2}, "placement": {"backend": "one-node"}}, "shared-memory", "on one machine"),
        (
            {**JOINED, "colocate": [], "placement": {"backend": "one-node"}},
            "shared-memory",
            "on nodes that the launcher will choose",
        ),
        ({**JOINED, "colocate": [], "workers": "inline"}, "shared", "in one process"),
    ],
    ids=str,
)
def test_how_weights_travel_follows_from_where_the_roles_can_be(cluster, transport, reason):
    plan, found = plan_of(make_config(cluster=ClusterSection(**cluster)), FACTS, Machine(8))
    assert not found
    assert plan.way.transport == transport
    assert f"by {transport}, as they are {reason}" in plan.describe()


def test_what_the_nodes_of_a_cluster_have_is_not_known_here():
    cluster = ClusterSection(**JOINED, gpus={"backend": 16}, colocate=[])
    plan, found = plan_of(make_config(cluster=cluster), FACTS, Machine(8))
    assert not found
    assert (plan.role("backend").ranks, plan.role("backend").threads) == (16, 1)


@pytest.mark.parametrize(
    ("cluster", "problem"),
    [
        ({"address": "10.0.0.1:6379"}, "cluster.address: is for a cluster to join, and cluster.launcher is local"),
        ({"launcher": "ray", "resources": {"backend": {"a100": 1}}}, "cluster.resources: there is one node alone"),
        (
            {**JOINED, "resources": {"backend": {"GPU": 1}}},
            "cluster.resources.backend.GPU: is 1, wanted a number",
        ),
        ({**JOINED, "placement": {"critic": "pack"}}, "cluster.placement.critic: there is no such role"),
        (
            {**JOINED, "placement": {"backend": "pack", "generator": "spread"}},
            "cluster.placement: differs between backend and generator, which share their devices",
        ),
    ],
    ids=str,
)
def test_what_a_cluster_cannot_do_is_refused(cluster, problem):
    (found,) = problems(make_config(cluster=ClusterSection(**cluster)))
    assert found.startswith(problem)


def test_weights_that_the_backend_does_not_hold_are_refused():
    facts = {**FACTS, "algorithm": attrs.evolve(FACTS["algorithm"], weights_needed=frozenset({"reference"}))}
    words = "loop scores with the weights 'reference', and the backend trainer holds no such copy"
    assert problems(make_config(), facts) == [
        f"backend: {words} and has no key 'reference' for one; choose another backend"
    ]
    for held, advice in (Holding(), "set it to true"), (Naming(), "set it"):
        changed = make_config(backend=chosen("backends", "trainer", held))
        assert problems(changed, facts) == [f"backend.reference: {words}; {advice}"]
    facts["backend"] = attrs.evolve(FACTS["backend"], weights_given=frozenset({"policy", "reference"}))
    assert not problems(make_config(), facts)


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        ({"gpus": {"backend": 1, "generator": 0}}, "cluster.gpus: asks for 1 GPUs; this machine has 0"),
        (
            {"gpus": {"backend": 3, "generator": 2}, "colocate": [["backend"]]},
            "cluster.gpus: asks for 5 GPUs; this machine has 0",
        ),
    ],
)
def test_gpus_that_this_machine_lacks_are_a_warning_and_those_that_a_given_one_lacks_a_refusal(cluster, told):
    config = make_config(cluster=ClusterSection(**cluster))
    plan, found = plan_of(config, FACTS, Machine(8))
    assert (found, plan.warnings, plan.refusals) == ([], (told,), ())
    assert plan.role("backend").devices[0] == "cuda:0", "the plan is there all the same"
    plan, found = plan_of(config, FACTS, Machine(8, given=True))
    assert (found, plan.warnings) == ([], ())
    assert plan.refusals == (told.replace("this machine", "the given machine"),)
