"""The console logger in a terminal and without one, with what a hostile model might write."""

import io
import json
import re

import pytest
from rich.console import Console

from whet.interfaces.logger import Logger, RunInfo
from whet_console import hooks
from whet_console.answers import pairs
from whet_console.config import ConsoleConfig
from whet_console.display import chosen, harmless, number
from whet_console.history import History
from whet_console.logger import ConsoleLogger, evaluation_lines, startup_lines

HOSTILE = "[bold red]17[/bold red] \x1b[2J\x1b]0;owned\x07 \u202eabc [link=https://x.example]y[/link]\r\nend"


def plain(folder, config=None, **run):
    out = io.StringIO()
    info = RunInfo(folder=folder, name="a-run", **{"steps": 20, **run})
    return ConsoleLogger(config or ConsoleConfig(), info, Console(file=out, highlight=False)), out


def write_records(folder, step, answers):
    path = folder / "evaluations" / f"step-{step:06d}-test.jsonl"
    path.parent.mkdir(exist_ok=True)
    rows = [
        {"environment": "test", "task": task, "sample": sample, "reward": reward, "rewards": {"correct": reward},
         "messages": [{"role": "user", "content": f"question {task}"}, {"role": "assistant", "content": text}]}
        for task, sample, text, reward in answers
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_hook_offers_a_logger_that_can_be_imported(tmp_path):
    (component,) = hooks.whet_loggers()
    from whet.component import resolve

    logger = resolve(component.target)(component.config(), RunInfo(folder=tmp_path, name="x"))
    assert isinstance(logger, Logger)
    logger.close(failed=False)


def test_without_a_terminal_lines_are_plain_and_every_so_many_steps(tmp_path):
    logger, out = plain(tmp_path, ConsoleConfig(every=10))
    for step in range(1, 21):
        logger.log(step, {"loss": 1 / step, "reward/mean": step / 20, "tokens": 100.0})
    rows = [line for line in out.getvalue().splitlines() if line.startswith("step ")]
    assert [row.split()[1] for row in rows] == ["1/20", "10/20", "20/20"]
    assert rows[1] == "step 10/20  loss 0.1  reward/mean 0.5"
    assert "\x1b" not in out.getvalue()


def test_without_a_terminal_the_status_shows_only_after_silence(tmp_path):
    logger, out = plain(tmp_path)
    logger.status("generator 71 %")
    assert out.getvalue() == ""
    silent, out = plain(tmp_path, ConsoleConfig(quiet_seconds=0.0))
    silent.status("generator 71 %")
    assert out.getvalue() == "waiting on: generator 71 %\n"


def test_a_terminal_shows_bar_status_and_aligned_rows(tmp_path):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=140, _environ={"TERM": "xterm"})
    logger = ConsoleLogger(ConsoleConfig(every=1), RunInfo(folder=tmp_path, name="a-run", steps=4), console)
    logger.log(1, {"loss": 0.5, "grad_norm": 1.25})
    logger.log(2, {"loss": 0.25, "grad_norm": 2.0})
    logger.status("generator 71 %")
    logger._view._progress.refresh()
    logger.close(failed=False)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "waiting on: generator 71 %" in text
    assert "2/4" in text
    rows = [line.split() for line in text.splitlines()]
    assert [rows.count(r) for r in (["step", "loss", "grad_norm"], ["1", "0.5", "1.25"], ["2", "0.25", "2"])] == [1] * 3


def test_columns_adapt_to_the_metrics_of_the_run():
    assert chosen({"tokens": 1, "grad_norm": 1, "loss": 1}) == ["loss", "grad_norm"]
    assert chosen({"reward/a": 1, "reward/b": 1, "loss": 1}, ["reward/*", "loss"]) == ["reward/a", "reward/b", "loss"]


@pytest.mark.parametrize(
    ("value", "shown"), [(3.0, "3"), (0.123456, "0.1235"), (1.5e-7, "1.5e-07"), (float("nan"), "nan"), (1e30, "1e+30")]
)
def test_numbers_have_four_significant_digits(value, shown):
    assert number(value) == shown


