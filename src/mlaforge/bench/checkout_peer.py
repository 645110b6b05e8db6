"""Another checkout of mlaforge as a peer: its engine in a separate process, timed by the same code (decode.py)."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mlaforge.artifact import record_text
from mlaforge.bench import decode
from mlaforge.bench.endpoint import PeerFailed
from mlaforge.bench.peer import Repetition, Variant
from mlaforge.bench.server_process import checkout_environment, commit_of


class CheckoutPeer:
    """The engine of the mlaforge in the folder `checkout`, plain decoding; its process sleeps while other peers run.
    options: of its LLM."""

    name = "base"
    weight_bytes: int | None = None

    def __init__(self, directory: Path, model: str, checkout: Path, options: dict[str, Any]):
        self.model, self.dtype, self.commit = model, str(options["dtype"]), commit_of(checkout)
        # Output for error messages; an unread pipe would block the process. `close` closes it.
        self.output = tempfile.TemporaryFile()  # noqa: SIM115
        environment = checkout_environment(checkout) or {}
        packages, settings = str(checkout.absolute() / "src"), json.dumps({"model": str(directory), **options})
        words = [sys.executable, "-P", decode.__file__, packages, settings]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.output, text=True,
            env=environment,
        )  # fmt: skip
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def run(self, prompts: list[list[int]], tokens: int, variant: Variant) -> Repetition:
        """See Peer.run."""
        assert self.process.stdin is not None
        try:
            print(json.dumps([prompts, tokens]), file=self.process.stdin, flush=True)
        except BrokenPipeError as error:
            raise PeerFailed(self._failure()) from error
        return Repetition(**self._answer())

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.output.close()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise PeerFailed(self._failure())
        return json.loads(line)

    def _failure(self) -> str:
        code = self.process.wait()
        self.output.seek(0)
        tail = record_text(" ".join(self.output.read().decode(errors="replace").split()))[-400:]
        return f"mlaforge at {self.commit} ended with {code}: {tail}"
