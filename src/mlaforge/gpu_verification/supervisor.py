"""Parent process of `verify-gpu`: runs each stage in a child process, survives its crashes, and writes the results.

The parent imports neither torch nor CUDA. A child has its process group, so that its subprocesses end with it. If a
case crashes its process or exceeds its limit, only that case is lost: the stage continues with the next one in a new
process. A crashed case is repeated once with blocking launches, which identifies the failing launch, and after an
illegal memory access once under compute-sanitizer if installed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from mlaforge.gpu_verification.config import VerifyGpuConfig
from mlaforge.gpu_verification.stage import FULL_SECONDS, STAGES, Stage
from mlaforge.gpu_verification.summary import render
from mlaforge.gpu_verification.worker import Job
from mlaforge.runtime import UserError, log

SUMMARY, CASES, LOG = "summary.md", "cases.jsonl", "log.txt"
# Files that stages may write into their folder for OUT.
STAGE_FILES = ("compile.jsonl", "tuned.json", "profile.json.gz", "mismatch.safetensors", "junit.xml")
# Larger files are not copied: a rented machine may not return them.
LARGEST_FILE = 16 << 20
# Seconds reserved at the end for writing the results, and for repeating a crashed case in a full run.
RESERVE, REPEAT = 3.0, 45.0
ILLEGAL = "illegal memory access"


@dataclasses.dataclass
class Child:
    """Child process of a stage and the file descriptor of its reports."""

    process: subprocess.Popen[bytes]
    reports: int
    buffer: bytes = b""

    def lines(self, until: float) -> Iterator[dict[str, Any] | None]:
        """Yield reports as they arrive; None, as the last item, when the case's limit or the time.monotonic() `until`
        is reached."""
        bound = until
        while True:
            while b"\n" in self.buffer:
                line, _, self.buffer = self.buffer.partition(b"\n")
                report = json.loads(line)
                bound = min(until, time.monotonic() + report["limit"]) if report["event"] == "start" else until
                yield report
            remaining = bound - time.monotonic()
            if remaining <= 0 or not select.select([self.reports], [], [], remaining)[0]:
                yield None
                return
            if not (read := os.read(self.reports, 1 << 16)):
                return
            self.buffer += read

    def end(self, expired: bool = False) -> int:
        """Kill the process group and return the exit code. expired: the process is still at work."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            # A process that has closed its reports is about to exit.
            self.process.wait(timeout=0.0 if expired else 2.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        os.close(self.reports)
        return self.process.wait()


class Supervisor:
    """Run `stages` within the limits of `config` and write the results into the directory `out`."""

    def __init__(self, out: Path, config: VerifyGpuConfig, stages: Sequence[Stage] = STAGES):
        self.out, self.config, self.stages = out, config, stages
        self.twin = config.twin is not None
        self.start_time = time.monotonic()
        self.deadline = self.start_time + config.seconds - RESERVE
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.folder = Path()

    def run(self) -> list[dict[str, Any]]:
        """Run all stages and return the rows of cases.jsonl. On Ctrl-C, write the results so far."""
        self.out.mkdir(parents=True, exist_ok=True)
        memory = Path("/dev/shm")
        with (
            tempfile.TemporaryDirectory(prefix="verify-gpu-", dir=memory if memory.is_dir() else None) as folder,
            (self.out / LOG).open("w", encoding="utf-8") as output,
        ):
            self.folder = Path(folder)
            try:
                for stage in self.stages:
                    log(f"{time.monotonic() - self.start_time:5.0f} s  {stage.name}: {stage.description}")
                    self._stage(stage, output)
                    self._write()
            finally:
                self._write()
        return self.rows

    def _stage(self, stage: Stage, output: TextIO) -> None:
        """Run one stage, starting a new process after each crash."""
        limit = time.monotonic() + stage.limit * self.config.seconds / FULL_SECONDS
        until, first, cases = min(limit, self.deadline), 0, list[dict[str, Any]]()
        while True:
            if time.monotonic() >= until:
                self._skip(stage, cases, first)
                return
            cases, first, finished = self._process(stage, first, cases, until, output)
            if finished:
                return

    def _process(
        self, stage: Stage, first: int, cases: list[dict[str, Any]], until: float, output: TextIO
    ) -> tuple[list[dict[str, Any]], int, bool]:
        """Run the stage's cases from number `first` on in one process. Return (cases, next number, whether the stage is
        finished)."""
        child = self._spawn(stage, self._job(stage, first=first), output)
        number, started, expired, ended, limit = first, False, False, None, 0.0
        try:
            for report in child.lines(until):
                if report is None:
                    expired = True
                elif report["event"] == "no device":
                    raise UserError(f"{report['detail']}; verify-gpu --twin cpu needs no GPU")
                elif report["event"] == "cases":
                    cases = report["cases"]
                elif report["event"] == "start":
                    number, started, limit = report["number"], True, report["limit"]
                else:
                    self.facts |= report.pop("facts", None) or {}
                    self._row(stage, cases[number], report)
                    number, started, ended = number + 1, False, report
        finally:
            code = child.end(expired)
        if not cases:
            status = "timed out" if expired else "crashed"
            self._row(stage, {"case": "list of cases"}, {"status": status, "detail": f"{_ending(code)}, see {LOG}"})
            return cases, 0, True
        if ended is not None and ended["status"] == "crashed" and not started:
            # The process exited because the case made its CUDA context unusable.
            self._repeat(stage, number - 1, self.rows[-1], output)
        elif expired and started:
            detail = "the stage's time is over" if time.monotonic() >= until else f"longer than {limit:g} s"
            self._row(stage, cases[number], {"status": "timed out", "detail": detail})
            number += 1
        elif expired:
            self._skip(stage, cases, number)
            return cases, number, True
        elif started or number == first:
            # Without a start the process died before it reached the case, and would die again.
            self._row(stage, cases[number], {"status": "crashed", "detail": _ending(code)})
            self._repeat(stage, number, self.rows[-1], output)
            number += 1
        return cases, number, number >= len(cases)

    def _repeat(self, stage: Stage, number: int, row: dict[str, Any], output: TextIO) -> None:
        """Repeat a crashed case with blocking launches, and after an illegal access under compute-sanitizer."""
        row["repeated"] = self._run_case(stage, number, output, {"CUDA_LAUNCH_BLOCKING": "1"})
        sanitizer = shutil.which("compute-sanitizer")
        if sanitizer and ILLEGAL in f"{row['detail']} {row['repeated']}":
            row["sanitizer"] = self._run_case(stage, number, output, {}, (sanitizer, "--print-limit", "5"))

    def _run_case(
        self, stage: Stage, number: int, output: TextIO, variables: dict[str, str], prefix: tuple[str, ...] = ()
    ) -> str:
        """Run one case in a separate process. Return its status and detail."""
        until = min(self.deadline, time.monotonic() + REPEAT * self.config.seconds / FULL_SECONDS)
        if time.monotonic() >= until:
            return "skipped"
        job = self._job(stage, only=number)
        child, outcome = self._spawn(stage, job, output, variables, prefix), "crashed"
        try:
            for report in child.lines(until):
                if report is None:
                    outcome = "timed out"
                elif report["event"] == "end":
                    outcome = f"{report['status']} {report.get('detail', '')}".strip()
        finally:
            code = child.end(outcome == "timed out")
        return outcome if outcome != "crashed" else f"crashed: {_ending(code)}"

    def _job(self, stage: Stage, first: int = 0, only: int | None = None) -> Job:
        on_cpu = self.twin or not stage.runs_kernels
        return Job(stage.module, self.twin, on_cpu, self.facts, str(self.folder), first, only)

    def _spawn(
        self, stage: Stage, job: Job, output: TextIO, variables: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> Child:  # fmt: skip
        """Start the worker process. variables: added to its environment; prefix: of its command."""
        path = self.folder / "job.json"
        path.write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")
        read, write = os.pipe()
        command = [*prefix, sys.executable, "-m", f"{__package__}.worker", str(path), "--report", str(write)]
        output.write(f"== {stage.name}: cases from {job.first if job.only is None else job.only} on\n")
        output.flush()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, pass_fds=(write,),
            start_new_session=True, env=self._environment(stage) | (variables or {}),
        )  # fmt: skip
        os.close(write)
        return Child(process, read)

    def _environment(self, stage: Stage) -> dict[str, str]:
        """Environment of a stage's process: it writes to memory only and uses no network."""
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        variables = {
            "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1",
            "TRITON_CACHE_DIR": str(self.folder / "triton"), "MLAFORGE_HOME": str(self.folder / "home"),
            # CPU kernels would be compiled first, although no stage uses them.
            "MLAFORGE_NATIVE": "0", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
            # The default of Triton 3.9, set explicitly to avoid its warning.
            "TRITON_DEFAULT_FP_FUSION": "1",
            "TRITON_INTERPRET": "1" if self.twin and stage.runs_kernels else "0",
            # Tiny products gain nothing from threads.
            **({"OMP_NUM_THREADS": "1"} if self.twin else {}),
        }  # fmt: skip
        return {**os.environ, **variables}

    def _skip(self, stage: Stage, cases: list[dict[str, Any]], first: int) -> None:
        """Report the cases from number `first` on as skipped for lack of time."""
        run_is_over = time.monotonic() >= self.deadline
        detail = "the run's time is over" if run_is_over else "the stage's time is over"
        for case in cases[first:] if cases else [{"case": "all"}]:
            self._row(stage, case, {"status": "skipped", "detail": detail})

    def _row(self, stage: Stage, case: dict[str, Any], report: dict[str, Any]) -> None:
        result = {key: value for key, value in report.items() if key not in ("event", "number")}
        self.rows.append({"stage": stage.name, **case, **result})
        with (self.out / CASES).open("a" if len(self.rows) > 1 else "w", encoding="utf-8") as lines:
            lines.write(json.dumps(self.rows[-1]) + "\n")

    def _write(self) -> None:
        """Write all results so far: files of stages, cases.jsonl with repeated cases, summary.md."""
        for name in STAGE_FILES:
            if (path := self.folder / name).is_file() and path.stat().st_size < LARGEST_FILE:
                shutil.copyfile(path, self.out / name)
        lines = "".join(json.dumps(row) + "\n" for row in self.rows)
        (self.out / CASES).write_text(lines, encoding="utf-8")
        seconds = time.monotonic() - self.start_time
        (self.out / SUMMARY).write_text(render(self.rows, self.facts, self.twin, seconds), encoding="utf-8")
        if (path := self.out / LOG).stat().st_size > LARGEST_FILE:
            # The end contains the error.
            path.write_bytes(path.read_bytes()[-LARGEST_FILE // 2 :])


def _ending(code: int) -> str:
    """Describe a process's exit code."""
    if code >= 0:
        return f"the process ended with exit code {code}"
    try:
        return f"the process was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"the process was ended by signal {-code}"


def run(out: Path, config: VerifyGpuConfig) -> list[dict[str, Any]]:
    """Run the stages selected by `config` and return the rows of cases.jsonl. Raise UserError if OUT contains other
    files."""
    results = {SUMMARY, CASES, LOG, *STAGE_FILES}
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is not a directory; give another --out")
    if out.is_dir() and (other := next((p.name for p in sorted(out.iterdir()) if p.name not in results), None)):
        raise UserError(f"{out} contains {other}, which verify-gpu did not write; give an empty or new --out")
    created = not out.exists()

    def clear() -> None:
        for name in results:
            (out / name).unlink(missing_ok=True)

    clear()
    stages = [stage for stage in STAGES if config.only is None or stage.name in config.only]
    try:
        return Supervisor(out, config, stages).run()
    except UserError:
        # Without a GPU there are no results to keep.
        clear()
        if created:
            out.rmdir()
        raise