def test_an_evaluation_is_one_line_per_environment():
    metrics = {"loss": 1.0, "evaluation/b/reward": 1.0, "evaluation/a/pass@4": 0.75, "evaluation/a/reward": 0.5}
    metrics |= {"evaluation/a/reward/ci_low": 0.45, "evaluation/a/reward/ci_high": 0.54, "evaluation/a/by/length": 3.0}
    metrics |= {"evaluation/a/dropped": 0.0, "evaluation/b/dropped": 2.0}
    assert evaluation_lines(0, metrics) == [
        "evaluation of a after step 0: reward 0.5 (0.45 to 0.54), by/length 3, pass@4 0.75",
        "evaluation of b after step 0: reward 1, dropped 2",
    ]


def test_the_summary_names_first_last_and_best_with_its_step(tmp_path):
    logger, out = plain(tmp_path)
    for step, reward in [(0, 0.25), (5, 0.875), (10, 0.75)]:
        name = "evaluation/test/reward"
        metrics = {name: reward, f"{name}/ci_low": reward - 0.125, f"{name}/ci_high": 1.0, "validation/loss": 9 - step}
        logger.log(step, metrics)
    logger.close(failed=False)
    line = next(line for line in out.getvalue().splitlines() if line.startswith("test/reward"))
    assert line.split() == ["test/reward", "0.25", "(0.125", "to", "1)", "0.75", "(0.625", "to", "1)", "0.875", "5"]
    lowest = next(line for line in out.getvalue().splitlines() if line.startswith("validation/loss"))
    assert lowest.split() == ["validation/loss", "9", "-1", "-1", "10"]


def test_an_answer_length_has_no_best_and_dropping_nothing_no_row():
    history = History()
    history.add(0, {"evaluation/test/response_length": 12.0, "evaluation/test/dropped": 0.0})
    (judged,) = history.judgements()
    assert (judged.name, judged.best) == ("evaluation/test/response_length", None)


def test_the_summary_shares_out_the_seconds_of_steps(tmp_path):
    logger, out = plain(tmp_path)
    logger.log(0, {"seconds/step": 100.0, "seconds/backend.start": 99.0})
    for step in (1, 2):
        seconds = {
            "seconds/step": 4.0,
            "seconds/backend.train": 3.0,
            "seconds/backend.forward": 1.0,
            "seconds/x.y": 0.01,
        }
        logger.log(step, seconds)
    logger.close(failed=False)
    assert [row for row in map(str.split, out.getvalue().splitlines()) if "%" in row] == [
        ["backend.train", "6.00", "75", "%"],
        ["backend.forward", "2.00", "25", "%"],
    ]
    assert "100 %:" not in out.getvalue()


def test_shares_of_phases_that_overlap_are_explained(tmp_path):
    logger, out = plain(tmp_path)
    logger.log(1, {"seconds/step": 4.0, "seconds/rollout.take": 3.0, "seconds/generator.generate": 3.5})
    logger.close(failed=False)
    assert "Shares add up to more than 100 %: some phases run at one time, or within another." in out.getvalue()


NOTHING, SAME, FINE = ({"reward/mean": mean, "reward/std": std} for mean, std in ((0.0, 0.0), (1.0, 0.0), (0.5, 0.2)))


@pytest.mark.parametrize(
    ("steps", "hints"),
    [
        ([NOTHING] * 12, ["all rewards were 0 in 5 steps in a row"]),
        ([SAME] * 12, ["in 5 steps in a row the rewards within each group were equal"]),
        ([SAME] * 3 + [NOTHING] * 5, ["all rewards were 0"]),
        (([NOTHING] * 4 + [FINE]) * 3, []),
        ([{"reward/mean": 0.0}] * 9 + [{"loss": 0.0}] * 9, []),
    ],
)
def test_steps_that_teach_nothing_get_one_line_of_hint(tmp_path, steps, hints):
    logger, out = plain(tmp_path, ConsoleConfig(metrics=["nothing"]))
    for i, metrics in enumerate(steps, 1):
        logger.log(i, metrics)
    lines = out.getvalue().splitlines()
    assert [line.startswith(hint) for line, hint in zip(lines, hints, strict=True)] == [True] * len(hints)


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_cuts_no_number_and_no_line(tmp_path, width):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, _environ={"TERM": "xterm"})
    logger = ConsoleLogger(ConsoleConfig(every=1), RunInfo(folder=tmp_path, name="a-run", steps=4), console)
    startup = {"seconds/startup": 9.0, **{f"seconds/startup.role{i}.start": 1.0 for i in range(8)}}
    usual = {"loss": 0.5, "reward/mean": 0.25, "response_length/mean": 17.25, "logprob_gap/max": 0.125}
    logger.log(1, {**usual, **startup})
    logger._view._progress.stop()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert all(f"role{i}.start 1.0" in " ".join(text.split()) for i in range(8))
    header = next(line for line in text.splitlines() if line.startswith("  step"))
    assert header.split()[1:4] == ["loss", "reward/mean", "response_length/mean"]
    assert header.endswith("logprob_gap/max" if width == 80 else "  ...")


