"""Worker process that runs the cases of one stage: `python -m mlaforge.gpu_verification.worker JOB --report FD`.

JOB is a JSON file (`Job`). Reports go to the file descriptor FD, one flushed JSON line each: the list of cases with
their predictions, the start of a case, its end. A process that dies between start and end crashed in that case.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Exit code after a failed case made the CUDA context unusable.
BROKEN_CONTEXT = 70


@dataclasses.dataclass(frozen=True)
class Job:
    """Cases of the stage in `module`: from number `first` on, or number `only`. on_cpu: the stage needs no GPU."""

    module: str
    twin: bool
    on_cpu: bool
    facts: dict[str, Any]
    folder: str
    first: int = 0
    only: int | None = None


def main(path: str, report: Callable[[dict[str, Any]], None]) -> int:
    """Run a job and return the exit code. report: called with each report."""
    import torch

    from mlaforge.gpu_verification.case import Case, describe
    from mlaforge.gpu_verification.context import Context
    from mlaforge.runtime import UserError, resolve_device

    job = Job(**json.loads(Path(path).read_text(encoding="utf-8")))
    try:
        device = torch.device("cpu") if job.on_cpu else resolve_device("cuda")
    except UserError as reason:
        report({"event": "no device", "detail": str(reason)})
        return 0
    torch.manual_seed(0)
    context = Context(device, job.twin, job.facts, Path(job.folder))
    cases: list[Case] = list(importlib.import_module(job.module).cases(context))
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), f"two cases have the same name: {names}"
    report({"event": "cases", "cases": [{"case": c.name, "predicted": describe(c.prediction)} for c in cases]})
    numbers = range(job.first, len(cases)) if job.only is None else [job.only]
    for number in numbers:
        case = cases[number]
        report({"event": "start", "number": number, "limit": case.limit})
        start = time.perf_counter()
        status, body = _outcome(case, context)
        report({"event": "end", "number": number, "status": status, "seconds": time.perf_counter() - start, **body})
        if status == "crashed":
            return BROKEN_CONTEXT
    return 0


def _outcome(case: Any, context: Any) -> tuple[str, dict[str, Any]]:
    """Run a case. Return its status and the other keys of its report."""
    from mlaforge.gpu_verification.case import WITHIN, Unsupported, WrongResult

    try:
        outcome = case.run()
        context.synchronize()
    except Unsupported as reason:
        return "skipped", {"detail": str(reason)}
    except WrongResult as reason:
        return "off", {"detail": str(reason)}
    except Exception as error:  # any code may be a case: it raises nothing narrower
        traceback.print_exc()
        detail = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        try:
            context.synchronize()
        except Exception:  # CUDA errors of any kind; torch raises nothing narrower in all versions
            # The failure made the CUDA context unusable: no later case can run in this process.
            return "crashed", {"detail": detail}
        return "failed", {"detail": detail}
    # Times of the interpreter are not judged.
    holds = case.prediction.holds(outcome.measured) or (context.twin and case.prediction.rule == WITHIN)
    return "ok" if holds else "off", {
        "measured": outcome.measured, "share": outcome.share, "detail": outcome.detail, "more": outcome.more,
        "facts": outcome.facts,
    }  # fmt: skip


if __name__ == "__main__":
    _, job_path, _, descriptor = sys.argv
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as lines:

        def write(line: dict[str, Any]) -> None:
            lines.write(json.dumps(line) + "\n")
            lines.flush()

        code = main(job_path, write)
    sys.stdout.flush()
    sys.stderr.flush()
    # Destructors of a broken CUDA context may hang.
    os._exit(code)
