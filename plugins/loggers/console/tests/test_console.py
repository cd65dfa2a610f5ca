"""The console logger in a terminal and without one, with what a hostile model might write."""

import io
import json
import re

import pytest
from rich.console import Console

from whet.interfaces.logger import Logger, RunInfo
from whet_console import hooks
from whet_console.config import ConsoleConfig
from whet_console.display import chosen, harmless, number
from whet_console.history import History
from whet_console.logger import ConsoleLogger, evaluation_lines, startup_lines
from whet_console.pace import Pace
from whet_console.responses import pairs

HOSTILE = "[bold red]17[/bold red] \x1b[2J\x1b]0;owned\x07 \u202eabc [link=https://x.example]y[/link]\r\nend"


def plain(folder, config=None, **run):
    out = io.StringIO()
    info = RunInfo(folder=folder, name="a-run", **{"steps": 20, **run})
    return ConsoleLogger(config or ConsoleConfig(), info, Console(file=out, highlight=False)), out


def write_records(folder, step, responses):
    path = folder / "evaluations" / f"step-{step:06d}-test.jsonl"
    path.parent.mkdir(exist_ok=True)
    rows = [
        {"environment": "test", "task": task, "sample": sample, "reward": reward, "rewards": {"correct": reward},
         "messages": [{"role": "user", "content": f"question {task}"}, {"role": "assistant", "content": text}]}
        for task, sample, text, reward in responses
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
    assert rows[1] == "step 10/20  reward/mean 0.5"
    assert "\x1b" not in out.getvalue()


def test_without_a_terminal_the_status_shows_only_after_silence(tmp_path):
    logger, out = plain(tmp_path)
    logger.status("rollouts, 3 of 8 episodes finished")
    assert out.getvalue() == ""
    silent, out = plain(tmp_path, ConsoleConfig(quiet_seconds=0.0))
    silent.status("rollouts, 3 of 8 episodes finished")
    assert out.getvalue() == "waiting on: rollouts, 3 of 8 episodes finished\n"


def test_a_plain_row_says_how_fast_the_steps_are_and_when_the_run_is_over(tmp_path):
    logger, out = plain(tmp_path, ConsoleConfig(every=2, metrics=["reward/mean"]))
    now = iter(range(0, 1000, 5))
    logger._pace._clock = lambda: next(now)
    for step, seconds in enumerate((4.0, 1.0, 2.0, 9.0), 1):
        logger.log(step, {"reward/mean": 0.5, "seconds/step": seconds})
    assert out.getvalue().splitlines() == [
        "step 1/20  reward/mean 0.5  s/step 4  ETA 0:01:16",  # of the one step that is known: 19 times 4 s
        "step 2/20  reward/mean 0.5  s/step 1  ETA 0:01:30",  # a step every 5 s by the clock
        "step 4/20  reward/mean 0.5  s/step 5.5  ETA 0:01:20",  # the mean of steps 3 and 4
    ]


def test_the_last_row_and_a_run_without_an_end_have_no_time_left(tmp_path):
    logger, out = plain(tmp_path, steps=1)
    logger.log(1, {"loss": 0.5, "seconds/step": 2.0})
    endless, more = plain(tmp_path, steps=0)
    endless.log(1, {"loss": 0.5, "seconds/step": 2.0})
    assert (out.getvalue(), more.getvalue()) == ("step 1/1  loss 0.5  s/step 2\n", "step 1  loss 0.5  s/step 2\n")


def test_times_of_steps_that_are_taken_again_are_forgotten(tmp_path):
    pace = Pace(iter((0.0, 10.0, 100.0, 101.0)).__next__)
    for step in (7, 8):
        pace.after(step, {"seconds/step": 10.0})
    pace.rewind()
    for step in (5, 6):
        pace.after(step, {"seconds/step": 1.0})
    assert (pace.left(10), pace.row()) == (4.0, {"s/step": 1.0})


def live(folder, width=140, **config):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, _environ={"TERM": "xterm"})
    run = RunInfo(folder=folder, name="a-run", steps=4)
    return ConsoleLogger(ConsoleConfig(**{"every": 1, **config}), run, console), out


def shown(out):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).splitlines()


