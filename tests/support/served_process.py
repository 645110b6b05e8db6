"""`mlaforge serve` in a process of its own, for clients in other environments."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from support.serving import free_port, until


def started(directory: Path, port: int, log: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start to serve a model as "m" in fp32 with these further options; `log` receives its output."""
    command = [sys.executable, "-m", "mlaforge", "serve", str(directory), "--port", str(port), "--dtype", "float32"]
    command += ["--cache-bytes", str(2**28), "--served-model-name", "m", *options]
    with log.open("w") as out:
        return subprocess.Popen(command, stdout=out, stderr=out)


def wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until /health is 200."""

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        except httpx.TransportError:
            # Asking at once again would take the time that the server needs to start.
            time.sleep(0.2)
            return False

    until(answers, 300)


@contextmanager
def served_process(directory: Path, log: Path, *options: str) -> Iterator[str]:
    """Serve a model as in `started`; yield the server's URL. Its output must contain no traceback."""
    process = started(directory, port := free_port(), log, *options)
    try:
        wait_until_ready(process, port, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)
    assert process.returncode == 0, log.read_text()
    assert "Traceback" not in log.read_text()
