"""Reading of request bodies, with limits on their size, their time and the total of unfinished bodies."""

from __future__ import annotations

import asyncio
import contextlib

from mlaforge.serving.admission import Disconnected, Message, Receive, Scope
from mlaforge.serving.wire import ApiError


class BodyReceive:
    """ASGI `receive` that records whether `more` of the body follows."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.more = True

    async def __call__(self) -> Message:
        message = await self._receive()
        self.more = message.get("more_body", False)
        return message

    async def discard(self, timeout: float) -> None:
        """Read and drop the rest of the body for at most `timeout` seconds. Closing a connection with unread bytes
        resets it, and a client that sends its whole body before it reads would not see the response."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.more:
                    await self()


class Bodies:
    """Reader of bodies of at most `max_size` bytes, each in at most `timeout` seconds.

    Unfinished bodies occupy at most `max_total` bytes. Beyond that, the body that has been idle for longest is
    abandoned, so that stalled clients do not block others.
    """

    def __init__(self, max_size: int, timeout: float, max_total: int) -> None:
        assert max_total >= max_size, (max_total, max_size)
        self._max_size, self._timeout, self._max_total = max_size, timeout, max_total
        # Clock of an unfinished body -> its bytes received so far; the one idle for longest first.
        self._unfinished: dict[asyncio.Timeout, int] = {}
        self._total = 0

    async def read(self, scope: Scope, receive: BodyReceive) -> bytes:
        """Return a request's body. Raises ApiError: 413 if it is too large, with or without Content-Length, 408 if it
        is too slow; raises Disconnected."""
        content_length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        too_large = ApiError(413, f"the body is larger than {self._max_size} bytes", code="body_too_large")
        if int(content_length) > self._max_size:
            raise too_large
        chunks, size = [], 0
        try:
            async with asyncio.timeout(self._timeout) as clock:
                try:
                    while receive.more:
                        message = await receive()
                        if message["type"] == "http.disconnect":
                            raise Disconnected
                        chunks.append(message.get("body", b""))
                        size += len(chunks[-1])
                        if size > self._max_size:
                            raise too_large
                        if receive.more:
                            self._count(clock, len(chunks[-1]))
                finally:
                    self._total -= self._unfinished.pop(clock, 0)
        except TimeoutError as error:
            reason = (
                f"the body was not received within {self._timeout:g} s, or was slower than others while the server was "
                "short of memory for bodies"
            )
            raise ApiError(408, reason, headers={"Connection": "close"}) from error
        return b"".join(chunks)

    def _count(self, clock: asyncio.Timeout, size: int) -> None:
        self._unfinished[clock] = self._unfinished.pop(clock, 0) + size
        self._total += size
        while self._total > self._max_total:
            idle = next(iter(self._unfinished))
            self._total -= self._unfinished.pop(idle)
            if not idle.expired():
                idle.reschedule(asyncio.get_running_loop().time())
