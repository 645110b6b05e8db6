"""Connections: one on which a client says too little for too long is closed, whatever it was about to say.

uvicorn has a timeout between two requests alone, and the first byte of the next one ends it: half a request line would
be waited for until the end of time.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol


class _Punctual(asyncio.Protocol):
    """Beside one of uvicorn's HTTP protocols. From its beginning, and from the end of every answer, a connection has
    `patience` seconds for a whole request head, and as much again whenever its client has fetched more of the answer;
    then it is cut."""

    patience: float
    # uvicorn's: the connection, and the newest request with its answer.
    transport: Any
    cycle: Any
    _alarm: asyncio.TimerHandle | None = None
    # Bytes of an answer that were not fetched yet when the alarm was set.
    _unsent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answering:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # type: ignore[misc]
        if not self._answering:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        self._stop_waiting()
        self._unsent = self.transport.get_write_buffer_size()
        self._alarm = asyncio.get_running_loop().call_later(self.patience, self._expire)

    def _expire(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent:
            self._wait()
        else:
            # Not `close`: that waits for a client that may never read.
            self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None


def protocol(patience: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, over httptools where it is installed, with that patience in seconds."""
    return type("PunctualProtocol", (_Punctual, AutoHTTPProtocol), {"patience": patience})
