"""The process that runs the cases of one stage: `python -m mlaforge.gpu_verification.worker JOB --report FD`.

JOB is a JSON file (`Job`). Reports go to the file descriptor FD, one flushed JSON line each: the list of cases with
their predictions, the start of a case, its end. A process that dies between start and end has crashed in that case.
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

# Exit code of a process whose CUDA context a failed case has made unusable.
BROKEN_CONTEXT = 70


@dataclasses.dataclass(frozen=True)
class Job:
    """Cases from number `first` on, or number `only` alone, of the stage in `module`; `on_cpu`: it needs no GPU."""

    module: str
    twin: bool
    on_cpu: bool
    facts: dict[str, Any]
    folder: str
    first: int = 0
    only: int | None = None


def main(path: str, report: Callable[[dict[str, Any]], None]) -> int:
    """Runs a job; the exit code."""
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
    listed: list[Case] = list(importlib.import_module(job.module).cases(context))
    names = [case.name for case in listed]
    assert len(set(names)) == len(names), f"two cases have one name: {names}"
    report({"event": "cases", "cases": [{"case": c.name, "predicted": describe(c.prediction)} for c in listed]})
    numbers = range(job.first, len(listed)) if job.only is None else [job.only]
    for number in numbers:
        case = listed[number]
        report({"event": "start", "number": number, "limit": case.limit})
        began = time.perf_counter()
        status, body = _outcome(case, context)
        report({"event": "end", "number": number, "status": status, "seconds": time.perf_counter() - began, **body})
        if status == "crashed":
            return BROKEN_CONTEXT
    return 0


def _outcome(case: Any, context: Any) -> tuple[str, dict[str, Any]]:
    """Status of a case and what is reported with it."""
    from mlaforge.gpu_verification.case import WITHIN, Unfit, Wrong

    try:
        outcome = case.run()
        context.synchronize()
    except Unfit as reason:
        return "skipped", {"detail": str(reason)}
    except Wrong as reason:
        return "off", {"detail": str(reason)}
    except Exception as error:  # any code may be a case: it raises nothing narrower
        traceback.print_exc()
        detail = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        try:
            context.synchronize()
        except Exception:  # CUDA errors of any kind; torch raises nothing narrower in all versions
            # Whatever failed has taken the CUDA context with it: no case after it could run here.
            return "crashed", {"detail": detail}
        return "failed", {"detail": detail}
    # Times of an interpreter say nothing.
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
