"""Names under which Ray lists a run: with run, role and rank, and never the same twice."""

from whet.runtime.hosts import Host
from whet_ray.places import Names


def test_a_process_that_is_started_again_has_another_name() -> None:
    names = Names("grpo-math")
    host = Host("backend-3", ("backend", "generator"), 1, ())
    assert names.of_process(host) == "whet:grpo-math:backend+generator-3"
    assert names.of_process(host) == "whet:grpo-math:backend+generator-3~2"
    assert names.of_process(Host("critic-0", ("critic",), 1, ())) == "whet:grpo-math:critic-0"


def test_runs_of_one_name_have_namespaces_and_groups_of_their_own() -> None:
    one, other = Names("it"), Names("it")
    host = Host("backend-0", ("backend",), 1, ())
    assert one.namespace != other.namespace
    assert one.of_group(host) != other.of_group(host)
    assert one.of_group(host).startswith("whet:it:backend~")
