"""`mlaforge serve`: the application on a socket, with draining on SIGTERM and SIGINT."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import math
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

# Seconds after draining in which slow readers may fetch finished responses.
FLUSH_SECONDS = 5


class DrainingServer(uvicorn.Server):
    """Server that drains on SIGTERM or SIGINT: it answers new requests with 503 until the running ones have finished or
    `drain_timeout` is over, then exits with code 0. A second signal ends it at once."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The next signal ends the process by the system's default, which needs no turn of the event loop.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        runtime.log(f"draining: {self._service.admission.admitted} requests")
        self._draining = asyncio.create_task(self._service.drain())
        self._draining.add_done_callback(lambda _: setattr(self, "should_exit", True))


def validated(config: ServeConfig) -> ServeConfig:
    """Return the configuration, with the environment's API key if it has none. Raises UserError for an empty key, and
    for contradictory options."""
    if config.api_key is not None and not config.api_key.strip():
        raise UserError("--api-key is empty, as an unset variable is; give a key, or omit it to serve without a key")
    if config.max_n is not None and config.max_n > config.max_num_seqs:
        raise UserError(
            f"max_n = {config.max_n} must be at most max_num_seqs = {config.max_num_seqs}: a request's continuations "
            "decode together"
        )
    if config.allowed_origins.startswith("["):
        raise UserError(
            f"allowed_origins = {config.allowed_origins!r} must be origins separated by commas, or *, not a JSON list"
        )
    return dataclasses.replace(config, api_key=config.api_key or runtime.api_key())


def uvicorn_config(app: FastAPI, config: ServeConfig) -> uvicorn.Config:
    """Return uvicorn's configuration for the application."""
    return uvicorn.Config(
        app, host=config.host, port=config.port, log_level="warning", access_log=False, server_header=False,
        timeout_graceful_shutdown=FLUSH_SECONDS,
        timeout_keep_alive=math.ceil(config.client_timeout), http=protocol(config.client_timeout), ws="none",
    )  # fmt: skip


def listen(config: uvicorn.Config) -> socket.socket:
    """Return a socket bound to the configured address. Raises UserError if that fails."""
    try:
        listener = config.bind_socket()
    except SystemExit as error:
        raise UserError(f"cannot listen on {config.host}:{config.port}: is the port already in use?") from error
    # Inherited by connections. asyncio sets it only on sockets created with the protocol TCP, unlike uvicorn's: the
    # body of a short response would wait 40 ms until the client has acknowledged its head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def run(engine: SyncEngine, config: ServeConfig) -> None:
    """Serve until a signal. Raises UserError, also if the address is not available."""
    app = create_app(AsyncEngine(engine, max(1, config.max_num_seqs // 2)), config)
    service: Service = app.state.service
    server_config = uvicorn_config(app, config)
    listener = listen(server_config)
    host, port = listener.getsockname()[:2]
    announce(engine.sampling_defaults)
    runtime.log(f"serving {service.model} on http://{host}:{port}/v1")
    if config.host not in ("127.0.0.1", "::1", "localhost") and not config.api_key:
        runtime.log("no API key is set: every client that can reach this address may use the server")
    # A full collection visits every object of the model and of the libraries, which are never garbage, and stops all
    # requests: 0.23 s with SmolLM2-135M, and microseconds once they are frozen.
    gc.collect()
    gc.freeze()
    DrainingServer(server_config, service).run(sockets=[listener])
