"""docs/architecture.md equals the page generated from the docstrings."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_equals_the_docstrings():
    spec = importlib.util.spec_from_file_location("architecture", DOCS / "architecture.py")
    architecture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(architecture)
    page = architecture.page()
    assert (DOCS / "architecture.md").read_text(encoding="utf-8") == page, "run `make architecture`"
    for path in architecture.PACKAGE.rglob("*.py"):
        if not path.stem.startswith("__"):
            assert f"`{path.name}`" in page, path
