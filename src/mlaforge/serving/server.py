"""`mlaforge serve`: the application on a socket, from the first signal to the last answer."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import socket
from types import FrameType

import uvicorn

from mlaforge import runtime
from mlaforge.runtime import UserError
from mlaforge.serving.app import Service, create_app
from mlaforge.serving.async_engine import AsyncEngine, SyncEngine
from mlaforge.serving.config import ServeConfig

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


def with_key(config: ServeConfig) -> ServeConfig:
    """The configuration with the environment's API key where it has none."""
    return dataclasses.replace(config, api_key=config.api_key or runtime.api_key())


def run(engine: SyncEngine, config: ServeConfig) -> None:
    """Serves until a signal ends it. Raises UserError, also where the address cannot be had."""
    config = with_key(config)
    app = create_app(AsyncEngine(engine), config)
    service: Service = app.state.service
    settings = uvicorn.Config(
        app, host=config.host, port=config.port, log_level="warning", access_log=False, server_header=False,
        timeout_graceful_shutdown=LAST_BYTES,
    )  # fmt: skip
    try:
        socket = settings.bind_socket()
    except SystemExit as error:
        raise UserError(f"{config.host}:{config.port} cannot be listened on: is it taken?") from error
    host, port = socket.getsockname()[:2]
    runtime.log(f"serving {service.model} on http://{host}:{port}/v1")
    if config.host not in ("127.0.0.1", "::1", "localhost") and not config.api_key:
        runtime.log("anybody who reaches this address may use it: there is no API key")
    DrainingServer(settings, service).run(sockets=[socket])
