"""What people see and do in a real browser. Skipped where there is none."""

import json

import pytest

from whet.run.run_folder import RunFolder
from whet_report.page import write_page
from whet_report.run import read_run

VIEWS = ("overview", "metrics", "time", "rollouts", "gaps", "run")


@pytest.fixture(scope="module")
def browser(tmp_path_factory, browsers):
    program = browsers.find()
    if program is None:
        pytest.skip(f"no browser is installed; wanted one of {', '.join(browsers.NAMES)} on the PATH")
    made = browsers.Browser(program, tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory, run_folders):
    folder = run_folders.write(tmp_path_factory.mktemp("run"), run_folders.HOSTILE)
    write_page(folder / "report.html", read_run(folder))
    return folder / "report.html"


@pytest.fixture
def opened(browser, page):
    browser.events.clear()
    browser.open(page)
    yield browser
    assert browser.complaints == []
    assert browser.requests == []


def text(browser, selector="main"):
    return browser.run(f"document.querySelector({json.dumps(selector)}).innerText")


def test_every_view_shows_hostile_output_as_text(opened):
    for view in VIEWS:
        opened.go(view)
        opened.wait("document.querySelector('main').childElementCount > 0")
        assert opened.run("document.querySelectorAll('main script, main img, main iframe').length") == 0
    opened.go("rollouts")
    opened.wait("document.querySelector('.tokens')")
    shown = text(opened, ".tokens")
    assert "<script>alert(1)</script><img src=x onerror=alert(2)>" in shown
    assert "\u202e" not in shown
    assert "\x1b" not in shown
    assert "202E" in shown
    assert "001B" in shown


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_that_is_opened_by_its_address_begins_at_the_top(opened, page, view):
    opened.open(page, view)
    assert opened.run("new Promise((done) => setTimeout(() => done(scrollY), 100))") == 0


def test_the_first_view_says_how_it_went(opened):
    shown = text(opened)
    assert "12 / 12" in shown
    assert "failed" in text(opened, "header")
    assert "backend 0 died" in shown
    opened.wait("document.querySelectorAll('.chart svg path').length >= 3")


def test_a_chart_reads_its_values_under_the_pointer(opened):
    opened.go("metrics")
    chart = "[data-chart='reward/mean'] .area"
    opened.place("[data-chart='reward/mean']")  # charts are drawn once they come into sight
    opened.wait(f"document.querySelector({json.dumps(chart)})")
    opened.hover(chart)
    opened.wait("!document.querySelector('#tip').hidden")
    shown = text(opened, "#tip")
    step = int(shown.split()[1])
    assert step in (6, 7)  # the middle of 1 to 12
    assert f"{step / 12:.4g}" in shown


def test_searching_leaves_the_metrics_that_are_meant(opened):
    opened.go("metrics")
    # The group of seconds is closed, and what never changed is no chart.
    assert opened.run("document.querySelectorAll('[data-chart]').length") == 5
    opened.click("input[type=search]")
    opened.type("reward")
    opened.wait("document.querySelectorAll('[data-chart]').length === 2")
    assert "2 of" in text(opened)


def test_peaks_of_memory_stand_beside_their_predictions(opened):
    opened.go("run")
    opened.wait("document.querySelector('#memory td') !== null")
    rows = opened.run("[...document.querySelectorAll('#memory tbody tr')].map((row) => row.innerText)")
    assert [[cell.strip() for cell in row.split("\t") if cell.strip()] for row in rows] == [
        ["backend", "loading", "256 MiB", "–", "–", "not predicted"],
        ["backend", "train", "1.6 GiB", "1.5 GiB", "+6.7 %", "trace"],
    ]
    row = "document.querySelectorAll('#memory tbody tr')[1]"
    assert opened.run(f"+{row}.querySelector('rect').getAttribute('width')") == 100
    mark = opened.run(f"+{row}.querySelector('.predicted').getAttribute('x')")
    assert mark == pytest.approx(100 * 1.5 / 1.6, abs=1)


