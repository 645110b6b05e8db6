"""Stage tests: the tests of the checkout with the marker `gpu`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from mlaforge.gpu_verification.case import AT_MOST, Case, Outcome, Prediction, Unfit, Wrong
from mlaforge.gpu_verification.context import Context

TESTS = Path(__file__).parents[3] / "tests"
# Of a twin: one file that is quick in the interpreter.
TWIN = "ops/test_paged_attention_triton.py"
LIMIT = 400.0


def cases(context: Context) -> Iterator[Case]:
    """The stage's only case."""
    yield Case("pytest -m gpu", Prediction(0, "failures", AT_MOST), lambda: run(context), LIMIT)


def run(context: Context) -> Outcome:
    """Runs pytest; its report stands in junit.xml. The first failures end it, so that others do not take the time."""
    # Other files may need packages that such a machine lacks.
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if "mark.gpu" in path.read_text(encoding="utf-8")]
    if not files or find_spec("pytest") is None:
        raise Unfit("it needs a checkout with its tests, and pytest")
    report = context.folder / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu and not slow", "-p", "no:cacheprovider", "--maxfail=20"]
    more = [str(TESTS / TWIN), "-k", "cannot_do or pieces"] if context.twin else list(map(str, files))
    command += [f"--junitxml={report}", "--rootdir", str(TESTS.parent), *more]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    last = next((line for line in reversed(done.stdout.splitlines()) if " in " in line), "no summary")
    found = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error|skipped)", last)}
    if done.returncode not in (0, 1) or not found.get("passed"):
        raise Wrong(f"pytest ended with exit code {done.returncode}: {last}")
    return Outcome(found.get("failed", 0) + found.get("error", 0), detail=last.strip("= "))
