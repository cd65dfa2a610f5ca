"""Loggers and hooks watch a run and can never end it."""

import re
import threading

import pytest
from attrs import define

from whet import hookimpl
from whet.data.files import read_rows
from whet.errors import PluginError
from whet.interfaces.logger import Event
from whet.plugins.registry import new_manager
from whet.run.observers import Observers
from whet.run.run_folder import RunFolder
from whet.run.steps import Interrupted


class Notes:
    """A logger that notes, and fails when told to."""

    def __init__(self, fail=None):
        self.fail, self.seen = fail, []

    def log(self, step, metrics):
        if self.fail:
            raise self.fail("dashboard unreachable")
        self.seen.append((step, dict(metrics)))

    def status(self, text):
        self.seen.append(text)

    def rewind(self, step):
        self.seen.append(("rewound", step))

    def close(self, failed):
        self.seen.append(("closed", failed))


@pytest.mark.parametrize("kind", [ConnectionError, SystemExit])
def test_a_failing_logger_is_dropped_and_noted(tmp_path, kind, caplog):
    good, bad = Notes(), Notes(fail=kind)
    observers = Observers(new_manager(), RunFolder(tmp_path))
    observers.add("bad", bad)
    observers.add("good", good)
    observers.log(1, {"loss": 0.5})
    observers.log(2, {"loss": 0.4})
    observers.close()
    observers.close()
    assert good.seen == [(1, {"loss": 0.5}), (2, {"loss": 0.4}), ("closed", False)]
    assert bad.seen == []
    (row,) = read_rows(tmp_path / "journal.jsonl")
    assert (row["event"], row["message"]) == ("watcher failed", "dashboard unreachable")
    (warning,) = caplog.messages
    assert warning.startswith(
        f"logger bad-0 failed, and is not called any more: {kind.__name__}: dashboard unreachable"
    )
    assert "test_observers.py:" in warning


def test_a_logger_with_a_part_of_a_state_is_refused(tmp_path):
    class Forgetful(Notes):
        def state(self):
            return {}

    with pytest.raises(PluginError, match=r"logger 'charts' \(.*Forgetful\) has the method `state` and no `load`"):
        Observers(new_manager(), RunFolder(tmp_path)).add("charts", Forgetful())


class Counting(Notes):
    """A logger whose state is the number of its steps."""

    def state(self):
        return {"steps": len(self.seen)}

    def load(self, state):
        self.seen = [None] * state["steps"]


def test_a_state_finds_its_logger_when_others_come_and_go(tmp_path, caplog):
    before, after = (Observers(new_manager(), RunFolder(tmp_path)) for _ in range(2))
    for name, logger in (("console", Notes()), ("ema", Counting()), ("ema", Counting()), ("gone", Counting())):
        before.add(name, logger)
    before.log(1, {})
    first, second = Counting(), Counting()
    for name, logger in (("ema", first), ("console", Notes()), ("ema", second)):
        after.add(name, logger)
    after.load(before.state())
    assert (first.state(), second.state()) == ({"steps": 1}, {"steps": 1})
    (warning,) = caplog.messages
    assert warning.startswith("the checkpoint has a state of the logger gone-0, and the run has no such logger")


def test_a_logger_or_hook_that_is_async_is_a_failing_one(tmp_path, caplog):
    class Async(Notes):
        async def log(self, step, metrics): ...

    class Hooks:
        @hookimpl
        async def whet_step_finished(self, step, metrics): ...

    manager = new_manager()
    manager.register(Hooks())
    observers = Observers(manager, RunFolder(tmp_path))
    observers.add("later", Async())
    observers.log(1, {})
    observers.log(2, {})
    of_logger, of_hook = caplog.messages
    assert re.search(r"logger later-0 failed.*Async.log` must neither be `async def` nor contain `yield`", of_logger)
    assert re.search(
        r"hook whet_step_finished of .*Hooks failed: .*Hooks.whet_step_finished` must neither be `async def`", of_hook
    )


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_hook_that_fails_keeps_no_other_from_being_called(tmp_path, caplog, order):
    @define
    class Counting:
        seen: int = 0

        @hookimpl
        def whet_step_finished(self, step, metrics):
            self.seen += step

    class Failing:
        @hookimpl
        def whet_step_finished(self, step, metrics):
            raise KeyError("loss")

    manager, plugins = new_manager(), (Counting(), Failing())
    for number in order:
        manager.register(plugins[number])
    observers = Observers(manager, RunFolder(tmp_path))
    observers.log(1, {})
    observers.log(2, {})
    assert plugins[0].seen == 3
    (message,) = caplog.messages
    assert re.search(r"hook whet_step_finished of .*Failing failed", message)


class Seer(Notes):
    """A logger that also wants events."""

    def event(self, event):
        if self.fail:
            raise self.fail("no room for events")
        self.seen.append(event)


def test_events_reach_the_loggers_that_want_them_in_order(tmp_path):
    folder, plain, seer = RunFolder(tmp_path), Notes(), Seer()
    observers = Observers(new_manager(), folder)
    observers.add("plain", plain)
    observers.add("seer", seer)
    observers.log(1, {})
    folder.journal("saved", step=1)
    observers.log(2, {})
    observers.close()
    folder.journal("closed")
    assert plain.seen == [(1, {}), (2, {}), ("closed", False)]
    assert seer.seen == [(1, {}), Event("saved", 1, details={"step": 1}), (2, {}), ("closed", False)]