def test_a_click_on_a_step_shows_tokens_and_the_pointer_their_numbers(opened):
    opened.go("rollouts")
    opened.click("[data-step='2']")
    opened.wait("document.querySelector('[data-step=\"2\"]').getAttribute('aria-pressed') === 'true'")
    opened.wait("document.querySelectorAll('.tokens .t').length === 5")
    opened.hover(".tokens .t", 3)
    opened.wait("!document.querySelector('#tip').hidden")
    shown = text(opened, "#tip")
    for part in (
        "token id\t8",
        "sampler's logprob\t−1.5",
        "(22.3 %)",
        "gap\t0 nats",
        "weight version\t1",
        "advantages\t0.75",
        "weights\t−0.5",
    ):
        assert part in shown


@pytest.mark.parametrize(
    ("mode", "painted"),
    [("gap", {4}), ("advantages", {2, 3, 4}), ("mask", {2, 3, 4}), ("version", {2, 3, 4}), ("logprob", {2, 3, 4})],
)
def test_tokens_are_coloured_by_what_is_chosen(opened, mode, painted):
    opened.go("rollouts")
    opened.click("[data-step='10']")
    opened.run(f"(() => {{ const s = [...document.querySelectorAll('#episode select')][0]; s.value = {mode!r};"
               "s.dispatchEvent(new Event('change')); })()")  # fmt: skip
    colours = opened.run("[...document.querySelectorAll('.tokens .t')].map((t) => getComputedStyle(t).backgroundColor)")
    assert {i for i, colour in enumerate(colours) if colour != "rgba(0, 0, 0, 0)"} == painted


def test_the_widest_gap_leads_to_its_token(opened):
    opened.go("gaps")
    widths = opened.run("[...document.querySelectorAll('#worst tbody td:first-child')].map((cell) => cell.innerText)")
    assert widths[:3] == ["0.25", "3e−6", "1e−6"]
    opened.click("#worst tbody tr")
    opened.wait("location.hash === '#rollouts' && document.querySelector('.t.at')")
    assert text(opened, ".t.at") == "<|end|>"


def test_episodes_are_found_by_reward(opened):
    opened.go("rollouts")
    opened.click("[data-step='3']")
    assert opened.run("document.querySelectorAll('.item').length") == 4
    opened.click("input[type=number]")
    opened.type("2")
    opened.run("document.activeElement.blur()")
    opened.wait("document.querySelectorAll('.item').length === 2")
    assert "No" not in text(opened, ".list")


def test_bars_of_time_lead_to_the_spans_of_a_step(opened):
    opened.go("time")
    opened.wait("document.querySelectorAll('.bar-hit').length === 12")
    opened.click(".bar-hit", 4)
    opened.wait("document.querySelector('#timeline h2').innerText.includes('step 5')")
    opened.wait("document.querySelectorAll('#timeline rect').length === 3")


def test_a_run_of_data_files_has_every_view_too(browser, tmp_path):
    RunFolder(tmp_path).append("metrics.jsonl", [{"step": n, "time": 1.0 * n, "loss": 1 / n} for n in range(1, 9)])
    write_page(tmp_path / "report.html", read_run(tmp_path))
    browser.events.clear()
    browser.open(tmp_path / "report.html")
    for view in VIEWS:
        browser.go(view)
    browser.go("rollouts")
    assert "learns from data files" in text(browser)
    assert browser.complaints == []


def test_what_is_never_below_0_has_no_axis_and_no_interval_below_it(browser, tmp_path):
    def judged(name, value, half):
        figure = f"evaluation/{name}/reward"
        return {figure: value, f"{figure}/ci_low": value - half, f"{figure}/ci_high": value + half}

    run = RunFolder(tmp_path)
    run.append("metrics.jsonl", [{"step": 0, "time": 1.0, **judged("once", 0.1, 1.0)}])
    for step in range(1, 9):
        row = judged("sums", 0.02 * step, 0.3) | judged("games", 0.02 * step - 0.05, 0.3)
        run.append("metrics.jsonl", [{"step": step, "time": 1.0 + step, **row}])
    write_page(tmp_path / "report.html", read_run(tmp_path))
    browser.events.clear()
    browser.open(tmp_path / "report.html", "metrics")

    def below(name):
        chart = f"[data-chart='evaluation/{name}/reward'] svg"
        browser.place(chart)
        browser.wait(f"document.querySelector({json.dumps(chart + ' circle')})")
        texts = browser.run(f"[...document.querySelectorAll({json.dumps(chart + ' text')})].map((t) => t.textContent)")
        lowest = browser.run(
            f"(() => {{ const box = document.querySelector({json.dumps(chart)}); const bottom = box.clientHeight - 24;"
            "return Math.max(...[...box.querySelectorAll('line:not(.axis):not(.cursor)')].map((l) =>"
            "Math.max(l.getAttribute('y1'), l.getAttribute('y2')))) - bottom; })()"
        )
        return any(found.startswith("−") for found in texts), lowest <= 0

    assert below("sums") == (False, True)
    assert below("once") == (False, True)
    assert below("games") == (True, True)  # a reward that can be negative keeps its interval
    assert browser.complaints == []


