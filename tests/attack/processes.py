"""Commands of mlaforge in processes of their own, watched: what they print, how they end, time and memory.

They are forked from one process that has imported what takes seconds to import; `fresh` ones begin as from a shell.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from mlaforge.runtime import cache_home
from support import killed

# What the commands import.
IMPORTED = [
    *killed.IMPORTED, "mlaforge.cli.main", "mlaforge.conversion.deepseek", "mlaforge.drafting.check",
    "mlaforge.drafting.parity", "mlaforge.diagnosis.diagnose", "mlaforge.evaluation.perplexity",
    "mlaforge.serving.generate", "mlaforge.calibration.calibrate", "mlaforge.engine.engine", "mlaforge.report.report",
    "sentence_transformers", "sklearn.cluster", "gguf", "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
]  # fmt: skip
# Far beyond what a command needs for a tiny model: seconds, and bytes of its own memory.
LONGEST, LARGEST = 90.0, 6 * 2**30


def make_home(folder: Path) -> Path:
    """A $MLAFORGE_HOME of its own, for what is dequantised; compiled kernels are the machine's."""
    kernels = cache_home() / "native"
    kernels.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True)
    (folder / "native").symlink_to(kernels.absolute())
    return folder


@dataclass(frozen=True)
class Ended:
    """How a command ended; `code` is negative for a signal. `stopped`: why it had to be stopped, else ""."""

    words: Sequence[str]
    code: int
    stdout: str
    stderr: str
    seconds: float
    stopped: str = ""

    @property
    def last_line(self) -> str:
        return next((line for line in reversed(self.stderr.splitlines()) if line.strip()), "")

    @property
    def fault(self) -> str:
        """What no command may do, whatever it is given; "" where it did none of it."""
        if self.stopped:
            return self.stopped
        if "Traceback" in self.stderr or "Traceback" in self.stdout:
            return f"a traceback: {self.last_line}"
        if self.code < 0:
            return f"it ended by signal {-self.code}: {self.last_line}"
        if self.code == 2 and not self.last_line.startswith("mlaforge: "):
            return f"exit code 2 without a line that says why: {self.last_line}"
        return ""


class Command:
    """A command that runs. Its output goes to files in `folder`; `$MLAFORGE_HOME` is `home`."""

    def __init__(self, words: Sequence[str | Path], folder: Path, home: Path, fresh: bool = False) -> None:
        self.words = [str(word) for word in words]
        folder.mkdir(parents=True, exist_ok=True)
        self._files = folder / "stdout.txt", folder / "stderr.txt"
        for file in self._files:
            file.write_bytes(b"")
        self.start = time.monotonic()
        self.pid, self._exit_code = (self._fresh if fresh else self._forked)(home)

    def _forked(self, home: Path) -> tuple[int, Callable[[], int | None]]:
        process = killed.PROCESSES.Process(target=_become, args=(self.words, *map(str, (*self._files, home))))
        process.start()
        return process.pid, lambda: process.exitcode

    def _fresh(self, home: Path) -> tuple[int, Callable[[], int | None]]:
        with self._files[0].open("wb") as stdout, self._files[1].open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "mlaforge", *self.words], stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                env={**os.environ, "MLAFORGE_HOME": str(home), "OMP_NUM_THREADS": "1"},
                # A shell's background job ignores it, and so would its children.
                preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
            )  # fmt: skip
        return process.pid, process.poll

    @property
    def running(self) -> bool:
        return self._exit_code() is None

    def send(self, number: int) -> None:
        if self.running:
            os.kill(self.pid, number)

    def wait(self, longest: float = LONGEST) -> Ended:
        """Until it has ended, by itself or because it takes too much time or memory."""
        stopped, pause = "", 0.005
        while self.running:
            seconds = time.monotonic() - self.start
            if seconds > longest:
                stopped = f"it ran longer than {longest:g} s"
            elif _own_memory(self.pid) > LARGEST:
                stopped = f"it took more than {LARGEST / 2**30:g} GiB"
            if stopped:
                self.send(signal.SIGKILL)
            time.sleep(pause)
            pause = min(pause * 1.2, 0.1)
        code = self._exit_code()
        assert code is not None
        stdout, stderr = (file.read_text(encoding="utf-8", errors="replace") for file in self._files)
        return Ended(self.words, code, stdout, stderr, time.monotonic() - self.start, stopped)


def _own_memory(pid: int) -> int:
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.NoSuchProcess:
        return 0
    return int(memory.rss - memory.shared)


def _become(words: list[str], stdout: str, stderr: str, home: str) -> None:
    """The command itself, as a shell starts it."""
    for number, file in ((1, stdout), (2, stderr)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["MLAFORGE_HOME"] = home
    sys.argv = ["mlaforge", *words]
    import torch

    from mlaforge.cli.main import main

    # Commands run side by side; and the same bits are promised for the same number of threads.
    torch.set_num_threads(1)

    main()
