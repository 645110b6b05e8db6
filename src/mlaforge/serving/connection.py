"""HTTP connections with a timeout for the request head.

uvicorn only has a timeout between two requests, which the first byte of the next request ends: it would wait for ever
for the rest of a request line.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol


class _HeadTimeout(asyncio.Protocol):
    """Mixin for uvicorn's HTTP protocols. A connection is aborted if `head_timeout` seconds after it was opened, or
    after the end of a response, no complete request head was received; the timer restarts while the client reads the
    response."""

    head_timeout: float
    # uvicorn's: the connection, and the newest request with its response.
    transport: Any
    cycle: Any
    _timer: asyncio.TimerHandle | None = None
    # Bytes of the response that were still in the write buffer when the timer was started.
    _unsent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._responding:
            self._stop_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # type: ignore[misc]
        if not self._responding:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    @property
    def _responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        self._stop_timer()
        self._unsent = self.transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(self.head_timeout, self._expire)

    def _expire(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent:
            self._start_timer()
        else:
            # Not `close`, which waits for a client that may never read.
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def protocol(timeout: float) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol, with httptools if installed, and a timeout for request heads in seconds."""
    return type("HeadTimeoutProtocol", (_HeadTimeout, AutoHTTPProtocol), {"head_timeout": timeout})
