"""A TCP proxy with the bandwidth and latency of a thin line, so that loopback behaves like one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import TracebackType

_CHUNK_BYTES = 8192


class _Throttle:
    """One direction of a line: what passes through it passes one after the other, at its rate."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0

    async def carry(self, size: int) -> None:
        """Return when `size` bytes have passed."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + size / self._rate
        await asyncio.sleep(self._free_at - now)


class ThrottledProxy:
    """Forwards connections to a port of this machine while the block runs.

    Args:
        upload: bytes per second to the server, for all connections together; `download` is the way back.
        latency: seconds in each direction.
    """

    def __init__(self, server_port: int, *, upload: float, download: float, latency: float = 0.0) -> None:
        self._server_port, self._latency = server_port, latency
        self._rates = upload, download
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    def __enter__(self) -> ThrottledProxy:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> None:
        self._up, self._down = map(_Throttle, self._rates)
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0, limit=_CHUNK_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = [to_client]
        try:
            server, to_server = await asyncio.open_connection("127.0.0.1", self._server_port, limit=_CHUNK_BYTES)
            writers.append(to_server)
            ways = [(client, to_server, self._up), (server, to_client, self._down)]
            await asyncio.gather(*[self._forward(*way) for way in ways])
        except (ConnectionError, asyncio.CancelledError):
            pass  # one side is gone, or the proxy is closed
        finally:
            for writer in writers:
                writer.close()
            with contextlib.suppress(ConnectionError):
                await asyncio.gather(*[writer.wait_closed() for writer in writers])
            self._tasks.discard(task)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, throttle: _Throttle) -> None:
        """Read what has passed, and hand it on once the latency is over, without holding up what follows."""
        loop, under_way = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]]()
        handing_on = loop.create_task(self._hand_on(under_way, sink))
        try:
            while data := await source.read(_CHUNK_BYTES):
                await throttle.carry(len(data))
                under_way.put_nowait((loop.time() + self._latency, data))
            under_way.put_nowait((loop.time() + self._latency, b""))
            await handing_on
        finally:
            handing_on.cancel()

    async def _hand_on(self, under_way: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
        while True:
            time, data = await under_way.get()
            await asyncio.sleep(time - asyncio.get_running_loop().time())
            if not data:
                sink.close()
                return
            sink.write(data)
            await sink.drain()
