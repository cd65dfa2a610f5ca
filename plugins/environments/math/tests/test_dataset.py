import asyncio
import json
import re

import pytest

from whet.config.sections import DataFile
from whet.data.model_info import ModelInfo
from whet.data.records import Task
from whet.errors import DataError
from whet.interfaces.undecided import noted
from whet_data.readers import read
from whet_env_math import verifier
from whet_env_math.arithmetic import Arithmetic
from whet_env_math.config import ArithmeticConfig, MathConfig, facts
from whet_env_math.dataset import MathDataset
from whet_sandbox.pool import GraderCrash, GraderRaised
from whet_testing.fakes import FakeModel

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


def emphasized(solution):
    """Write the last number of a solution in bold."""
    *_, last = re.finditer(r"\d[\d,.]*\d|\d", solution)
    return f"{solution[: last.start()]}**{last[0]}**{solution[last.end() :]}"


def test_a_solution_has_the_same_grade_with_its_answer_in_bold(shared_data):
    environment = MathDataset(MathConfig(dataset={}, graders=2))
    rows = [row.record for row in read(DataFile(str(shared_data / "gsm8k_model_solutions.jsonl"), limit=100))]
    solutions = [
        (found["solution"], row["ground_truth"].rpartition("A:")[2].strip(), found["is_correct"])
        for row in rows
        for found in row.values()
        if isinstance(found, dict)
    ]

    async def grade_all():
        tasks = [Task("?", {"answer": gold}) for _, gold, _ in solutions]
        models = [FakeModel(emphasized(solution)) for solution, _, _ in solutions]
        return await asyncio.gather(*map(environment.run, tasks, models))

    grades = asyncio.run(grade_all())
    environment.close()
    agree = sum(grade["correct"] == right for grade, (_, _, right) in zip(grades, solutions, strict=True))
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


HANGING = {
    "a power": ("\\boxed{(x+1)^{2000}}", "(x-1)^{2000}"),
    "nested sines": ("\\boxed{" + "\\sin(" * 40 + "x" + ")" * 40 + "}", "\\frac{1}{2}"),
    "a factorial": ("\\boxed{1000000!}", "\\frac{1}{2}"),
    "brackets": ("\\boxed{" + "(" * 300 + "1" + ")" * 300 + "}", "\\frac{1}{2}"),
    "an integral": ("\\boxed{\\int_0^1 x^x \\sin(x^{x}) dx}", "42"),
}


@pytest.mark.parametrize("what", HANGING)
def test_an_answer_that_cannot_be_graded_in_time_is_wrong_and_counted_and_the_next_is_graded(make, what):
    environment = make(timeout_seconds=1.0)
    answer, gold = HANGING[what]
    with noted() as reasons:
        assert play(environment, Task("?", {"answer": gold}), answer) == {"correct": 0.0}
    assert len(reasons) == environment._pool.undecided == 1
    assert reasons[0].endswith("it needs more than 1 s of processor time")
    with noted() as reasons:
        assert play(environment, environment.tasks("train")[0], "it is 42") == {"correct": 1.0}
    assert reasons == []


def test_what_math_verify_stumbles_over_is_wrong_and_counted(make, monkeypatch):
    async def stumble(*_):
        raise GraderRaised("the grader failed: ValueError: so many digits")

    environment = make(RECORDS[:1])
    monkeypatch.setattr(environment._pool, "call", stumble)
    with noted() as reasons:
        assert play(environment, environment.tasks("train")[0], "it is 42") == {"correct": 0.0}
    assert reasons == ["the grader failed: ValueError: so many digits"]


def test_graders_that_do_not_work_fail_the_episode(make, monkeypatch):
    monkeypatch.setattr(verifier, "_SAMPLES", (("\\boxed{1}", "2", True),))
    with pytest.raises(RuntimeError, match=r"math-verify says that .* is not equal to '2'; install a release"):
        verifier.verifier()
    environment = make(RECORDS[:1])
    environment._pool._order["target"] = "whet_env_math.no_such_verifier:verifier"
    with noted() as reasons, pytest.raises(GraderCrash, match="could not be started"):
        play(environment, environment.tasks("train")[0], "it is 42")
    assert reasons == []


def test_a_right_answer_that_hangs_the_grader_is_refused_when_the_data_is_loaded(make):
    with pytest.raises(DataError, match=r"train\.jsonl:1: the answer .* cannot be graded: .* processor time"):
        make([{"question": "x", "answer": HANGING["brackets"][0]}], timeout_seconds=1.0).tasks("train")


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


def test_the_splits_are_facts_where_the_config_names_them():
    named = MathConfig(dataset={"train": "a.jsonl", "dev": "b.jsonl"})
    assert facts(named, ModelInfo("")).splits == ("train", "dev")
    assert facts(MathConfig(dataset="openai/gsm8k"), ModelInfo("")).splits is None
    made, known = Arithmetic(ArithmeticConfig()), facts(ArithmeticConfig(), ModelInfo("")).splits
    assert [len(made.tasks(split)) > 0 for split in known] == [True, True]


def test_numbers_beside_each_other_units_and_separators_are_read_as_people_do(make):
    environment = make(RECORDS[:1])
    right = [
        ("18 dollars", "18"), ("24 eggs", "24"), ("$24 dollars", "24"), ("1450 miles per hour", "1450"),
        ("10\\,000", "10000"), ("1~450", "1450"), ("1 450", "1450"), ("10{,}000", "10,000"), ("5\\text{ km}", "5"),
        ("\\log_2 8", "\\log_2 8"), ("\\frac{3}{4}", "0.75"), ("\\frac 1 2", "0.5"), ("\\dfrac 3 4", "0.75"),
        ("7 \\text{ dozen}", "7"), ("7 dozens of eggs", "7"), ("2^3\\,125", "1000"),
    ]  # fmt: skip
    wrong = [
        ("3 4", "7"), ("3\\quad 1", "4"), ("3\\,5\\,7", "15"), ("2 \\text{ million}", "2"), ("24 plus 3", "24"),
        ("5 squared", "5"), ("18 or 19 eggs", "18"), ("451", "1\\,450"), ("3 eighths", "3"), ("2 xy", "2"),
        ("2 root", "2"), ("5 thousandths", "5"), ("5 below zero", "5"),
    ]  # fmt: skip
    for expected, pairs in ((1.0, right), (0.0, wrong)):
        for answer, gold in pairs:
            found = play(environment, Task("?", {"answer": gold}), f"so \\boxed{{{answer}}}")
            assert found == {"correct": expected}, (answer, gold)


def test_separators_of_thousands_in_right_answers_are_removed(make):
    (task,) = make([{"question": "?", "answer": "#### 1\\,450"}]).tasks("train")
    assert task.data == {"answer": "1450"}