def test_a_terminal_shows_bar_status_and_aligned_rows(tmp_path):
    logger, out = live(tmp_path)
    logger.log(1, {"loss": 0.5, "rewards/margins": 1.25, "tokens": 100.0, "seconds/step": 0.5})
    logger.log(2, {"loss": 0.25, "rewards/margins": 2.0, "tokens": 100.0, "seconds/step": 2.0})
    logger.status("rollouts, 3 of 8 episodes finished")
    logger._view._progress.refresh()
    logger.close(failed=False)
    text = "\n".join(shown(out))
    assert "waiting on: rollouts, 3 of 8 episodes finished" in text
    assert "2/4" in text
    assert "ETA" in text
    rows = [line.split() for line in text.splitlines()]
    header = ["step", "loss", "rewards/margins", "tokens/s", "s/step"]
    assert [rows.count(r) for r in (header, ["1", "0.5", "1.25", "200", "0.5"], ["2", "0.25", "2", "50", "2"])] == [
        1
    ] * 3


def test_a_narrow_bar_says_what_is_waited_for_without_words_before_it(tmp_path):
    logger, out = live(tmp_path, 80)
    logger.status("rollouts, 3 of 128 episodes finished")
    logger._view._progress.refresh()
    logger._view._progress.stop()
    assert "rollouts, 3 of 128 episodes" in "\n".join(shown(out))
    assert "waiting on" not in out.getvalue()


ROLLOUTS = {"loss": 0.5, "reward/mean": 0.25, "reward/std": 0.5, "response_length/mean": 17.25,
            "response_length/cut": 0.125, "grad_norm": 1.0, "seconds/step": 2.0}  # fmt: skip


def test_columns_adapt_to_the_metrics_of_the_run():
    data = {"tokens": 1, "grad_norm": 1, "loss": 1, "validation/loss": 2, "rewards/margins": 3, "rewards/accuracies": 4}
    assert chosen(data) == ["loss", "rewards/accuracies", "rewards/margins"]
    assert chosen(ROLLOUTS) == ["reward/mean", "reward/std", "response_length/mean", "response_length/cut"]
    assert chosen({"reward/a": 1, "reward/b": 1, "loss": 1}, ["reward/*", "loss"]) == ["reward/a", "reward/b", "loss"]


def test_columns_stay_the_same_when_validation_comes_and_goes(tmp_path):
    logger, out = live(tmp_path)
    logger.log(1, {"loss": 0.5})
    logger.log(2, {"loss": 0.5, "validation/loss": 0.75, "validation/perplexity": 2.0})
    logger.log(3, {"loss": 0.5})
    logger._view._progress.stop()
    assert sum(line.startswith("  step") for line in shown(out)) == 1
    assert "validation after step 2: loss 0.75, perplexity 2" in shown(out)


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


def test_a_response_length_has_no_best_and_dropping_nothing_no_row():
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
SKIPPED = {**FINE, "skipped_steps": 2.0, "grad_norm": 0.0}


@pytest.mark.parametrize(
    ("steps", "hints"),
    [
        ([NOTHING] * 12, ["all rewards were 0 in 5 steps in a row"]),
        ([SAME] * 12, ["in 5 steps in a row the rewards within each group were equal"]),
        ([SAME] * 3 + [NOTHING] * 5, ["all rewards were 0"]),
        (([NOTHING] * 4 + [FINE]) * 3, []),
        ([SKIPPED] * 12, ["in 5 steps in a row no token was trained on"]),
        (([SKIPPED] * 4 + [FINE]) * 3 + [{**SKIPPED, "grad_norm": 0.1}] * 6, []),
        ([{"reward/mean": 0.0}] * 9 + [{"loss": 0.0}] * 9, []),
    ],
)
def test_steps_that_teach_nothing_get_one_line_of_hint(tmp_path, steps, hints):
    logger, out = plain(tmp_path, ConsoleConfig(metrics=["nothing"]))
    for i, metrics in enumerate(steps, 1):
        logger.log(i, metrics)
    lines = out.getvalue().splitlines()
    assert [line.startswith(hint) for line, hint in zip(lines, hints, strict=True)] == [True] * len(hints)


def test_eighty_columns_hold_the_usual_row_of_rollouts(tmp_path):
    logger, out = live(tmp_path, 80)
    logger.log(1, ROLLOUTS)
    logger._view._progress.stop()
    above, below, row = [line.split() for line in shown(out) if line.strip() and "a-run" not in line][:3]
    assert above == ["reward/", "reward/", "response_length/", "response_length/"]
    assert below == ["step", "mean", "std", "mean", "cut", "s/step"]
    assert row == ["1", "0.25", "0.5", "17.25", "0.125", "2"]


