"""Further models: a critic that is trained and saved, a teacher with a model of its own, a judge that rewards."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

import whet
from whet.data.batch import from_sequences
from whet.data.files import read_rows
from whet.data.messages import Message, conversation
from whet.errors import ConfigError
from whet.plan.load import load_config
from whet.plan.prepare import prepare
from whet.rollout.scorer import whole
from whet_start.small_models import make_model


@pytest.fixture
def config(tmp_path, tiny_model_folder, tiny_tokenizer, judge_of):
    teacher = make_model(tmp_path / "teacher", tiny_tokenizer, family="llama", seed=3)
    document = {
        "run": {"folder": str(tmp_path / "run"), "steps": 4, "save_every": 2},
        "model": {"path": str(tiny_model_folder)},
        "algorithm": {"use": "critic-alone"},
        "backend": {"use": "fsdp2", "optimizer": {"lr": 1.0e-3}},
        "roles": {
            "critic": {"like": "backend", "head": "value", "optimizer": {"lr": 2.0e-4}},
            "teacher": {"use": "fsdp2", "model": {"path": str(teacher)}},
            "judge": {"like": "backend", "head": "value", "model": {"path": str(judge_of(tiny_model_folder))}},
        },
        "generator": {"use": "hf"},
        "rollout": {"max_tokens": 4},
        "environments": [{"use": "judged"}],
        "evaluation": {"environments": [{"use": "judged"}]},
        "plugins": [str(Path(__file__).parent / "with_roles.py")],
        "cluster": {"threads": {"backend": 1}},
        "loggers": [],
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def run(config, *overrides):
    with whet.open(config, *overrides) as parts:
        parts.algorithm.run(parts)


@pytest.mark.parametrize("workers", ["inline", "process"])
def test_a_critic_is_trained_saved_and_goes_on_as_it_was(config, tmp_path, workers):
    chosen = [f"cluster.workers={workers}"]
    run(config, *chosen, f"run.folder={tmp_path / 'whole'}")
    run(config, *chosen, "run.steps=2")
    run(config, *chosen)
    rows = [list(read_rows(tmp_path / name / "metrics.jsonl")) for name in ("whole", "run")]
    for name in ("critic/loss", "teacher/gap", "reward/judged"):
        whole, resumed = ([row[name] for row in one if name in row] for one in rows)
        assert whole == resumed, name
    losses = [row["critic/loss"] for row in rows[0] if "critic/loss" in row]
    assert losses[-1] < losses[0]
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*/roles/critic"))) == 2
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*/roles/teacher"))


def test_all_of_them_take_turns_in_memory_and_no_number_changes(config, tmp_path):
    found, given = {}, set()
    for sleep in ("never", "always"):
        chosen = [f"cluster.offload={sleep}", f"run.folder={tmp_path / sleep}", "cluster.workers=inline"]
        run(config, *chosen, "evaluation.every=2")
        rows = list(read_rows(tmp_path / sleep / "metrics.jsonl"))
        given |= {name for row in rows for name in row if name.startswith("given_back_mib/")}
        found[sleep] = [
            {
                name: v
                for name, v in row.items()
                if name != "time" and name not in given and not name.startswith(("seconds/", "memory/"))
            }
            for row in rows
        ]
    assert found["always"] == found["never"]
    assert given == {f"given_back_mib/{role}" for role in ("backend", "critic", "teacher", "generator", "judge")}


def test_a_judge_gives_the_value_of_the_conversation_by_its_own_template(config):
    with whet.open(config, "cluster.workers=inline") as parts:
        batch, judge, chat = parts.rollouts.take(4), parts.roles["judge"], parts.chat
        assert len(np.unique(batch["reward"])) > 1
        ends = np.cumsum(batch["lengths"])
        for i in range(batch.sequences):
            tokens, mask = (batch[name][ends[i] - batch["lengths"][i] : ends[i]] for name in ("tokens", "loss_mask"))
            asked = re.search(r"Say \d\.", chat.decode(tokens[~mask]))[0]
            messages = [Message("user", asked), Message("assistant", chat.decode(tokens[mask]) or " ")]
            scored = whole(chat.training(conversation(messages)).tokens)
            one = from_sequences([scored], prompt_lengths=[len(scored["tokens"]) - 1])
            assert judge.score(one, ("values",))["values"][-1] == pytest.approx(batch["reward"][i], abs=1e-4)


def test_a_role_like_the_backend_takes_over_what_it_does_not_say(config):
    loaded = load_config(config, ["backend.max_grad_norm=0.5", "roles.critic.optimizer.eps=1e-5"])
    critic = loaded.config.roles["critic"].component.config
    assert (critic.optimizer.lr, critic.optimizer.eps, critic.head) == (2e-4, 1e-5, "value")
    assert (critic.max_grad_norm, loaded.config.roles["judge"].component.config.optimizer.lr) == (0.5, 1e-3)
    assert loaded.config.roles["teacher"].component.config.optimizer.lr == 1e-5


def test_what_is_of_the_policy_alone_is_not_taken_over(config, tiny_model_folder):
    held = ["backend.reference=true", f"backend.teacher={tiny_model_folder}"]
    roles = load_config(config, held).config.roles
    assert not any(roles[name].component.config.reference for name in roles)
    assert not any(roles[name].component.config.teacher for name in roles)
    asked = load_config(config, [*held, "roles.critic.reference=true"]).config.roles["critic"]
    assert asked.component.config.reference


def test_an_adapter_is_taken_over_with_the_model_that_it_is_of(config):
    overrides = ["backend.lora={rank: 2, adapter: begin}", "roles.teacher={like: backend}"]

    def adapters(*more):
        roles = load_config(config, [*overrides, *more]).config.roles
        return {
            name: (role.component.config.lora.rank, role.component.config.lora.adapter) for name, role in roles.items()
        }

    assert adapters() == {"critic": (2, "begin"), "teacher": (2, "begin"), "judge": (2, "")}
    assert adapters("roles.judge.lora.adapter=own")["judge"] == (2, "own")
    roles = load_config(config, ["backend.lora=null"]).config.roles
    assert roles["judge"].component.config.lora is None
    overrides[1:] = [
        "backend.use=megatron",
        "backend.load=weights",
        "backend.lora=null",
        "roles.teacher={like: backend}",
    ]
    loads = {n: role.component.config.load for n, role in load_config(config, overrides).config.roles.items()}
    assert loads == {"critic": "weights", "teacher": "weights", "judge": ""}


def test_roles_that_are_missing_unwanted_or_cannot_do_it_are_named(config):
    wrong = [
        (["roles.critic.head=lm"], "roles.critic: must give the model output 'values'; it gives entropy"),
        (["roles.other={like: backend}"], "roles.other: nobody asks for this role; asked for are critic"),
        (["roles={}"], "roles.judge: is missing: critic-alone or an environment asks for it, with the output values"),
        (["roles.teacher.model.path=/nowhere"], "roles.teacher.model.path: there is no folder '/nowhere'"),
        (["cluster.ranks.critics=2"], "there is no such role; there are backend, generator, critic, teacher, judge"),
    ]
    for overrides, message in wrong:
        with pytest.raises(ConfigError) as caught:
            prepare(config, overrides)
        assert message in str(caught.value)


def test_every_role_shares_processes_unless_told(config):
    plan = prepare(config).plan
    assert {role.processes for role in plan.roles} == {"backend+generator+critic+teacher+judge"}
    plan = prepare(config, ["rollout.max_staleness=1"]).plan
    assert plan.role("generator").processes == "generator"
    assert plan.role("critic").processes == "backend+critic+teacher+judge"
    plan = prepare(config, ["cluster.colocate=[[backend, critic]]"]).plan
    assert plan.role("teacher").processes == "teacher"


def test_another_teacher_or_critic_is_another_run(config, tmp_path, tiny_tokenizer):
    run(config, "cluster.workers=inline", "run.steps=1")
    other = make_model(tmp_path / "other", tiny_tokenizer, family="llama", seed=4)
    for changed, where in ((f"roles.teacher.model.path={other}", "teacher"), ("roles.critic.optimizer.lr=1", "critic")):
        with pytest.raises(whet.errors.CheckpointError, match=where):
            run(config, "cluster.workers=inline", changed)
