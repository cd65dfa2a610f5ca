"""GSM8K as it is: a model learns from it, answers are graded, and what is malformed is named and counted."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from whet_start.small_models import make_model, make_tokenizer

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[1] / "recipes"


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Path:
    """A random model whose tokenizer was trained on some of the questions and answers."""
    records = rows(shared_data / "gsm8k_train.jsonl")[:500]
    corpus = [f"{record['question']}\n{record['answer']}" for record in records]
    tokenizer = make_tokenizer([*corpus, *["Put your final answer within \\boxed{}."] * 20], vocab_size=1000)
    return make_model(tmp_path_factory.mktemp("gsm8k") / "model", tokenizer, max_positions=512)


# Supervised fine-tuning

ALONE = ["evaluation.environments=[]", "generator=null", "loggers=[]", "data.max_length=0"]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, shared_data, model, whet) -> Path:
    """The run folder of forty steps on the first records."""
    folder = tmp_path_factory.mktemp("sft") / "run"
    data = [
        f"data.train=[{{path: {shared_data / 'gsm8k_train.jsonl'}, limit: 400}}]",
        f"data.validation=[{{path: {shared_data / 'gsm8k_test.jsonl'}, limit: 64}}]",
    ]
    size = ["run.steps=40", "algorithm.batch_size=8", "algorithm.validate_every=20", "backend.optimizer.lr=3.0e-3"]
    done = whet("run", RECIPES / "gsm8k-sft.yaml", f"model.path={model}", f"run.folder={folder}", *data, *size, *ALONE)
    assert done.code == 0, done.errors
    return folder


def test_the_loss_falls_in_training_and_on_questions_that_it_never_saw(tuned):
    start, *metrics = rows(tuned / "metrics.jsonl")
    losses = [row["loss"] for row in metrics]
    # A random model of 1000 tokens begins near ln 1000 = 6.9 nats.
    assert losses[0] == pytest.approx(6.9, abs=0.2)
    assert sum(losses[-5:]) / 5 < 4.9
    assert start["validation/loss"] > metrics[19]["validation/loss"] > metrics[39]["validation/loss"]
    assert metrics[39]["validation/loss"] < 4.9


def test_the_tuned_model_is_a_folder_that_transformers_loads_and_prefers_what_it_learned(tuned, model, shared_data):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    record = rows(shared_data / "gsm8k_test.jsonl")[100]
    messages = [
        {"role": "user", "content": record["question"]},
        {"role": "assistant", "content": record["answer"]},
    ]

    def loss(folder: Path) -> float:
        text = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False)
        ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
        with torch.no_grad():
            return float(AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids, labels=ids).loss)

    assert loss(tuned / "model") < loss(model) - 1.0


@pytest.fixture
def malformed(tmp_path: Path, shared_data: Path) -> Path:
    """A copy of the first 200 records, four of them spoilt."""
    lines = (shared_data / "gsm8k_train.jsonl").read_bytes().splitlines()[:200]
    lines[9] = lines[9][:40]
    lines[19] = b'["a list"]'
    lines[29] = b'{"question": "and no answer?"}'
    lines[39] = b"\xff\xfe"
    file = tmp_path / "malformed.jsonl"
    file.write_bytes(b"\n".join(lines))
    return file


SPOILT = [
    r"malformed\.jsonl:10: not JSON",
    r"malformed\.jsonl:20: a list, wanted an object",
    r"malformed\.jsonl:30: .*question",
    r"malformed\.jsonl:40: not UTF-8",
]


def test_malformed_records_are_named_with_file_and_line_and_counted(tmp_path, model, malformed, whet):
    train = ["run.steps=1", "algorithm.batch_size=4", "cluster.workers=inline", "data.validation=[]", *ALONE]
    given = [f"model.path={model}", f"run.folder={tmp_path / 'run'}", f"data.train=[{{path: {malformed}}}]", *train]
    refused = whet("run", RECIPES / "gsm8k-sft.yaml", *given).error
    assert refused.startswith("data.train: 4 of 200 records are malformed, more than the 1.0% that data.max_bad")
    assert_named(refused)
    done = whet("run", RECIPES / "gsm8k-sft.yaml", *given, "data.max_bad_records=0.02")
    assert done.code == 0, done.errors
    assert "200 records, " in done.errors
    assert "4 malformed" in done.errors
    assert_named(done.errors)


def test_malformed_tasks_are_named_with_file_and_line_and_counted(tmp_path, model, malformed, whet):
    given = [f"model.path={model}", f"run.folder={tmp_path / 'run'}", f"environments.0.dataset={malformed}", *PLAYED]
    refused = whet("run", RECIPES / "gsm8k-grpo.yaml", *given, "evaluation.environments=[]", "run.steps=1").error
    assert "4 of 200 records cannot be used, more than the 0.0% that max_bad_records allows" in refused
    assert_named(refused)
    allowed = ["evaluation.environments=[]", "run.steps=1", "environments.0.max_bad_records=0.02"]
    done = whet("run", RECIPES / "gsm8k-grpo.yaml", *given, *allowed)
    assert done.code == 0, done.errors
    assert "4 of 200 records left out" in done.errors
    assert_named(done.errors)


def assert_named(text: str) -> None:
    for pattern in SPOILT:
        assert re.search(pattern, text), (pattern, text)


# Reinforcement learning

PLAYED = [
    "algorithm.prompts_per_step=4", "algorithm.group_size=4", "rollout.max_tokens=16", "rollout.max_context=512",
    "cluster.workers=inline", "loggers=[]",
]  # fmt: skip


@pytest.fixture(scope="module")
def rewarded(tmp_path_factory, shared_data, model, whet) -> Path:
    """The run folder of two steps of GRPO, evaluated before and after."""
    folder = tmp_path_factory.mktemp("grpo") / "run"
    data = [
        f"environments.0.dataset={shared_data / 'gsm8k_train.jsonl'}",
        f"evaluation.environments.0.dataset={shared_data / 'gsm8k_test.jsonl'}",
        "evaluation.environments.0.limit=16",
    ]
    given = [f"model.path={model}", f"run.folder={folder}", "run.steps=2", *data, *PLAYED]
    done = whet("run", RECIPES / "gsm8k-grpo.yaml", *given)
    assert done.code == 0, done.errors
    return folder


def test_answers_of_a_random_model_are_graded_and_wrong(rewarded):
    steps = {row["step"]: row for row in rows(rewarded / "metrics.jsonl")}
    assert sorted(steps) == [0, 1, 2]
    for step in (1, 2):
        assert steps[step]["reward/correct"] == steps[step]["reward/mean"] == 0.0
        assert steps[step]["episodes/failed"] == steps[step]["groups/dropped"] == 0
        assert 0 < steps[step]["logprob_gap/max"] < 1e-4
    for step in (0, 2):
        assert steps[step]["evaluation/gsm8k/reward"] == 0.0
        assert len(rows(rewarded / "evaluations" / f"step-{step:06d}-gsm8k.jsonl")) == 16


def test_the_questions_are_those_of_the_file(rewarded, shared_data):
    questions = [record["question"] for record in rows(shared_data / "gsm8k_train.jsonl")]
    played = rows(rewarded / "rollouts" / "step-000001.jsonl")
    assert len(played) == 16
    for row in played:
        assert row["messages"][0]["content"].startswith(questions[row["task"]])


class Says:
    """A model with a ready answer."""

    def __init__(self, text: str) -> None:
        self.text = text

    async def reply(self, messages):
        return self


@pytest.fixture(scope="module")
def gsm8k(shared_data):
    from whet_env_math.config import MathConfig
    from whet_env_math.dataset import MathDataset

    environment = MathDataset(MathConfig(dataset=str(shared_data / "gsm8k_test.jsonl"), prompt="{question}"))
    yield environment
    environment.close()


def test_all_worked_solutions_of_the_data_set_earn_the_whole_reward(gsm8k, shared_data):
    tasks, records = gsm8k.tasks("test"), rows(shared_data / "gsm8k_test.jsonl")
    assert len(tasks) == len(records) == 1319

    async def correct(texts):
        found = await asyncio.gather(*(gsm8k.run(task, Says(text)) for task, text in zip(tasks, texts, strict=True)))
        return [rewards["correct"] for rewards in found]

    gold = [record["answer"].rpartition("#### ")[2] for record in records]
    assert asyncio.run(correct([f"So it is \\boxed{{{answer}}}." for answer in gold])) == [1.0] * 1319
    assert sum(asyncio.run(correct([f"\\boxed{{{answer}1}}" for answer in gold]))) == 0