def test_what_an_observer_does_to_its_metrics_and_events_reaches_no_other(tmp_path):
    class Changing(Seer):
        def log(self, step, metrics):
            metrics.clear()

        def event(self, event):
            event.details["name"] = "changed"
            event.rows[0]["texts"] = []

    class Hooks:
        @hookimpl
        def whet_step_finished(self, step, metrics):
            metrics["loss"] = 42

    class Later(Hooks):
        seen = []

        @hookimpl
        def whet_step_finished(self, step, metrics):
            self.seen.append(dict(metrics))

    folder, manager, seer, numbers = RunFolder(tmp_path), new_manager(), Seer(), {"loss": 0.5}
    manager.register(Later())
    manager.register(Hooks())
    observers = Observers(manager, folder)
    for name, logger in {"before": Changing(), "seer": seer, "after": Changing()}.items():
        observers.add(name, logger)
    event = Event("table", 1, "worst", {"name": "worst"}, [{"texts": ["a"]}])
    folder.listener(event)
    observers.log(1, numbers)
    assert numbers == {"loss": 0.5}
    assert seer.seen == [Event("table", 1, "worst", {"name": "worst"}, [{"texts": ["a"]}]), (1, {"loss": 0.5})]
    assert Later.seen == [{"loss": 0.5}]


def test_a_function_that_builds_no_logger_is_named(tmp_path):
    with pytest.raises(PluginError, match="builds the logger 'charts' returned None; return the logger"):
        Observers(new_manager(), RunFolder(tmp_path)).add("charts", None)


def test_a_logger_that_fails_at_an_event_is_dropped_and_the_others_see_that(tmp_path):
    folder, good, bad, worse = RunFolder(tmp_path), Seer(), Seer(fail=OSError), Seer(fail=SystemExit)
    observers = Observers(new_manager(), folder)
    for name, logger in {"bad": bad, "good": good, "worse": worse}.items():
        observers.add(name, logger)
    folder.journal("saved", step=1)
    observers.log(1, {"loss": 0.5})
    assert [event.details.get("who", "") for event in good.seen[:-1]] == ["", "logger bad-0", "logger worse-0"]
    assert good.seen[-1] == (1, {"loss": 0.5})
    assert [row["event"] for row in read_rows(tmp_path / "journal.jsonl")].count("watcher failed") == 2


def test_an_event_of_another_thread_reaches_loggers_on_the_drivers(tmp_path):
    class Where(Seer):
        def event(self, event):
            self.seen.append(threading.current_thread())

    folder, seer = RunFolder(tmp_path), Where()
    observers = Observers(new_manager(), folder)
    observers.add("seer", seer)
    thread = threading.Thread(target=folder.journal, args=["group dropped"])
    thread.start()
    thread.join()
    assert seer.seen == []
    observers.log(1, {})
    assert seer.seen == [threading.current_thread(), (1, {})]


def test_a_signal_that_comes_while_a_logger_works_is_not_the_loggers_failure(tmp_path):
    class Interrupting(Notes):
        def status(self, text):
            raise Interrupted

    observers = Observers(new_manager(), RunFolder(tmp_path))
    observers.add("slow", Interrupting())
    with pytest.raises(Interrupted):
        observers.status("rollouts, 3 of 8 episodes finished")


def test_hooks_see_every_step_and_a_failing_one_is_noted(tmp_path):
    class Plugin:
        seen = []

        @hookimpl
        def whet_step_finished(self, step, metrics):
            self.seen.append(step)
            if step == 2:
                raise ValueError("no")

    manager = new_manager()
    manager.register(Plugin())
    observers = Observers(manager, RunFolder(tmp_path))
    for step in (1, 2, 3):
        observers.log(step, {})
    assert Plugin.seen == [1, 2, 3]
    (row,) = read_rows(tmp_path / "journal.jsonl")
    assert "whet_step_finished" in row["who"]


def test_an_algorithm_whose_run_only_returns_a_coroutine_or_a_generator_is_refused(tmp_path):
    class Async:
        async def run(self, parts): ...

    class Generator:
        def run(self, parts):
            yield

    hooks = Observers(new_manager(), RunFolder(tmp_path)).hooks
    for algorithm in (Async(), Generator()):
        words = f"{type(algorithm).__qualname__}.run` must neither be `async def` nor contain `yield`"
        with pytest.raises(PluginError, match=f"the algorithm did nothing: `{re.escape(words)}"):
            hooks.whet_run(algorithm=algorithm, parts="the parts")


def test_a_plugin_can_wrap_the_run(tmp_path):
    order = []

    class Profiler:
        @hookimpl(wrapper=True)
        def whet_run(self, algorithm, parts):
            order.append("before")
            result = yield
            order.append("after")
            return result

    class Algorithm:
        def run(self, parts):
            order.append(parts)

    manager = new_manager()
    manager.register(Profiler())
    hooks = Observers(manager, RunFolder(tmp_path)).hooks
    hooks.whet_run(algorithm=Algorithm(), parts="the parts")
    assert order == ["before", "the parts", "after"]
