"""`mlaforge serve` in a separate process, of this checkout or another, and what can be seen of it from outside."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import psutil

from mlaforge.runtime import UserError


def start(
    model: str, options: list[str], log: IO[bytes] | None = None, checkout: Path | None = None
) -> tuple[subprocess.Popen[bytes], str]:  # fmt: skip
    """Start `mlaforge serve` on a free port and return its process and URL when it answers. log: receives its stderr
    (default: this process's). checkout: folder of the mlaforge to run. Raise UserError if it ends."""
    import httpx

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlaforge", "serve", model, "--port", str(port), *options]
    process = subprocess.Popen(command, stderr=log, env=checkout_environment(checkout))
    url = f"http://127.0.0.1:{port}"
    while process.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return process, url
        except httpx.TransportError:
            time.sleep(0.5)
    raise UserError(f"`mlaforge serve {model}` ended with {process.returncode}")


def checkout_environment(checkout: Path | None) -> dict[str, str] | None:
    """Environment in which Python imports mlaforge from a checkout; None, this process's environment, for None."""
    return None if checkout is None else {**os.environ, "PYTHONPATH": str(checkout.absolute() / "src")}


def commit_of(checkout: Path) -> str:
    """Short commit of a checkout. Raise UserError if the folder has no mlaforge or is not in a repository."""
    if not (checkout / "src" / "mlaforge").is_dir():
        raise UserError(f"{checkout} is not a checkout of mlaforge: src/mlaforge is missing")
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise UserError(f"{checkout} is not a git checkout: {result.stderr.strip()}")
    return result.stdout.strip()


def rss_mib(pid: int) -> float:
    """Resident memory of a process in MiB."""
    return float(psutil.Process(pid).memory_info().rss / 2**20)


async def gauges(client: Any) -> dict[str, float]:
    """Values without labels of a server's /metrics, by name. client: httpx.AsyncClient of the server."""
    from prometheus_client.parser import text_string_to_metric_families

    text = (await client.get("/metrics")).text
    return {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples if not s.labels}
