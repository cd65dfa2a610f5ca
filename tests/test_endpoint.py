"""Foreign agents in training, with OpenAI's own client, the real generator and backend."""

import asyncio
import importlib.metadata
import json
import threading
from pathlib import Path

import attrs
import numpy as np
import pytest

import whet
from whet.data.files import read_rows
from whet.errors import ConfigError, PluginError
from whet_testing.fakes import FakeModel

openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
pytest.importorskip("whet_endpoint", reason="whet-endpoint is not installed")


@attrs.frozen
class Watched:
    """Rollouts whose batches are kept."""

    rollouts: object
    backend: object
    batches: list

    def take(self, groups):
        batch = self.rollouts.take(groups)
        scored = self.backend.score(batch, ("logprobs",))["logprobs"]
        self.batches.append(batch.with_columns(trainer_logprobs=scored))
        return batch


@pytest.fixture
def play(tmp_path, small_run):
    """Train for two steps on an environment of two turns, and give the batches."""

    def run(environment, *overrides, **settings):
        folder = tmp_path / environment
        folder.mkdir()
        config = small_run(
            folder,
            run={"folder": str(folder / "run"), "steps": 2, "seed": 3, "export": False},
            environments=[{"use": environment, "name": "turns", **settings}],
            plugins=[str(Path(__file__).parent / f"{environment.replace('-', '_')}.py")],
            cluster={"workers": "inline"},
        )
        batches = []
        with whet.open(config, *overrides) as parts:
            rollouts = Watched(parts.rollouts, parts.backend, batches)
            parts.algorithm.run(attrs.evolve(parts, rollouts=rollouts))
        return batches

    return run


def test_a_foreign_agents_episodes_are_those_of_the_environment_that_asks_itself(play):
    foreign, own = play("foreign-turns"), play("two-turns")
    assert len(foreign) == 2
    for one, other in zip(foreign, own, strict=True):
        assert set(one.columns) == set(other.columns)
        for name in one.columns:
            if name in ("sampler_logprobs",):  # what is batched together may round otherwise
                assert np.allclose(one[name], other[name], atol=1e-5)
            else:
                assert np.array_equal(one[name], other[name]), name
        assert set(one["version"][one["loss_mask"]]) == set(other["version"][other["loss_mask"]])
        turns = np.diff(np.concatenate([[0], one["loss_mask"].astype(int)]))
        assert (turns == 1).sum() == 2 * one.sequences, "each sequence has two turns"
    assert foreign[0]["version"].max() == 0
    assert foreign[1]["version"].max() == 1


@pytest.mark.parametrize(
    ("package", "clients"),
    [
        ("openai", ["chat_stream", "responses", "responses_stream"]),
        ("agents", ["agents_sdk", "agents_sdk_stream"]),
        ("langchain_openai", ["langchain"]),
        ("anthropic", ["anthropic"]),
    ],
)
def test_clients_and_agents_of_others_play_unmodified_and_the_engines_tokens_are_recorded(play, package, clients):
    pytest.importorskip(package, reason=f"{package} is not installed: nox -s adapters installs it")
    # Agents of openai-agents fail at a response that its limit cut, so that responses end at one of the usual letters.
    ended = ("rollout.stop=[e, a, i, o, n, r, t, s]", "rollout.max_tokens=200")
    one_step = (f"algorithm.prompts_per_step={len(clients)}", "run.steps=1", *ended)
    (foreign,), (own,) = play("foreign-clients", *one_step, clients=clients), play("two-turns", *one_step)
    for name in ("tokens", "loss_mask", "lengths", "version"):
        assert np.array_equal(foreign[name], own[name]), name
    assert np.allclose(foreign["sampler_logprobs"], own["sampler_logprobs"], atol=1e-5)
    assert foreign.sequences == 2 * len(clients)
    gap = np.abs(foreign["trainer_logprobs"] - foreign["sampler_logprobs"])[foreign["loss_mask"]]
    assert gap.max() < 1e-4


