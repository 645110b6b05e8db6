"""Admission control: API keys, the request queue and its slots, disconnected and stalled clients."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, MutableMapping
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
    """The client closed the connection, or has not read for longer than the timeout."""


class ApiKey:
    """ASGI middleware: every path but the `public` ones requires `Authorization: Bearer KEY` or, as Anthropic's clients
    send it, `x-api-key: KEY`, compared in constant time."""

    def __init__(self, app: App, key: str, public: Collection[str]) -> None:
        self._app, self._expected, self._public = app, key.encode("utf-8"), frozenset(public)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._public:
            await self._app(scope, receive, send)
            return
        headers = dict(reversed(scope["headers"]))
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        keys = [key if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"")]
        if any(hmac.compare_digest(key, self._expected) for key in keys):
            await self._app(scope, receive, send)
            return
        reason = "the API key is missing or wrong: Authorization: Bearer KEY, or x-api-key: KEY"
        error = ApiError(401, reason, code="invalid_api_key")
        await send_json(send, 401, dumps(error.body_at(scope["path"])), {"WWW-Authenticate": "Bearer"})


async def send_json(send: Send, status: int, body: bytes, headers: dict[str, str], more_body: bool = False) -> None:
    """Send a complete JSON response; with `more_body` the caller still has to send the empty last message."""
    fields = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    raw = [(name.lower().encode("latin-1"), text.encode("latin-1")) for name, text in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": more_body})


def _queue_full(reason: str) -> ApiError:
    return ApiError(429, reason, code="queue_full", headers={"Retry-After": "1"})


class AdmissionControl:
    """Limits on concurrent requests: `slots` run, `queue` more wait in order of arrival, with request bodies of at most
    `max_bytes` in total; further requests are refused.

    `admitted` counts running and waiting requests, `running` those that occupy a slot.
    """

    def __init__(self, slots: int, queue: int, max_bytes: int) -> None:
        self._capacity, self._max_bytes = slots + queue, max_bytes
        self._slots = asyncio.Semaphore(slots)
        self._idle = asyncio.Event()
        self._idle.set()
        self.admitted = 0
        self.running = 0
        self.draining = False
        # Bytes of the bodies of waiting requests.
        self._waiting_bytes = 0

    @asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        """Admit a completely received request until its end. Raises ApiError: 503 while draining, 429 if the queue is
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
        """Count a body of `size` bytes while its request waits for a slot. Raises ApiError: 429 if that exceeds the
        limit."""
        if self._waiting_bytes and self._waiting_bytes + size > self._max_bytes:
            raise _queue_full(f"requests of {self._waiting_bytes} bytes are waiting; try again later")
        self._waiting_bytes += size
        try:
            yield
        finally:
            self._waiting_bytes -= size

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot of the engine and occupy it."""
        async with self._slots:
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1

    async def drain(self, timeout: float) -> bool:
        """Stop admitting requests and wait at most `timeout` seconds. Returns whether all requests have ended."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled when the client disconnects. Raises Disconnected, and the errors
    of `work`."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Disconnected
    finally:
        for future in (task, watch):
            future.cancel()
        # Both have cleaned up before the request ends.
        await asyncio.gather(task, watch, return_exceptions=True)


def with_write_timeout(send: Send, timeout: float) -> Send:
    """Wrap `send` to raise Disconnected if the client reads nothing for `timeout` seconds."""

    async def send_in_time(message: Message) -> None:
        try:
            async with asyncio.timeout(timeout):
                await send(message)
        except TimeoutError as error:
            raise Disconnected from error

    return send_in_time
