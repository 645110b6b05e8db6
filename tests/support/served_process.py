"""`mlaforge serve` in a process of its own, for clients in other environments."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from support.serving import free_port, until


@contextmanager
def served_process(directory: Path, log: Path, *options: str) -> Iterator[str]:
    """Serve a model as "m" in fp32 with these further options; yield the server's URL. `log` receives its output, which
    must contain no traceback."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "mlaforge", "serve", str(directory), "--port", str(port), "--dtype", "float32"]
    command += ["--cache-bytes", str(2**28), "--served-model-name", "m", *options]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(answers, 120)
        yield url
    finally:
        process.terminate()
        process.wait(60)
    assert process.returncode == 0, log.read_text()
    assert "Traceback" not in log.read_text()
