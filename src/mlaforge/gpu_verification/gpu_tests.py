"""Stage tests: the tests of the checkout with the marker `gpu`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from mlaforge.gpu_verification.case import AT_MOST, Case, Outcome, Prediction, Unsupported, WrongResult
from mlaforge.gpu_verification.context import Context

TESTS = Path(__file__).parents[3] / "tests"
# Test file of a twin, as it is quick in the interpreter.
TWIN = "ops/test_paged_attention_triton.py"
LIMIT = 400.0


def cases(context: Context) -> Iterator[Case]:
    """The stage's only case."""
    yield Case("pytest -m gpu", Prediction(0, "failures", AT_MOST), lambda: run(context), LIMIT)


def run(context: Context) -> Outcome:
    """Run pytest and write its report to junit.xml. Stop after 20 failures to save time."""
    # Other files may need packages that the machine lacks.
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if "mark.gpu" in path.read_text(encoding="utf-8")]
    if not files or find_spec("pytest") is None:
        raise Unsupported("this stage needs a checkout with tests, and pytest")
    report = context.folder / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu and not slow", "-p", "no:cacheprovider", "--maxfail=20"]
    selection = [str(TESTS / TWIN), "-k", "cannot_do or pieces"] if context.twin else list(map(str, files))
    command += [f"--junitxml={report}", "--rootdir", str(TESTS.parent), *selection]
    result = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    print(result.stdout, result.stderr)
    summary = next((line for line in reversed(result.stdout.splitlines()) if " in " in line), "no summary")
    counts = {status: int(count) for count, status in re.findall(r"(\d+) (passed|failed|error|skipped)", summary)}
    if result.returncode not in (0, 1) or not counts.get("passed"):
        raise WrongResult(f"pytest ended with exit code {result.returncode}: {summary}")
    return Outcome(counts.get("failed", 0) + counts.get("error", 0), detail=summary.strip("= "))
