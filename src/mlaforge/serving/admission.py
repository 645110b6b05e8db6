"""Admission control: API keys, concurrent requests and their queue, clients that go or read nothing."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from mlaforge.serving.wire import ApiError, dumps

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
T = TypeVar("T")


class Disconnected(Exception):
    """The client has gone, or has read nothing for too long."""


class ApiKey:
    """ASGI middleware: every path but /health needs `Authorization: Bearer KEY`, compared in constant time."""

    def __init__(self, app: App, key: str) -> None:
        self._app, self._expected = app, key.encode("utf-8")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            await self._app(scope, receive, send)
            return
        authorization = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = authorization.partition(b" ")
        if hmac.compare_digest(key, self._expected) and scheme.lower() == b"bearer":
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "the API key is missing or wrong: Authorization: Bearer KEY", code="invalid_api_key")
        await send_json(send, 401, dumps(error.body()), {"WWW-Authenticate": "Bearer"})


async def send_json(send: Send, status: int, body: bytes, headers: dict[str, str], more_body: bool = False) -> None:
    """A whole response of JSON; with `more_body` its client has all of it, but the server not its end."""
    fields = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    raw = [(name.lower().encode("latin-1"), text.encode("latin-1")) for name, text in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": more_body})


def _queue_full(why: str) -> ApiError:
    return ApiError(429, why, code="queue_full", headers={"Retry-After": "1"})


class AdmissionControl:
    """Lets `slots` requests run at once and `queue` more wait, first come first served, with bodies of at most `room`
    bytes; refuses the rest.

    `admitted` counts those that run or wait, `running` those that hold a slot.
    """

    def __init__(self, slots: int, queue: int, room: int) -> None:
        self._capacity, self._room = slots + queue, room
        self._slots = asyncio.Semaphore(slots)
        self._idle = asyncio.Event()
        self._idle.set()
        self.admitted = 0
        self.running = 0
        self.draining = False
        # Bytes of the bodies of those that wait.
        self._waiting = 0

    @asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        """A request from when it has come whole to its end. Raises ApiError: 503 while draining, 429 where the queue is
        full."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", headers={"Retry-After": "10", "Connection": "close"})
        if self.admitted >= self._capacity:
            raise _queue_full(f"{self.admitted} requests are running or waiting; try again later")
        self.admitted += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.admitted -= 1
            if not self.admitted:
                self._idle.set()

    @contextmanager
    def waiting(self, size: int) -> Iterator[None]:
        """A request with a body of `size` bytes, until it has its slot. Raises ApiError: 429 where too much waits."""
        if self._waiting and self._waiting + size > self._room:
            raise _queue_full(f"requests of {self._waiting} bytes are waiting; try again later")
        self._waiting += size
        try:
            yield
        finally:
            self._waiting -= size

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """One of the slots at the engine; waits until one is free."""
        async with self._slots:
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1

    async def drain(self, timeout: float) -> bool:
        """Admits no more requests and waits, `timeout` seconds at most; whether all had ended by then."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes. Raises Disconnected, and what `work` raises."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Disconnected
    finally:
        for each in (task, watch):
            each.cancel()
        # Both have ended, cleaned up, before the request is over.
        await asyncio.gather(task, watch, return_exceptions=True)


def with_write_timeout(send: Send, timeout: float) -> Send:
    """`send` that raises Disconnected where the client has read nothing for `timeout` seconds."""

    async def sending(message: Message) -> None:
        try:
            async with asyncio.timeout(timeout):
                await send(message)
        except TimeoutError as error:
            raise Disconnected from error

    return sending
