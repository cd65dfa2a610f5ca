"""The command line. A command imports what it needs when it runs, so that `whet --help` answers at once.

Exit codes: 0 done, 1 an error of the run or its config, 2 wrong usage; ended by Ctrl-C: 130, by SIGTERM or SIGUSR1:
143, by SIGHUP: 129.
"""

import gc
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_PATIENCE_SECONDS = 30.0  # for threads that have not ended when the command has


def main() -> None:
    """Run the command line and exit. Signals are handled before the slow imports."""
    gc.set_threshold(10_000)  # imports make many objects, and by default a quarter of their time goes to the collector
    try:
        for number in _ENDING:
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                signal.signal(number, _terminate)
        from whet.cli.app import run_command

        code = run_command()
        _disarm()  # a signal up to here is caught below
    except KeyboardInterrupt:
        _disarm()
        with suppress(OSError, AttributeError):
            print("ended by Ctrl-C", file=sys.stderr, flush=True)
        code = 128 + signal.SIGINT
    except Terminated as ended:
        _disarm()
        with suppress(OSError, AttributeError):
            print(f"ended by {signal.Signals(ended.number).name}", file=sys.stderr, flush=True)
        code = 128 + (signal.SIGTERM if ended.number == signal.SIGUSR1 else ended.number)
    _let_go_of_readers()
    gc.freeze()  # the interpreter's end would search all memory for cycles, which takes a second where torch is
    threading.Thread(target=_leave, args=[code], daemon=True).start()
    sys.exit(code)


class Terminated(BaseException):
    """Raised by a signal, as KeyboardInterrupt is by Ctrl-C. Code that handles errors must not swallow it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _disarm() -> None:
    """Restore what signals do by default: only Python's own exit is left, and would show tracebacks."""
    for number in (signal.SIGINT, *_ENDING):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _leave(code: int) -> None:
    """End the process if nothing but calls of `asyncio.to_thread` keeps it: an environment may be blocked in one."""
    left, others = list[str](), True
    while others or not left:
        time.sleep(_PATIENCE_SECONDS)
        alive = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
        # Python joins these, although they are daemons.
        left = [thread.name for thread in alive if thread.name.startswith("asyncio_")]
        others = any(not thread.daemon and thread.name not in left for thread in alive)
    with suppress(OSError, AttributeError):
        print(f"ended without {', '.join(left)}: blocked calls of asyncio.to_thread", file=sys.stderr, flush=True)
    os._exit(code)


def _let_go_of_readers() -> None:
    """Flush the output if there is a reader. Otherwise Python would report an error for `whet run it.yaml | head`."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (OSError, ValueError):  # Python reports it
            pass


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated(number)
