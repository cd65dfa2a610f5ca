"""What people see and do in a real browser. Skipped where there is none."""

import json

import pytest

from whet.report.page import write_page
from whet.report.run import read_run
from whet.run_folder import RunFolder

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
    assert opened.run("document.querySelectorAll('[data-chart]').length") == 5  # the group of seconds is closed
    opened.click("input[type=search]")
    opened.type("reward")
    opened.wait("document.querySelectorAll('[data-chart]').length === 2")
    assert "2 of" in text(opened)


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