def asking(folder, ask):
    """Wait for the address of a run on a thread, and ask there; give a function for what came of it."""
    result = []

    def wait():
        file, tick = folder / "endpoint.json", threading.Event()
        while not (file.exists() and file.read_text().endswith("\n")):
            tick.wait(0.02)
        address = json.loads(file.read_text())
        with openai.OpenAI(base_url=address["base_url"], api_key=address["api_key"]) as client:
            result.append(ask(client))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()

    def answer():
        thread.join(60)
        return result[0]

    return answer


def test_a_run_can_be_talked_to_while_it_trains(tmp_path, small_run):
    run = {"folder": str(tmp_path / "run"), "steps": 2}
    config = small_run(tmp_path, run=run, cluster={"workers": "inline"}, endpoint={"serve": True})
    said = [{"role": "user", "content": "hello"}]

    def ask(client):
        models = [model.id for model in client.models.list()]
        whole = client.chat.completions.create(
            model="policy", messages=said, temperature=0, logprobs=True, extra_body={"return_token_ids": True}
        )
        parts = client.chat.completions.create(model="policy", messages=said, temperature=0, stream=True)
        streamed = "".join(part.choices[0].delta.content or "" for part in parts)
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="policy", messages=said, tools=[{"type": "function", "function": {}}])
        return models, whole, streamed, caught.value

    with whet.open(config) as parts:
        models, whole, streamed, refused = asking(tmp_path / "run", ask)()
        chat = parts.chat
        parts.algorithm.run(parts)
    (choice,) = whole.choices
    assert models == ["policy"]
    assert choice.message.content == streamed == chat.decode(choice.token_ids)
    assert len(choice.logprobs.content) == len(choice.token_ids)
    assert choice.weight_versions == [[0, 0]]
    assert "tools" in refused.message
    rows = list(read_rows(tmp_path / "run" / "endpoint.jsonl"))
    assert [row["token_ids"] for row in rows] == [choice.token_ids] * 2
    assert rows[0]["prompt_token_ids"] == whole.prompt_token_ids
    assert len(list(read_rows(tmp_path / "run" / "metrics.jsonl"))) == 2
    assert not (tmp_path / "run" / "endpoint.json").exists()


def test_an_endpoint_of_a_run_needs_a_generator(tmp_path, small_run):
    config = small_run(tmp_path, generator=None, endpoint={"serve": True})
    with pytest.raises(ConfigError, match=r"endpoint\.serve: needs a generator"), whet.open(config):
        pass


def test_what_is_missing_is_named_before_anything_starts_and_by_an_episode(tmp_path, small_run, monkeypatch):
    installed = [found for found in importlib.metadata.distributions() if found.name != "whet-endpoint"]
    monkeypatch.setattr("whet.plugins.registry.distributions", lambda: installed)

    async def episode():
        async with FakeModel("yes").endpoint():
            pass

    with pytest.raises(PluginError, match="an endpoint of the model needs a plugin; pip install whet-endpoint"):
        asyncio.run(episode())
    with pytest.raises(ConfigError, match=r"endpoint\.serve: is true; pip install whet-endpoint"):
        whet.run.compose.prepare(small_run(tmp_path, endpoint={"serve": True}), (), config_only=False)


def test_a_client_of_openais_is_told_why_and_does_not_try_again():
    async def run():
        async with FakeModel("yes").endpoint() as address:
            client = openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key)
            said = [{"role": "user", "content": "hello"}]
            answer = await client.chat.completions.create(model=address.model, messages=said, n=2)
            with pytest.raises(openai.NotFoundError, match="policy"):
                await client.chat.completions.create(model="gpt-5", messages=said)
            legacy = await client.completions.create(model=address.model, prompt="hello")
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="wrong").models.list()
            return [choice.message.content for choice in answer.choices], legacy.choices[0].text

    assert asyncio.run(run()) == (["yes", "yes"], "yes")
