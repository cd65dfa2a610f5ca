"""Further models that generate: what they may be, where they run, and how weights reach them."""

import attrs
import pytest
from core.tests.plan.test_plan import FACTS, MODEL, chosen, make_config, plan_of, problems

from whet.component import BackendFacts, EnvironmentFacts, GeneratorFacts, RoleNeed
from whet.config.sections import ClusterSection, ModelSection, RoleSection, RolloutSection
from whet.plan.placement import Machine
from whet.plan.plan import make_plan
from whet.plan.roles import make_roles

JUDGED = {**FACTS, "environments.0": EnvironmentFacts(roles={"judge": RoleNeed(generates=True)})}
SAMPLER = GeneratorFacts(transports=("shared", "shared-memory"))


def role(kind="generators", **keys):
    return {"judge": RoleSection(component=chosen(kind, "some"), **keys)}


def judged(facts=SAMPLER, **keys):
    return problems(make_config(roles=role(**keys)), {**JUDGED, "roles.judge": facts})


def test_a_role_that_writes_responses_must_be_a_generator_and_one_that_computes_a_backend():
    assert judged() == []
    assert problems(make_config(), JUDGED) == [
        "roles.judge: is missing: loop or an environment asks for it, for responses: `use:` a generator"
    ]
    assert judged(BackendFacts(), kind="backends") == [
        "roles.judge: must be a generator: it is to write responses, and some is none; change `use:`"
    ]
    needs = {"judge": RoleNeed(frozenset({"values"}))}
    facts = {**JUDGED, "environments.0": EnvironmentFacts(roles=needs), "roles.judge": SAMPLER}
    assert problems(make_config(roles=role()), facts) == [
        "roles.judge: must be a backend: it computes outputs, and some is none; change `use:`"
    ]


def test_weights_come_only_to_a_generator_with_the_model_of_the_run():
    assert judged(sync_every=3) == []
    (found,) = judged(sync_every=3, model=ModelSection("models/other"))
    assert found == "roles.judge.sync_every: is 3, but the role has a model of its own; remove one of the two"
    scored = {**FACTS, "environments.0": EnvironmentFacts(roles={"judge": RoleNeed()}), "roles.judge": BackendFacts()}
    (found,) = problems(make_config(roles=role("backends", sync_every=3)), scored)
    assert found == "roles.judge.sync_every: is 3, but some is no generator; remove one of the two"


def test_a_generator_that_takes_no_weights_can_be_a_role_unless_it_is_to_get_some():
    assert judged(GeneratorFacts()) == []
    (found,) = judged(GeneratorFacts(), sync_every=3)
    assert found.startswith("roles.judge: no way to hand weights over: the backend offers shared")


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_generating_role_has_its_own_process_unless_it_is_colocated(staleness):
    def processes(**cluster):
        rollout = RolloutSection(max_tokens=32, max_staleness=staleness)
        config = make_config(roles=role(sync_every=2), rollout=rollout, cluster=ClusterSection(**cluster))
        plan, _ = plan_of(config, {**JUDGED, "roles.judge": SAMPLER}, Machine(8))
        return plan.role("judge").processes, plan.role_ways["judge"].transport

    assert processes() == ("judge", "shared-memory")
    assert processes(colocate=[["backend", "judge"]]) == ("backend+judge", "shared")


def test_an_evaluation_alone_needs_no_way_for_weights():

    config, facts = make_config(), {**FACTS, "generator": GeneratorFacts()}
    assert problems(config, facts)[0].startswith("generator: no way to hand weights over")
    plan, found = make_plan(config, MODEL, make_roles(config, facts), Machine(8), trains=False)
    assert not found
    assert plan.way is None


def test_an_algorithm_may_not_ask_for_responses():
    asking = attrs.evolve(FACTS["algorithm"], roles={"judge": RoleNeed(generates=True)})
    (found,) = problems(make_config(roles=role()), {**FACTS, "algorithm": asking, "roles.judge": SAMPLER})
    assert found == "algorithm: asks the role judge for responses, which only an environment can do"
