"""Episodes of a run whose tools break: played again, then dropped and counted, and never scored. The run goes on."""

import asyncio
import os
import sys
from pathlib import Path

import pytest
import yaml
from tool_episodes import FILE, call, made

import whet
from whet.data.files import read_rows
from whet.data.records import Sampling
from whet.rollout.episode import EpisodeFailed
from whet.rollout.recorded import Assignment
from whet.rollout.routing import Route
from whet_start.small_models import make_model
from whet_testing.fakes import ByteChat, FakeGenerator
from whet_testing.playing import make_player
from whet_testing.runs import numbers

FLAKY = """
import os, sys
if os.path.exists({flag!r}):
    sys.exit("the database is gone")
sys.argv = sys.argv[:1]
exec(compile(open({server!r}).read(), {server!r}, "exec"))
"""


def test_an_episode_whose_server_does_not_come_back_is_infrastructure_and_later_ones_play(tmp_path, no_orphans):
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    flag, program = tmp_path / "gone", tmp_path / "flaky.py"
    program.write_text(FLAKY.format(flag=str(flag), server=str(Path(__file__).with_name("mcp_server.py"))))
    environment = made(tmp_path, mcp={"flaky": {"command": [sys.executable, str(program)]}}, turns=2)
    assignment = Assignment(Route("tool-use", environment, "test"), environment.tasks("test")[0], 0, 0)

    def played(text, retries=1):
        def answer(prompt, rng):
            return "x" if "<tool_response>" in prompt else text

        sampling = Sampling(max_tokens=200)
        player = make_player(FakeGenerator(answer), ByteChat(), infrastructure_retries=retries, sampling=sampling)
        return asyncio.run(player.episode(assignment, 0))

    try:
        (shown,) = (text for role, text in played(call("number")).messages if text.startswith("<tool_response>"))
        number = int(shown.split()[1])
        flag.touch()
        os.kill(number, 9)
        with pytest.raises(
            EpisodeFailed, match=r"(?s)the MCP server 'flaky' cannot be started.*the database is gone"
        ) as raised:
            played(call("echo", text="a"))
        assert raised.value.infrastructure
        assert assignment.tally == {"done": 1, "retried": 1, "infrastructure": 1}
        flag.unlink()
        # a server that did not start is not started again at once
        assert played(call("echo", text="a"), retries=6).rewards["calls"] == 1.0
    finally:
        environment.close()


@pytest.mark.slow
def test_a_run_trains_and_evaluates_with_tools_from_yaml_alone(tmp_path, tiny_tokenizer, no_orphans):
    model = make_model(tmp_path / "model", tiny_tokenizer, max_positions=1024)
    (tmp_path / "tasks.jsonl").write_text('{"question": "6*7?", "answer": "42"}\n{"question": "2*2?", "answer": "4"}\n')
    (tmp_path / "corpus.jsonl").write_text('{"text": "steel"}\n')
    tools = {
        "use": "tool-use", "dataset": str(tmp_path / "tasks.jsonl"), "calls_by": "text",
        "functions": [f"{FILE}:slowly"],
        "search": {"corpus": str(tmp_path / "corpus.jsonl")}, "python": {}, "tool_prompt": "{tools}", "turns": 2,
    }  # fmt: skip
    document = {
        "run": {"folder": str(tmp_path / "run"), "steps": 2, "save_every": 0, "export": False},
        "model": {"path": str(model)},
        "algorithm": {"use": "grpo", "prompts_per_step": 2, "group_size": 2},
        "backend": {"use": "fsdp2", "optimizer": {"lr": 1.0e-3}},
        "generator": {"use": "hf"},
        "rollout": {"max_tokens": 8},
        "cluster": {"workers": "inline"},
        "environments": [tools],
        "evaluation": {"every": 2, "environments": [{**tools, "name": "held", "split": "test"}]},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    with whet.open(tmp_path / "run.yaml") as parts:
        parts.algorithm.run(parts)
    assert [row["step"] for row in numbers(tmp_path / "run") if "reward/calls" in row] == [1, 2]
    row = next(iter(read_rows(tmp_path / "run/rollouts/step-000001.jsonl")))
    assert '"name": "search"' in row["messages"][0]["content"]
    assert list((tmp_path / "run/evaluations").iterdir())
