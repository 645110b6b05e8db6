"""Rendering of long conversations in harmony in separate processes with a CPU time limit.

The library blocks Python's global lock, so that all other requests stall; its time is quadratic in the length of a
word; and a million spaces crash it.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from mlaforge.engine.request.harmony import Harmony, MessageError, encoding

# Conversations up to this length of JSON take milliseconds at worst and are rendered in this process.
SHORT = 4096
# CPU seconds for a conversation. The longest one that fits a model's context takes less than one second.
SECONDS = 5


class HarmonyProcesses:
    """`Harmony.render` in subprocesses: one per calling thread, started on first use."""

    def __init__(self, harmony: Harmony) -> None:
        self._harmony = harmony
        self._local = threading.local()
        self._processes: list[subprocess.Popen[bytes]] = []

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], reasoning_effort: str | None
    ) -> list[int]:
        """Same as Harmony.render, but also raises MessageError if rendering takes too long."""
        job = json.dumps([messages, tools, reasoning_effort])
        if len(job) <= SHORT:
            return self._harmony.render(messages, tools, reasoning_effort)
        process = self._process()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(job.encode() + b"\n")
            process.stdin.flush()
        answer = process.stdout.readline()
        if not answer.endswith(b"\n"):
            self._end(process)
            reason = "harmony cannot render these messages; does one contain a word or spaces of many thousand letters?"
            raise MessageError(reason, "messages")
        result = json.loads(answer)
        if isinstance(result, dict):
            raise MessageError(result["why"], result["field"])
        return list(result)

    def _process(self) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] | None = getattr(self._local, "process", None)
        if process is not None and process.poll() is not None:
            self._end(process)
            process = None
        if process is None:
            process = self._local.process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(SECONDS)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            self._processes.append(process)
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        # Closes its pipes, too.
        process.communicate()
        if process in self._processes:
            self._processes.remove(process)

    def close(self) -> None:
        """End the processes."""
        for process in list(self._processes):
            self._end(process)


def main() -> None:
    """python -m mlaforge.serving.harmony_process SECONDS: read the arguments of `render` from standard input, one JSON
    line per call, and answer with one line, until standard input is closed."""
    # The parent ends this process, not signals from the terminal.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    seconds, harmony = float(sys.argv[1]), Harmony(encoding())
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            answer: Any = harmony.render(*json.loads(line))
        except MessageError as error:
            answer = {"why": str(error), "field": error.field}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
