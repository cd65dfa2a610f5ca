import asyncio
import json
import re

import pytest

from whet.cluster.pool import GraderTimeout
from whet.config.sections import DataFile
from whet.data.readers import read
from whet.data.records import Task
from whet.errors import DataError
from whet.testing.fakes import FakeModel
from whet_env_math.config import MathConfig
from whet_env_math.dataset import MathDataset

RECORDS = [
    {"question": "What is 6*7?", "answer": "6*7=<<6*7=42>>42\n#### 42"},
    {"question": "Half of {one}?", "answer": "#### \\frac{1}{2}"},
    {"question": "Solve x^2=4.", "answer": "so \\boxed{\\{-2, 2\\}}"},
    {"question": "How much?", "answer": 1450},
]


def write(path, records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return str(path)


def play(environment, task, answer):
    return asyncio.run(environment.run(task, FakeModel(answer)))


@pytest.fixture
def make(tmp_path):
    made = []

    def make(records=RECORDS, **options):
        files = {"train": write(tmp_path / "train.jsonl", records), "test": write(tmp_path / "test.jsonl", records[:2])}
        made.append(MathDataset(MathConfig(dataset=files, **options)))
        return made[-1]

    yield make
    for environment in made:
        environment.close()


def test_every_right_answer_of_gsm8k_scores_full_reward(shared_data):
    files = {split: str(shared_data / f"gsm8k_{split}.jsonl") for split in ("train", "test")}
    environment = MathDataset(MathConfig(dataset=files))
    assert [len(environment.tasks(split)) for split in files] == [7473, 1319]

    async def answer_all(tasks):
        models = [FakeModel(f"so it is \\boxed{{{task.data['answer']}}}.") for task in tasks]
        return await asyncio.gather(*map(environment.run, tasks, models))

    for split in files:
        rewards = asyncio.run(answer_all(environment.tasks(split)))
        assert all(reward == {"correct": 1.0} for reward in rewards)
    environment.close()


def test_grades_agree_with_those_of_the_solutions_of_four_models(shared_data):
    """400 solutions from the paper of GSM8K (Cobbe et al. 2021), which says of each whether it is right."""
    environment = MathDataset(MathConfig(dataset={}, graders=2))
    rows = [row.record for row in read(DataFile(str(shared_data / "gsm8k_model_solutions.jsonl"), limit=100))]
    solutions = [
        (solution, row["ground_truth"].rpartition("A:")[2].strip())
        for row in rows
        for solution in row.values()
        if isinstance(solution, dict)
    ]

    async def grade_all():
        tasks = [Task("?", {"answer": gold}) for _, gold in solutions]
        models = [FakeModel(solution["solution"]) for solution, _ in solutions]
        return await asyncio.gather(*map(environment.run, tasks, models))

    grades = asyncio.run(grade_all())
    environment.close()
    agree = sum(grade["correct"] == s["is_correct"] for grade, (s, _) in zip(grades, solutions, strict=True))
    assert len(solutions) == 400
    assert agree / len(solutions) >= 0.97


def test_answers_are_compared_by_value(make):
    environment = make()
    task = environment.tasks("train")[1]
    worth = {
        "\\boxed{\\frac{1}{2}}": 1.0,
        "\\boxed{0.5}": 1.0,
        "\\boxed{\\frac{2}{4}}": 1.0,
        "so the answer is 1/2": 1.0,
        "\\boxed{\\frac{1}{3}}": 0.0,
        "so the answer is $\\frac{1}{2}$, \\boxed{": 1.0,  # an open box is none
        "\\boxed{\\begin{}": 0.0,
        "none": 0.0,
    }
    assert {answer: play(environment, task, answer)["correct"] for answer in worth} == worth


def test_only_boxes_count_where_that_is_asked_for(make):
    environment = make(boxed_only=True)
    task = environment.tasks("train")[0]
    assert [play(environment, task, text)["correct"] for text in ("42", "\\boxed{42}")] == [0.0, 1.0]


def test_format_is_a_reward_of_its_own(make):
    environment = make(format_weight=0.1)
    task = environment.tasks("train")[0]
    assert environment.reward_weights == {"correct": 1.0, "format": 0.1}
    assert play(environment, task, "42") == {"correct": 1.0, "format": 0.0}
    assert play(environment, task, "\\boxed{41}") == {"correct": 0.0, "format": 1.0}


def test_plain_numbers_start_no_grader(make):
    environment = make(RECORDS[:1])
    task = environment.tasks("train")[0]
    assert play(environment, task, "\\boxed{42.0}") == {"correct": 1.0}
    assert play(environment, task, "\\boxed{43}") == {"correct": 0.0}
    assert not environment._pool._threads


def test_an_answer_that_cannot_be_graded_in_time_fails_the_episode_and_not_the_next(make):
    environment = make(timeout_seconds=1.0)
    task = environment.tasks("train")[0]
    with pytest.raises(GraderTimeout):
        play(environment, task, "\\boxed{\\int_0^1 x^x \\sin(x^{x}) dx}")
    assert environment._pool.timeouts == 1
    assert play(environment, task, "it is 42") == {"correct": 1.0}


def test_the_prompt_is_as_the_config_says(make):
    environment = make(prompt="Q: {question}\nA:", system="Be brief.")
    assert [(m.role, m.text) for m in environment.tasks("train")[1].prompt] == [
        ("system", "Be brief."),
        ("user", "Q: Half of {one}?\nA:"),
    ]
    with pytest.raises(ValueError, match=r"wanted a text with .question. in it"):
        make(prompt="answer!")


def test_records_that_cannot_be_used_are_named_with_file_and_line(make, caplog):
    records = [
        *RECORDS[:1],
        "{",
        {"question": "x"},
        {"question": "x", "answer": "#### \\frac{1}{"},
        {"question": " ", "answer": "1"},
    ]
    with pytest.raises(
        DataError, match=r"(?s)4 of 5 records.*train\.jsonl:2: not JSON.*:3: .*'answer' is missing.*:4: .*parsed"
    ):
        make(records).tasks("train")
    assert len(make(records, max_bad_records=0.8).tasks("train")) == 1
    assert make(records, max_bad_records=0.8).tasks("train")[0].id == "train.jsonl:1"
    assert re.search(r"4 of 5 records left out\n  train\.jsonl:2: not JSON", caplog.text)


def test_an_answer_that_the_pattern_misses_is_a_bad_record(make):
    records = [{"question": "x", "answer": "A: 1"}, {"question": "x", "answer": "1"}]
    with pytest.raises(DataError, match=r"1 of 2.*\n  train\.jsonl:2: no answer is found in '1'"):
        make(records, answer_pattern="A: (.*)").tasks("train")
    for pattern, complaint in (("A: (", "no regular expression"), ("A: .*", "has no group")):
        with pytest.raises(DataError, match=complaint):
            make(records, answer_pattern=pattern)


def test_a_folder_has_a_file_for_each_split(tmp_path):
    write(tmp_path / "train.jsonl", RECORDS[:1])
    environment = MathDataset(MathConfig(dataset=str(tmp_path), max_records=1))
    assert len(environment.tasks("train")) == 1
    with pytest.raises(DataError, match=r"no file for the split 'test'; it has train\.jsonl"):
        environment.tasks("test")
    environment.close()


def test_fields_may_have_other_names(make):
    environment = make([{"problem": "6*7?", "solution": "\\boxed{42}"}] * 2, question="problem", answer="solution")
    assert environment.tasks("train")[0].data == {"answer": "42"}


def test_tasks_can_be_loaded_inside_an_event_loop(make):
    async def load():
        return make().tasks("train")

    assert len(asyncio.run(load())) == 4
