"""The watchdog kills what its driver started when the driver is gone, and only then."""

import os
import subprocess
import sys

from whet.runtime.watchdog import FAMILY, Watchdog

WAITS_FOR_THE_END_OF_ITS_INPUT = "import os; os.write(1, b'here'); os.read(0, 1)"


def test_a_process_that_is_not_guarded_yet_outlives_the_last_one_that_was() -> None:
    watchdog = Watchdog()
    environment = {**os.environ, FAMILY: f"{watchdog.family}.7."}
    command = [sys.executable, "-c", WAITS_FOR_THE_END_OF_ITS_INPUT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as starting:
        assert starting.stdout is not None
        assert starting.stdout.read(4) == b"here"
        with subprocess.Popen([sys.executable, "-c", ""], start_new_session=True) as ending:
            watchdog.guard("group", str(ending.pid))
            ending.wait()
            watchdog.release("group", str(ending.pid))  # returns when the watchdog has ended
        assert starting.stdin is not None
        starting.stdin.close()
        assert starting.wait() == 0, "the watchdog killed it"
