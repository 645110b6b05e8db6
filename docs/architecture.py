"""Writes architecture.md beside it: who may import whom, and every file of the package by what its docstring says.

python docs/architecture.py     (or `make architecture`; a test holds the page to the code)
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "mlaforge"
HOUSE = ROOT / "tests" / "system" / "test_house.py"

OPENING = """\
# Architecture

This page is made by `make architecture` from the docstrings of the packages; a test holds it to the code.

A model is diagnosed, calibrated for, converted, healed, drafted for, served and judged. Each of these stages is
`run(config, inputs) -> artifact`: a directory with a `manifest.json`, the only thing that stages exchange.

## Who may import whom
A file imports its own package, or a line above its own (`tests/system/test_house.py` holds every import to it):

"""


def summary(path: Path) -> str:
    """The first sentence of a file's docstring, on one line, without its full stop."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert doc, f"{path} has no docstring"
    paragraph = " ".join(doc.split("\n\n")[0].split())
    return re.split(r"\.(?:\s|$)", paragraph, maxsplit=1)[0]


def order(name: str) -> list[str]:
    """The lines of a constant of the house test."""
    for node in ast.parse(HOUSE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return str(ast.literal_eval(node.value)).strip().split("\n")
    raise AssertionError(f"{HOUSE} has no {name}")


def files(folder: Path) -> list[str]:
    """A line for every module of a folder, those of its folders after them."""
    lines = [f"- `{path.name}`: {summary(path)}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
    for inner in sorted(path.parent for path in folder.glob("*/__init__.py")):
        lines += ["", f"### {inner.relative_to(PACKAGE)}/", f"{summary(inner / '__init__.py')}.", "", *files(inner)]
    return lines


def page() -> str:
    """The whole page."""
    lines = [f"    {line}" for line in order("ORDER")]
    lines += ["", "Inside `engine/`:", "", *(f"    {line}" for line in order("INSIDE_ENGINE"))]
    lines += ["", "## mlaforge/", f"{summary(PACKAGE / '__init__.py')}.", ""]
    lines += [
        f"- `{path.name}`: {summary(path)}" for path in sorted(PACKAGE.glob("*.py")) if not path.stem.startswith("__")
    ]
    for name in " ".join(order("ORDER")).split():
        folder = PACKAGE / name
        if folder.is_dir():
            lines += ["", f"## {name}/", f"{summary(folder / '__init__.py')}.", "", *files(folder)]
    return OPENING + "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "architecture.md").write_text(page(), encoding="utf-8")
