"""Reward models on the real backend: the same numbers however a batch is cut, pairs that are learned, and a policy that
learns from what came of it.
"""

import json
import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from whet.component import Spec
from whet.data.batch import Batch, concatenate, from_sequences
from whet.data.files import read_rows
from whet.data.messages import conversation
from whet.errors import ConfigError, WhetError
from whet.plan.prepare import prepare
from whet.rollout.scorer import whole
from whet.run.compose import run
from whet.runtime.local import LocalCluster
from whet_chat.tokenizer import ChatTokenizer
from whet_fsdp2.backend import Fsdp2Backend
from whet_fsdp2.config import Fsdp2Config
from whet_testing.role_context import make_context
from whet_training.layout import pack, used_lengths

LOSS = Spec("whet_rm.losses:BradleyTerry", "whet_rm.config:BradleyTerryConfig", {"margin": 0.5, "centering": 0.01})

NUMBERS, WORDS = [str(n) for n in range(1, 99)], ["the", "sum", "is", "what", "anyone", "knows", "x", "(", "q", "e"]


def pairs(seed: int = 0, count: int = 6) -> Batch:
    rng, rows, prompts = np.random.default_rng(seed), [], []
    for _ in range(count):
        prompt = rng.integers(3, 300, rng.integers(2, 6))
        prompts += [len(prompt)] * 2
        rows += [whole(np.concatenate([prompt, rng.integers(3, 300, rng.integers(1, 9))])) for _ in range(2)]
    unit = np.arange(2 * count) // 2
    made = from_sequences(rows, prompt_lengths=prompts, group=unit.tolist(), unit=unit.tolist())
    return made.with_columns(chosen=np.arange(2 * count) % 2 == 0, margin=(unit % 3).astype(np.float64))


@pytest.fixture
def backend(backend):
    return partial(backend, head="value")


def numbers(metrics: Any) -> dict[str, float]:
    return {name: m.number() for name, m in metrics.items() if not name.startswith(("seconds/", "memory/"))}


def test_micro_batches_layout_and_order_do_not_matter(backend):
    batch = pairs()
    shuffled = concatenate(batch.split(6, seed=3))
    expected = numbers(backend().train(batch, LOSS))
    assert {"rewards/accuracies", "rewards/chosen", "loss", "grad_norm"} <= set(expected)
    for config, given in (
        ({"micro_batch_tokens": 24}, batch),
        ({"micro_batch_tokens": 24, "layout": "padded"}, shuffled),
        ({"layout": "packed"}, shuffled),
        ({"layout": "shared"}, shuffled),
    ):
        assert numbers(backend(**config).train(given, LOSS)) == pytest.approx(expected, rel=2e-5, abs=1e-6)


def test_two_ranks_give_the_numbers_of_one(backend, tmp_path):
    batch = pairs(1)
    one = backend()
    with LocalCluster(tmp_path / "logs") as cluster:
        two = backend(cluster.worker_group("backend", 2), micro_batch_tokens=40)
        for how in ("evaluate", "train"):
            expected, found = (numbers(getattr(which, how)(batch, LOSS)) for which in (one, two))
            assert found == pytest.approx(expected, rel=2e-5, abs=1e-6)
        two.close()


def test_what_both_answers_begin_with_is_laid_out_once():
    batch = pairs()
    apart, together = (len(pack(batch, layout).tokens) for layout in ("packed", "shared"))
    assert apart == used_lengths(batch).sum()
    assert together <= apart - batch["prompt_lengths"][::2].sum()


