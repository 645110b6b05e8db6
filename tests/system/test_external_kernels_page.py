"""docs/reference/external-kernels.md is what the adapters refuse."""

import importlib.util
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_equals_the_refusals(monkeypatch):
    spec = importlib.util.spec_from_file_location("external_kernels", DOCS / "external_kernels.py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module.
    monkeypatch.setitem(sys.modules, "external_kernels", module)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run `python docs/external_kernels.py`"