def width(browser):
    return browser.run("document.documentElement.scrollWidth")


@pytest.mark.parametrize("columns", [420, 800])
@pytest.mark.parametrize("view", VIEWS)
def test_a_narrow_window_is_never_scrolled_sideways(opened, view, columns):
    opened.resize(columns, 900)
    try:
        opened.go(view)
        opened.wait("document.querySelector('main').childElementCount > 0")
        assert width(opened) <= columns
        inside = "[...document.querySelectorAll('main *')].filter((e) => e.scrollWidth > e.clientWidth + 1"
        inside += " && ['auto', 'scroll'].includes(getComputedStyle(e).overflowX)).map((e) => e.className)"
        assert opened.run(inside) == []
    finally:
        opened.resize(1280, 900)


def test_a_narrow_window_breaks_no_word_of_the_journal_and_the_plan(opened):
    opened.resize(420, 900)
    try:
        opened.go("run")
        opened.wait("document.querySelector('#plan td') !== null")
        cells = "[...document.querySelectorAll('#journal td:nth-child(2), #plan td')]"
        assert opened.run(f"Math.max(...{cells}.map((e) => e.offsetHeight))") < 40, "a cell has two lines"
    finally:
        opened.resize(1280, 900)


def test_the_right_answer_stands_with_the_rollout_as_text(opened):
    opened.go("rollouts")
    opened.click("[data-step='2']")
    shown = text(opened, ".gold pre")
    assert shown.startswith("gold <script>alert(1)</script><img")
    assert "\u202e" not in shown
    assert "right answer" in text(opened, ".facts")
    assert opened.run("document.querySelectorAll('main img').length") == 0


def test_samples_of_a_group_stand_side_by_side_with_their_advantages(opened):
    opened.go("rollouts")
    opened.click("[data-step='3']")
    opened.wait("document.querySelectorAll('#group .sample').length === 4")
    told = opened.run("[...document.querySelectorAll('#group .advantage')].map((e) => e.innerText)")
    assert told == ["advantage −1.5", "advantage −0.5", "advantage 0.5", "advantage 1.5"]
    colours = opened.run("[...document.querySelectorAll('.advantage')].map((e) => getComputedStyle(e).backgroundColor)")
    assert len(set(colours)) == 4
    opened.click("[data-sample='2']")
    opened.wait("document.querySelector('[data-sample=\"2\"]').getAttribute('aria-pressed') === 'true'")
    assert "3 · 2" in text(opened, ".facts")


def test_a_task_is_followed_over_the_evaluations(opened):
    opened.go("rollouts")
    opened.click(".turns button", 1)
    opened.wait("document.querySelectorAll('#history tbody tr').length === 2")
    rows = opened.run("[...document.querySelectorAll('#history tbody td:first-child')].map((e) => e.innerText)")
    assert rows == ["5", "10"]
    opened.wait("document.querySelectorAll('#history circle').length === 2")
    opened.click("#history tbody tr")
    opened.wait("document.querySelector('[data-step=\"5\"]').getAttribute('aria-pressed') === 'true'")
    opened.click(".turns button")
    opened.wait("document.querySelector('#history p')")  # each training task of this run was played once