def document(folder: Path, model: Path, **changes: Any) -> Path:
    """Write a run on pairs whose better answer has numbers, and the other one words."""
    rng, rows = np.random.default_rng(0), []
    for n in range(64):
        numbers, words = (" ".join(rng.choice(kind, rng.integers(1, 7))) for kind in (NUMBERS, WORDS))
        rows.append({"prompt": f"Compute {n}+8.", "chosen": numbers, "rejected": words, "margin": n % 2})
    for name, part in (("train", rows[:48]), ("validation", rows[48:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    config = {
        "run": {"folder": str(folder / "rm"), "steps": 12, "save_every": 6},
        "model": {"path": str(model)},
        "algorithm": {"use": "rm", "batch_size": 16, "validate_every": 4, "loss": {"use": "bradley-terry"}},
        "backend": {"use": "fsdp2", "head": "value", "optimizer": {"lr": 1.0e-3}},
        "data": {part: [{"path": str(folder / f"{part}.jsonl")}] for part in ("train", "validation")},
        "cluster": {"workers": "inline", "threads": {"backend": 1}},
        "loggers": [],
        **changes,
    }
    (folder / "rm.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return folder / "rm.yaml"


def measured(folder: Path) -> list[dict[str, float]]:
    return [
        {k: v for k, v in row.items() if k != "time" and not k.startswith(("seconds/", "memory/"))}
        for row in read_rows(folder / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_model_folder):
    """Run a short reward model."""
    folder = tmp_path_factory.mktemp("trained")
    assert run(document(folder, tiny_model_folder)).finished
    return folder


def test_a_short_run_learns_which_answer_is_better(trained):
    rows = measured(trained / "rm")
    assert rows[-1]["validation/rewards/accuracies"] == 1
    assert rows[-1]["validation/loss"] < rows[0]["validation/loss"]
    assert rows[0]["step"] == 0
    last = {name.removeprefix("validation/"): value for name, value in rows[-1].items() if "validation/" in name}
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"], abs=1e-5)
    assert last["rewards/chosen_std"] > 0
    assert not [name for name in rows[-1] if name.endswith("squared")]


def classified(folder: Path, talks: list[Any]) -> Any:
    """Return the scores of conversations by `transformers`, all in one padded batch."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = tokenizer.apply_chat_template(talks, tokenize=False)
    given = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    return model(**given).logits[:, 0].detach().numpy()


def test_the_exported_model_gives_the_same_scores_in_a_padded_batch(trained):
    folder, answers = trained / "rm" / "model", ["15 7", "the sum is what anyone knows", ""]
    asked, chat = {"role": "user", "content": "Compute 7+8."}, ChatTokenizer(folder)
    talks = [[asked, {"role": "assistant", "content": answer}] for answer in answers]
    tokens = [chat.training(conversation(talk)).tokens for talk in talks]
    batch = from_sequences([whole(one) for one in tokens], prompt_lengths=[len(one) for one in tokens])
    judge = Fsdp2Backend(Fsdp2Config(head="value"), make_context(trained / "context", "backend", folder))
    scores = judge.score(batch, ("values",))["values"][np.cumsum(batch["lengths"]) - 1]
    judge.close()
    np.testing.assert_allclose(classified(folder, talks), scores, atol=2e-5)
    assert scores[0] > scores[1]


def test_a_resumed_run_takes_the_same_steps(trained, tmp_path, tiny_model_folder):
    config = document(tmp_path, tiny_model_folder)
    run(config, ["run.steps=6"])
    run(config)
    shared = set(measured(tmp_path / "rm")[1])
    for one, other in zip(measured(trained / "rm")[1:], measured(tmp_path / "rm")[1:], strict=True):
        assert {name: one[name] for name in shared} == {name: other[name] for name in shared}
    weights = "rm/model/model.safetensors"
    assert (trained / weights).read_bytes() == (tmp_path / weights).read_bytes()


def test_margins_of_the_records_are_learned_from(trained, tmp_path, tiny_model_folder):
    run(document(tmp_path, tiny_model_folder), ["algorithm.loss.margin=3", "run.steps=1"])
    with_margin, without = (measured(folder / "rm")[1] for folder in (tmp_path, trained))
    assert with_margin["rewards/margins"] == pytest.approx(without["rewards/margins"])
    assert with_margin["loss"] > without["loss"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"backend": {"use": "fsdp2"}}, "algorithm.loss: needs the model output 'values', which the backend does not"),
        ({"generator": {"use": "hf"}}, "generator: is given, but a reward model writes no responses"),
        (
            {"algorithm": {"use": "rm", "loss": "nll"}},
            "algorithm.loss: reads no 'chosen', so nothing that rm finds out",
        ),
        ({"algorithm": {"use": "sft", "loss": "bradley-terry"}}, "algorithm.loss: reads the column 'chosen'"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_starts(tmp_path, tiny_model_folder, changes, complaint):
    with pytest.raises(ConfigError) as caught:
        prepare(document(tmp_path, tiny_model_folder, **changes))
    assert complaint in str(caught.value)


@pytest.fixture
def judged(trained, tmp_path, tiny_model_folder):
    """Write a run of GRPO whose rewards are the reward model's scores."""
    config = {
        "run": {"folder": str(tmp_path / "grpo"), "steps": 24},
        "model": {"path": str(tiny_model_folder)},
        "algorithm": {"use": "grpo", "prompts_per_step": 4, "group_size": 8},
        "backend": {"use": "fsdp2", "optimizer": {"lr": 3.0e-3}},
        "roles": {"judge": {"use": "fsdp2", "head": "value", "model": {"path": str(trained / "rm" / "model")}}},
        "generator": {"use": "hf"},
        "rollout": {"max_tokens": 8},
        "environments": [{"use": "judge", "dataset": str(trained / "train.jsonl")}],
        "evaluation": {
            "at_start": True,
            "environments": [{"use": "judge", "dataset": str(trained / "validation.jsonl"), "samples": 4}],
        },
        "cluster": {"workers": "inline", "threads": {"backend": 1}},
        "loggers": [],
    }  # fmt: skip
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return tmp_path / "grpo.yaml"


def test_grpo_against_a_reward_model_raises_its_score(judged, tmp_path):
    assert run(judged).finished
    rows = measured(tmp_path / "grpo")
    scores = [row["evaluation/judge/judge"] for row in rows if "evaluation/judge/judge" in row]
    learned = [row["reward/judge"] for row in rows if "reward/judge" in row]
    assert scores[-1] > scores[0] + 0.1
    assert np.mean(learned[-4:]) > np.mean(learned[:4])


def test_environments_that_share_a_judge_ask_it_one_after_another(judged, trained, tmp_path):
    data = trained / "train.jsonl"
    several = [{"use": "judge", "name": name, "dataset": str(data)} for name in "abc"]
    run(judged, [f"environments={json.dumps(several)}", "evaluation.environments=[]", "run.steps=3"])
    rows = [row for number in (1, 2, 3) for row in read_rows(tmp_path / f"grpo/rollouts/step-{number:06}.jsonl")]
    scores = classified(trained / "rm/model", [row["messages"] for row in rows])
    assert [row["rewards"]["judge"] for row in rows] == pytest.approx(list(scores), abs=1e-3)


def test_a_judge_that_has_no_value_head_is_refused(judged, tiny_model_folder):
    with pytest.raises(WhetError, match=r"has no value head .* give the folder of a reward model"):
        run(judged, [f"roles.judge.model.path={tiny_model_folder}", "run.steps=1"])


def test_a_judge_within_another_environment_leaves_its_rewards_beside(judged, trained, tmp_path):
    run(judged, ["environments=[{use: judge, environment: arithmetic, mean: 2, scale: 0.5}]", "run.steps=1"])
    rows = list(read_rows(tmp_path / "grpo/rollouts/step-000001.jsonl"))
    scores = classified(trained / "rm/model", [row["messages"] for row in rows])
    assert np.std(scores) > 0.01
    for row, score in zip(rows, scores, strict=True):
        assert row["rewards"] == {"correct": 0.0, "judge": pytest.approx((score - 2) / 0.5, abs=1e-3)}
        assert row["reward"] == row["rewards"]["judge"]


def test_a_judge_with_too_few_positions_is_refused_or_reads_the_end(judged, trained, tmp_path, caplog):
    short = shutil.copytree(trained / "rm/model", tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 24}))
    chosen = [f"roles.judge.model.path={short}", "evaluation.environments=[]", "run.steps=1"]
    with pytest.raises(ConfigError) as caught:
        prepare(judged, chosen)
    assert "rollout.max_context: allows for conversations of 256 tokens, and the positions of the role 'judge'" in str(
        caught.value
    )
    with caplog.at_level(logging.WARNING):
        assert run(judged, [*chosen, "environments.0.too_long=cut"]).finished
    assert any("whose positions end at 24, so its end is scored alone" in record.message for record in caplog.records)


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Ends turns with the token that fills up rows of the tiny tokenizer."""


def test_the_chat_template_of_its_training_is_exported_and_used_by_the_judge(judged, tmp_path, tiny_model_folder):
    from transformers import AutoTokenizer

    (tmp_path / "own.jinja").write_text(TEMPLATE)
    run(document(tmp_path, tiny_model_folder), ["run.steps=2", f"model.chat_template={tmp_path / 'own.jinja'}"])
    folder = tmp_path / "rm/model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.chat_template, tokenizer.pad_token != "<|endoftext|>") == (TEMPLATE, True)
    run(
        judged,
        [f"roles.judge.model.path={folder}", "environments=[{use: judge, environment: arithmetic}]", "run.steps=1"],
    )
    rows = list(read_rows(tmp_path / "grpo/rollouts/step-000001.jsonl"))
    scores = classified(folder, [row["messages"] for row in rows])
    assert [row["rewards"]["judge"] for row in rows] == pytest.approx(list(scores), abs=1e-3)


def test_a_judge_that_is_missing_or_gives_no_values_is_named(judged):
    for override, complaint in (
        ("roles={}", "roles.judge: is missing"),
        ("roles.judge.head=lm", "roles.judge: must give the model output 'values'"),
        ("environments.0.role=other", "roles.other: is missing"),
    ):
        with pytest.raises(ConfigError) as caught:
            prepare(judged, [override])
        assert complaint in str(caught.value)
