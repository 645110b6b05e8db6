"""`mlaforge serve`: the application on a socket, from the first signal to the last answer."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from mlaforge import runtime
from mlaforge.engine.sampling.defaults import announce
from mlaforge.runtime import UserError
from mlaforge.serving.app import Service, create_app
from mlaforge.serving.async_engine import AsyncEngine, SyncEngine
from mlaforge.serving.config import ServeConfig
from mlaforge.serving.connection import protocol

# After draining, seconds in which slow readers may still fetch what is finished.
LAST_BYTES = 5


class DrainingServer(uvicorn.Server):
    """On SIGTERM or SIGINT it goes on listening, so that new requests read a 503, until the running ones are done or
    the time for that is over; then it ends with exit code 0. A second signal ends it at once."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # From now on they end the process whatever it is doing: the system does it, not a handler that waits its turn.
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        runtime.log(f"draining: {self._service.admission.admitted} requests")
        self._draining = asyncio.create_task(self._service.drain())
        self._draining.add_done_callback(lambda _: setattr(self, "should_exit", True))


def checked(config: ServeConfig) -> ServeConfig:
    """The configuration, with the environment's API key where it has none. Raises UserError for an empty key, and where
    settings contradict each other."""
    if config.api_key is not None and not config.api_key.strip():
        raise UserError("--api-key is empty, as an unset variable is; give a key, or leave it out to serve anybody")
    if config.max_n is not None and config.max_n > config.max_num_seqs:
        raise UserError(
            f"max_n = {config.max_n} must be at most max_num_seqs = {config.max_num_seqs}: a request's continuations "
            "decode together"
        )
    return dataclasses.replace(config, api_key=config.api_key or runtime.api_key())


def settings(app: FastAPI, config: ServeConfig) -> uvicorn.Config:
    """How uvicorn serves it."""
    return uvicorn.Config(
        app, host=config.host, port=config.port, log_level="warning", access_log=False, server_header=False,
        timeout_graceful_shutdown=LAST_BYTES, http=protocol(config.client_timeout), ws="none",
    )  # fmt: skip


def listen(settings: uvicorn.Config) -> socket.socket:
    """A socket of that address, bound. Raises UserError where it cannot be had."""
    try:
        listener = settings.bind_socket()
    except SystemExit as error:
        raise UserError(f"{settings.host}:{settings.port} cannot be listened on: is it taken?") from error
    # Connections inherit it. asyncio sets it only on sockets that were made for TCP by name, and uvicorn's was not: the
    # body of a short answer would wait 40 ms until the client has acknowledged its head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def run(engine: SyncEngine, config: ServeConfig) -> None:
    """Serves until a signal ends it. Raises UserError, also where the address cannot be had."""
    app = create_app(AsyncEngine(engine, max(1, config.max_num_seqs // 2)), config)
    service: Service = app.state.service
    how = settings(app, config)
    listener = listen(how)
    host, port = listener.getsockname()[:2]
    announce(engine.sampling_defaults)
    runtime.log(f"serving {service.model} on http://{host}:{port}/v1")
    if config.host not in ("127.0.0.1", "::1", "localhost") and not config.api_key:
        runtime.log("anybody who reaches this address may use it: there is no API key")
    DrainingServer(how, service).run(sockets=[listener])