def made(browser, tmp_path, rows, view="overview", rollouts=()):
    run = RunFolder(tmp_path)
    run.append("metrics.jsonl", [{"step": i, "time": 1.0 * i, **row} for i, row in enumerate(rows, 1)])
    for step, episodes in rollouts:
        run.append(f"rollouts/step-{step:06d}.jsonl", episodes)
    write_page(tmp_path / "report.html", read_run(tmp_path))
    browser.events.clear()
    browser.open(tmp_path / "report.html", view)


def test_the_first_view_has_kl_deviation_and_cut(browser, tmp_path):
    rows = [{"reward/mean": 0.1 * i, "reward/std": 0.3 + 0.01 * i, "response_length/cut": 0.01 * i,
             "kl_reference/k1": -0.1, "kl_reference/k3": 0.02 * i, "lr": 1e-5} for i in range(10)]  # fmt: skip
    made(browser, tmp_path, rows)
    shown = text(browser)
    for part in ("Reward deviation\n0.39", "Cut\n9 %", "KL\n0.18\nkl_reference/k3, last tenth"):
        assert part in shown
    charts = browser.run("[...document.querySelectorAll('[data-chart]')].map((e) => e.dataset.chart)")
    assert charts == ["reward", "reward/std", "kl_reference/k3", "response_length/cut"]  # no chart of a constant rate
    assert browser.complaints == []


def test_metrics_that_never_change_are_folded_into_their_value(browser, tmp_path):
    made(browser, tmp_path, [{"loss": 1.0 / i, "lr": 1e-5, "grad_norm": 0.5} for i in range(1, 9)], "metrics")
    assert browser.run("[...document.querySelectorAll('[data-chart]')].map((e) => e.dataset.chart)") == ["loss"]
    assert browser.run("document.querySelector('.still').open") is False
    browser.click(".still summary")
    assert text(browser, ".still .facts").split() == ["grad_norm", "0.5", "lr", "1e−5"]
    assert browser.complaints == []


@pytest.mark.parametrize(("low", "high"), [(2.1e-6, 4.4e-6), (0.011, 0.012), (6e-6, 8e-6), (3e-7, 2e-6), (1e-8, 1e-2)])
def test_a_log_chart_has_labels_whatever_its_range(browser, tmp_path, low, high):
    made(browser, tmp_path, [{"logprob_gap/max": low + (high - low) * i / 8} for i in range(9)], "gaps")
    browser.wait("document.querySelector('[data-chart] svg text')")
    labels = "[...document.querySelectorAll('[data-chart] svg text[text-anchor=end]')].map((e) => e.textContent)"
    found = browser.run(labels)
    assert len(found) >= 2
    assert len(set(found)) == len(found)
    assert browser.complaints == []


def test_samples_that_begin_alike_are_one_row_of_gaps(browser, tmp_path, run_folders):
    alike = [run_folders.episode(1, sample, 1, "so", 0.25) for sample in range(3)]
    other = [run_folders.episode(2, 0, 1, "so", 0.5)]
    made(browser, tmp_path, [{"loss": 1.0}], "gaps", [(1, alike + other)])
    first = browser.run("[...document.querySelectorAll('#worst tr.link')].map((r) => r.children[6].innerText)")
    assert first[:2] == ["2 · 0", "1 · 0, 1, 2 (3 alike)"]
    assert browser.complaints == []


def test_rollouts_of_an_older_run_need_neither_answer_nor_advantage(browser, tmp_path, run_folders):
    old = [run_folders.episode(1, sample, 1, "so", 0.25 if sample else None) for sample in range(3)]
    for row in old:
        del row["gold"], row["advantage"]
    old[2]["sequences"][0]["columns"] = {}
    odd = [{"group": None, "gold": {"a": ["<b>"]}, "advantage": "x"}, {"group": 1, "task": None, "gold": 5}]
    made(browser, tmp_path, [{"loss": 1.0}, {"loss": 2.0}], "rollouts", [(1, old), (2, odd)])
    for step in (2, 1):
        browser.click(f"[data-step='{step}']")
        for i in range(browser.run("document.querySelectorAll('.item').length")):
            browser.click(".item", i)
            browser.wait("document.querySelector('#episode')")
    told = browser.run("[...document.querySelectorAll('#group .sample')].map((e) => e.innerText.includes('advantage'))")
    assert told == [False, True, False]
    assert browser.complaints == []
