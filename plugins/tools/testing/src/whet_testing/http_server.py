"""A server in a thread of the test, for what talks HTTP or WebSocket. Needs `pip install 'whet-testing[http]'`."""

import asyncio
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from aiohttp import web


@contextmanager
def served(routes: Iterable[web.RouteDef]) -> Iterator[str]:
    """Serve routes on the loopback address, and yield the address. In the end no connection is waited for."""
    loop, ready, ended = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    addresses: list[str] = []

    async def run() -> None:
        app = web.Application()
        app.add_routes(routes)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        addresses.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()
        await ended.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert ready.wait(30), "the server did not start"
        yield addresses[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()
