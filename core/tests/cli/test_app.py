"""The command answers at once, and ends with the code that says how."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest


def test_help_answers_at_once_for_it_imports_next_to_nothing(command: Any, install_command: Any) -> None:
    install_command("whet-shine", "shine", "raise SystemExit('it is imported')", summary="Make it shine.")
    code = (
        "import sys; before = set(sys.modules);"
        "from whet.cli.app import group; group.main(['--help'], standalone_mode=False);"
        "print(*sorted({name.partition('.')[0] for name in sys.modules.keys() - before} - sys.stdlib_module_names));"
        "print(*sorted(name for name in sys.modules if name.startswith('whet.') and not name.startswith('whet.cli')))"
    )
    *said, others, ours = command(code=code).stdout.splitlines()
    assert others == "click whet"
    assert ours == "whet.errors whet.installed"
    for name in ("run", "check", "config", "doctor", "eval", "export", "plugins", "schema", "recipe"):
        assert any(line.startswith(f"  {name} ") for line in said)
    assert ["shine", "Make", "it", "shine."] in [line.split() for line in said]


def test_the_module_is_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "whet", "check", str(tmp_path / "a.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: "), done.stderr


def test_that_nobody_reads_any_more_does_not_change_the_code(tmp_path: Path) -> None:
    """Python's own for it is 120."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    code = "print('step 1'); from whet.cli import main; main()"
    command = [sys.executable, "-c", code, "check", str(tmp_path / "a.yaml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read().decode()
    assert process.returncode == 1, said
    assert said.startswith("Error: "), said
    assert len(said.splitlines()) == 1, said


@pytest.mark.parametrize("arguments", [["nothing"], ["check"], ["check", "a.yaml", "--nothing"], ["run"]])
def test_wrong_usage_ends_with_2(command: Any, arguments: list[str]) -> None:
    done = command(*arguments)
    assert done.returncode == 2
    assert "Usage: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["run", "check"])
def test_an_error_is_a_message_without_a_traceback_and_ends_with_1(command: Any, name: str) -> None:
    done = command(name, "none.yaml")
    assert done.returncode == 1
    assert "Error: there is no file 'none.yaml'\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_the_traceback_is_shown_where_it_is_asked_for(command: Any) -> None:
    done = command("check", "none.yaml", "--traceback")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ConfigError: there is no file 'none.yaml'" in done.stderr


WAITS = """
import time
print("waiting", flush=True)
for _ in range(3000):  # a signal that comes just before a call sleeps does not end the sleep
    time.sleep(0.1)
"""


@pytest.mark.parametrize("moment", ["while it runs", "while it imports"])
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGHUP, 129)],
)
def test_a_signal_ends_a_command_with_its_code(site: Path, install: Any, number: int, code: int, moment: str) -> None:
    if moment == "while it runs":
        install("whet-waits", {"waits_hooks": WAITS})
    else:
        (site / "click.py").write_text(WAITS)
    code_of_it = f"import sys; sys.path.insert(0, {str(site)!r}); from whet.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code_of_it, "run", "it.yaml"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what runs in its background with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code
    assert errors.strip() == f"ended by {'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name}"


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    code = (
        "import signal, sys, whet.cli; sys.argv[1:] = ['--help']; whet.cli._disarm = lambda: print(signal.getsignal(1))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nwhet.cli.main()"], capture_output=True, text=True, check=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )  # fmt: skip
    assert done.stdout.rstrip().endswith("Handlers.SIG_IGN") or done.stdout.rstrip().endswith("1")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_between_the_end_of_a_command_and_that_of_python_shows_no_traceback(number: int, code: int) -> None:
    code_of_it = f"""
import os, signal, sys
import whet.cli
disarm, sent = whet.cli._disarm, []
def late():
    sent.append(1)
    if len(sent) == 1:
        os.kill(os.getpid(), {int(number)})
    disarm()
whet.cli._disarm = late
sys.argv = ["whet", "--help"]
whet.cli.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code_of_it], capture_output=True, text=True, check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_without_a_terminal_what_libraries_write_goes_nowhere(tmp_path: Path) -> None:
    code = """
import faulthandler, sys
assert sys.stdout is sys.stderr is None
sys.argv = ["whet", "--help"]
from whet.cli.app import run_command
assert run_command() == 0
faulthandler.enable()  # as Ray does; it wants a file
print("said", file=sys.stderr, flush=True)
open("there", "w").close()
"""
    closed = ["sh", "-c", 'exec "$0" -c "$1" >&- 2>&-', sys.executable, code]
    assert subprocess.run(closed, cwd=tmp_path, check=False).returncode == 0
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("there", "")]


LEAVES_A_THREAD = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import whet.cli, whet.cli.app
whet.cli._PATIENCE_SECONDS = 1.0
def blocked():
    submit = ThreadPoolExecutor(thread_name_prefix="asyncio").submit
    daemon = threading.Thread(target=submit, args=[threading.Event().wait], daemon=True)
    daemon.start()
    daemon.join()
    threading.Thread(target=time.sleep, args=[3.0], name="upload").start()
    return 3
whet.cli.app.run_command = blocked
whet.cli.main()
"""


def test_a_blocked_call_in_a_thread_of_asyncio_is_named_and_not_waited_for():
    command = [sys.executable, "-c", LEAVES_A_THREAD]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 3
    assert done.stderr == "ended without asyncio_0: blocked calls of asyncio.to_thread\n"
    assert time.monotonic() - began > 3.0  # what the user's own threads do is waited for
