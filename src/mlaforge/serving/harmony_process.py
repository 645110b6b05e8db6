"""Long conversations written in harmony by processes of their own, which the kernel ends where they take too long.

The library holds Python's lock while it works, so that nobody else's tokens move, takes a time that grows with the
square of a word's length, and dies of a million spaces.
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

# Conversations of so many characters of JSON take milliseconds at worst: they are written here.
SHORT = 4096
# Processor time for a conversation. The longest that a model's context holds takes less than one.
SECONDS = 5


class HarmonyProcesses:
    """Stands in for a Harmony's `render`; a process for every thread that asks, made when it is first needed."""

    def __init__(self, spoken: Harmony) -> None:
        self._spoken = spoken
        self._own = threading.local()
        self._all: list[subprocess.Popen[bytes]] = []

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], reasoning_effort: str | None
    ) -> list[int]:
        """As Harmony.render. Raises MessageError, also where it would take too long."""
        job = json.dumps([messages, tools, reasoning_effort])
        if len(job) <= SHORT:
            return self._spoken.render(messages, tools, reasoning_effort)
        process = self._process()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(job.encode() + b"\n")
            process.stdin.flush()
        answer = process.stdout.readline()
        if not answer.endswith(b"\n"):
            self._end(process)
            why = "harmony cannot write these messages; is there a word of many thousand letters, or that much space?"
            raise MessageError(why, "messages")
        result = json.loads(answer)
        if isinstance(result, dict):
            raise MessageError(result["why"], result["field"])
        return list(result)

    def _process(self) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] | None = getattr(self._own, "process", None)
        if process is not None and process.poll() is not None:
            self._end(process)
            process = None
        if process is None:
            process = self._own.process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(SECONDS)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            self._all.append(process)
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        # Closes its pipes, too.
        process.communicate()
        if process in self._all:
            self._all.remove(process)

    def close(self) -> None:
        """Ends the processes."""
        for process in list(self._all):
            self._end(process)


def main() -> None:
    """python -m mlaforge.serving.harmony_process SECONDS: answers each line of its standard input, the arguments of
    `render`, with a line, until the other side is gone."""
    # Its life is the other side's, not the terminal's.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    seconds, spoken = float(sys.argv[1]), Harmony(encoding())
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            answer: Any = spoken.render(*json.loads(line))
        except MessageError as error:
            answer = {"why": str(error), "field": error.field}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
