"""Bodies of requests on their way: each within a size and a time, those that are not whole yet within a room."""

from __future__ import annotations

import asyncio
import contextlib

from mlaforge.serving.admission import Disconnected, Message, Receive, Scope
from mlaforge.serving.wire import ApiError


class Incoming:
    """A request's `receive`, and whether there is `more` of its body."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.more = True

    async def __call__(self) -> Message:
        message = await self._receive()
        self.more = message.get("more_body", False)
        return message

    async def discard(self, timeout: float) -> None:
        """Reads what is left of the body and forgets it, `timeout` seconds at most. A connection that is closed while
        bytes lie in it unread is reset, and a client that sends everything before it reads would see no answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.more:
                    await self()


class Bodies:
    """Reads bodies of at most `most` bytes, each in at most `timeout` seconds.

    What has come of unfinished ones takes at most `room` bytes. Where it would be more, the body of which nothing has
    come for longest is given up, so that those who send nothing keep nobody out.
    """

    def __init__(self, most: int, timeout: float, room: int) -> None:
        assert room >= most, (room, most)
        self._most, self._timeout, self._room = most, timeout, room
        # Clock of an unfinished body -> bytes of it that have come; the one that has been silent for longest first.
        self._coming: dict[asyncio.Timeout, int] = {}
        self._bytes = 0

    async def read(self, scope: Scope, receive: Incoming) -> bytes:
        """A request's body. Raises ApiError: 413 where it is too large, announced or not, 408 where it is given up;
        raises Disconnected."""
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        too_large = ApiError(413, f"the body is larger than {self._most} bytes", code="body_too_large")
        if int(announced) > self._most:
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
                        if size > self._most:
                            raise too_large
                        if receive.more:
                            self._take(clock, len(chunks[-1]))
                finally:
                    self._bytes -= self._coming.pop(clock, 0)
        except TimeoutError as error:
            late = f"the body did not come within {self._timeout:g} s, or slower than those that needed its room"
            raise ApiError(408, late, headers={"Connection": "close"}) from error
        return b"".join(chunks)

    def _take(self, clock: asyncio.Timeout, size: int) -> None:
        self._coming[clock] = self._coming.pop(clock, 0) + size
        self._bytes += size
        while self._bytes > self._room:
            silent = next(iter(self._coming))
            self._bytes -= self._coming.pop(silent)
            if not silent.expired():
                silent.reschedule(asyncio.get_running_loop().time())
