"""A worker that ends a thread of its own process, for `test_threads.py`."""

import ctypes
import threading
import time

from whet_testing.scripted_worker import ObedientWorker


class LosingWorker(ObedientWorker):
    def lose_thread(self, name: str) -> None:
        """Raise `SystemExit` in a thread of this process, again and again: a call may get it in the thread's place."""
        while True:
            for ident in [thread.ident for thread in threading.enumerate() if thread.name == name]:
                assert ident is not None
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))
            time.sleep(2)

    async def touch(self) -> None:
        """Make the threads beside the compute thread run."""