def test_a_resumed_run_is_summed_up_from_its_beginning(tmp_path):
    rows = [{"step": 0, "time": 1.0, "evaluation/test/reward": 0.125}, {"step": 9, "evaluation/test/reward": 0.99}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 1, "lo')
    logger, out = plain(tmp_path, resumed_from=5)
    logger.log(10, {"evaluation/test/reward": 0.5})
    logger.close(failed=False)
    line = next(line for line in out.getvalue().splitlines() if line.startswith("test/reward"))
    assert line.split() == ["test/reward", "0.125", "0.5", "0.5", "10"]


def test_answers_of_the_first_tasks_stand_side_by_side(tmp_path):
    write_records(tmp_path, 0, [(0, 0, "worse", 0.0), (0, 1, "other sample", 1.0), (1, 0, "x", 0.0)])
    write_records(tmp_path, 7, [(0, 0, "better", 1.0), (1, 0, "y", 0.0)])
    logger, out = plain(tmp_path, ConsoleConfig(answers=1))
    logger.close(failed=False)
    assert "asked     question 0" in out.getvalue()
    assert "step 0  0  worse" in out.getvalue()
    assert "step 7  1  better" in out.getvalue()
    assert "question 1" not in out.getvalue()


def test_model_output_is_neither_obeyed_nor_read_as_markup(tmp_path):
    write_records(tmp_path, 0, [(0, 0, HOSTILE, 0.0)])
    write_records(tmp_path, 1, [(0, 0, HOSTILE, 0.0)])
    logger, out = plain(tmp_path)
    logger.status(HOSTILE)
    logger.close(failed=False)
    shown = "[bold red]17[/bold red] \\x1b[2J\\x1b]0;owned\\x07 \\u202eabc [link=https://x.example]y[/link] / end"
    assert shown in out.getvalue()
    assert not set(out.getvalue()) & set("\x1b\x07\u202e\r")


def test_long_text_is_cut_and_what_cannot_be_encoded_is_escaped():
    assert harmless("a" * 1000, 10) == "aaaaaaa..."
    assert harmless("ü\ud800", 20, "ascii") == "\\xfc\\ud800"


def test_damaged_records_are_left_out(tmp_path):
    write_records(tmp_path, 0, [(0, 0, "a", 0.0)])
    write_records(tmp_path, 1, [(0, 0, "b", 0.0)])
    with (tmp_path / "evaluations" / "step-000000-test.jsonl").open("a") as file:
        file.write('[1]\n{"environment": "test"}\n{"task": \n')
    assert len(pairs(tmp_path, 5)) == 1


def test_closing_twice_prints_one_summary_and_a_failure_says_so(tmp_path):
    logger, out = plain(tmp_path)
    logger.log(3, {"loss": 1.0})
    logger.close(failed=True)
    logger.close(failed=True)
    assert out.getvalue().count("failed after step 3") == 1


def test_the_time_to_the_first_step_is_told_with_its_parts_the_longest_first():
    metrics = {
        "loss": 1.0,
        "seconds/startup": 6.04,
        "seconds/startup.config": 0.3,
        "seconds/startup.backend.start": 4.2,
        "seconds/startup.other": 0.01,
    }
    assert startup_lines(metrics) == ["the first step was over after 6.0 s: backend.start 4.2, config 0.3"]
    assert startup_lines({"loss": 1.0}) == []