@pytest.mark.parametrize("width", [12, 20, 36, 60, 80, 100])
def test_a_narrow_terminal_cuts_no_name_and_no_number(tmp_path, width):
    logger, out = live(tmp_path, width)
    startup = {"seconds/startup": 9.0, **{f"seconds/startup.role{i}.start": 1.0 for i in range(8)}}
    logger.log(1, {**ROLLOUTS, **startup})
    logger._view._progress.stop()
    text = "".join("".join(shown(out)).split())
    assert all(f"role{i}.start1.0" in text for i in range(8))
    assert "0.25" in text
    known = {part for name in (*ROLLOUTS, "s/step") for part in (name, *name.split("/"))}
    rows = [line for line in shown(out) if line.startswith(("  step", " " * 6)) and "a-run" not in line]
    words = {word.strip("/") for line in rows for word in line.split()}
    assert words <= {*known, "step", "..."}


LONG = {f"evaluation/olympiad/{figure}{end}": value for figure in ("reward", "correct", "response_length")
        for end, value in (("", 0.4219), ("/ci_low", 0.3125), ("/ci_high", 0.5313))}  # fmt: skip


@pytest.mark.parametrize(("width", "intervals"), [(200, 3), (120, 1), (94, 0), (40, 1)])
def test_intervals_give_way_before_names_do(tmp_path, width, intervals):
    logger, out = live(tmp_path, width)
    logger.log(1, {"loss": 0.5, **LONG})
    line = "".join(part for part in shown(out) if "a-run" not in part).replace(" ", "")
    assert line.count("(0.3125to0.5313)") == intervals
    assert all(f"{figure}0.4219" in line for figure in ("reward", "correct", "response_length"))
    logger._view._progress.stop()


@pytest.mark.parametrize(
    ("width", "columns"),
    [(140, ["first", "last", "best", "at", "step"]), (72, ["first", "last", "best", "at", "step"]),
     (46, ["first", "last"]), (36, ["last"])],
)  # fmt: skip
def test_the_summary_leaves_out_intervals_then_columns_and_cuts_no_name(tmp_path, width, columns):
    logger, out = live(tmp_path, width)
    logger.log(1, LONG)
    logger.close(failed=False)
    lines = shown(out)
    at = next(
        i for i, line in enumerate(lines) if line.startswith("evaluation ") and line.split()[1] in ("first", "last")
    )
    assert lines[at].split()[1:] == columns
    table = "".join("".join(lines[at:]).split())
    assert all(f"olympiad/{figure}"[:12] in table for figure in ("reward", "correct", "response_length"))
    assert "…" not in table
    assert ("(" in table) == (width == 140)


def test_no_length_is_below_0(tmp_path):
    logger, out = plain(tmp_path)
    name = "evaluation/test/response_length"
    logger.log(0, {name: 9.0, f"{name}/ci_low": -3.5, f"{name}/ci_high": 21.5})
    logger.close(failed=False)
    assert "response_length 9 (0 to 21.5)" in out.getvalue()
    assert "-3.5" not in out.getvalue()


def test_a_resumed_run_is_summed_up_from_its_beginning(tmp_path):
    rows = [{"step": 0, "time": 1.0, "evaluation/test/reward": 0.125}, {"step": 9, "evaluation/test/reward": 0.99}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 1, "lo')
    logger, out = plain(tmp_path, resumed_from=5)
    logger.log(10, {"evaluation/test/reward": 0.5})
    logger.close(failed=False)
    line = next(line for line in out.getvalue().splitlines() if line.startswith("test/reward"))
    assert line.split() == ["test/reward", "0.125", "0.5", "0.5", "10"]


def test_responses_of_the_first_tasks_stand_side_by_side(tmp_path):
    write_records(tmp_path, 0, [(0, 0, "worse", 0.0), (0, 1, "other sample", 1.0), (1, 0, "x", 0.0)])
    write_records(tmp_path, 7, [(0, 0, "better", 1.0), (1, 0, "y", 0.0)])
    logger, out = plain(tmp_path, ConsoleConfig(responses=1))
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
