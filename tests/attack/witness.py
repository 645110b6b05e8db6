"""A client that streams short greedy answers all the while, and notes what it had to wait.

    python -m attack.witness URL FILE

It is a process of its own, so that it is not delayed by what attacks. A line of FILE is what came, when (seconds of the
machine's monotonic clock) and how long it was waited for: `gap`, a token after another; `first`, an answer's first;
`refused`, the status instead of an answer; `lost`, an answer that broke off.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import httpx

BODY: dict[str, Any] = {
    "prompt": "The sky is", "max_tokens": 32, "temperature": 0, "ignore_eos": True, "stream": True,
}  # fmt: skip
# A machine that stands still is noticed by others.
PATIENCE = 600.0


@dataclass(frozen=True)
class Wait:
    """One line: `seconds` waited, until `at`."""

    kind: str
    at: float
    seconds: float

    @property
    def since(self) -> float:
        return self.at - self.seconds


def read(path: Path) -> list[Wait]:
    """What a witness has noted so far; a line that it is writing is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [Wait(kind, float(at), float(seconds)) for kind, at, seconds in (line.split() for line in lines)]


def largest(waits: Iterable[Wait], kind: str) -> Wait:
    """The longest wait of a kind; one of no length where there is none."""
    return max((wait for wait in waits if wait.kind == kind), key=lambda w: w.seconds, default=Wait(kind, 0.0, 0.0))


def _answer(client: httpx.Client, file: TextIO) -> None:
    begin = last = time.monotonic()
    kind, done = "first", False
    with client.stream("POST", "/v1/completions", json=BODY) as answer:
        if answer.status_code != 200:
            file.write(f"refused {time.monotonic():.6f} {answer.status_code}\n")
            time.sleep(0.2)
            return
        try:
            for line in answer.iter_lines():
                if not line.startswith("data: "):
                    continue
                now = time.monotonic()
                done = line == "data: [DONE]"
                if not done and '"error"' not in line:
                    file.write(f"{kind} {now:.6f} {now - last:.6f}\n")
                    kind, last = "gap", now
        except SystemExit:
            # So long at least.
            file.write(f"{kind} {time.monotonic():.6f} {time.monotonic() - last:.6f}\n")
            raise
    if not done:
        file.write(f"lost {time.monotonic():.6f} {time.monotonic() - begin:.6f}\n")


def main() -> None:
    url, path = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with httpx.Client(base_url=url, timeout=PATIENCE) as client, open(path, "a", buffering=1, encoding="utf-8") as file:
        while True:
            begin = time.monotonic()
            try:
                _answer(client, file)
            except httpx.HTTPError:
                file.write(f"lost {time.monotonic():.6f} {time.monotonic() - begin:.6f}\n")
                time.sleep(0.2)


if __name__ == "__main__":
    main()
