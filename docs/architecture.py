"""Generate architecture.md beside this file: import rules, one line per package, and one short line per key module.

python docs/architecture.py     (or `make architecture`; tests/system/test_architecture.py compares the page)

Lines are the first sentences of docstrings, cut to as many words as keep the page within WORDS.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "mlaforge"
HOUSE = ROOT / "tests" / "system" / "test_house.py"
# Words of the page at most, and of one line.
WORDS, LONGEST = 1400, 22

# The modules that a reader looks for first; all others are listed by name.
KEY_MODULES = """
artifact config runtime tensor_store
modeling/latent_attention_mla modeling/coded_rows_mla
ops/dispatch ops/native ops/paged_attention ops/row_formats/format
families/family families/spec families/fields
checkpoint/source_model checkpoint/reader checkpoint/writer
data/corpus planning/plan training/loop
factorization/latent factorization/moments
engine/llm engine/engine engine/scheduler engine/cache/kv_cache engine/cache/view
engine/execution/model engine/execution/attention engine/execution/runner engine/sampling/sampler
engine/speculation/drafter engine/speculation/verification
diagnosis/diagnose calibration/calibrate conversion/convert conversion/writer
sparsity/sparsify healing/heal drafting/train evaluation/perplexity
serving/app serving/protocol bench/scenario bench/gate report/report vllm_plugin/model
"""

OPENING = """\
# Architecture

`make architecture` generates this page from the docstrings; a test compares it with the code. Key modules have a line,
the others are listed by name.

Each stage (diagnose, calibrate, convert, sparsify, heal, draft, bench) writes an artifact: a directory with a
`manifest.json`. Stages exchange artifacts only and never import each other. The C++ kernels are in
`ops/cpu/` ([ops.md](ops.md)). Tests mirror the packages: `tests/PACKAGE/test_FILE.py`.

## Imports

A file imports its own package or a package on a line above its own. `tests/system/test_house.py` enforces this.

"""


def summary(path: Path) -> str:
    """Return the first sentence of a file's docstring, on one line, without its full stop."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert doc, f"{path} has no docstring"
    paragraph = " ".join(doc.split("\n\n")[0].split())
    return re.split(r"\.(?:\s|$)", paragraph, maxsplit=1)[0]


def shorten(sentence: str, longest: int) -> str:
    """Cut a sentence to at most `longest` words: after a colon or semicolon if one is there, else with an ellipsis."""
    words = sentence.split()
    if len(words) <= longest:
        return sentence
    words = words[:longest]
    # A cut inside code or parentheses moves before them.
    while words and (" ".join(words).count("`") % 2 or " ".join(words).count("(") > " ".join(words).count(")")):
        words.pop()
    clauses = [n for n, word in enumerate(words, 1) if word[-1] in ";:" and n >= 4]
    if clauses:
        return " ".join(words[: clauses[-1]])[:-1]
    return " ".join(words).rstrip(",") + " …"


def order(name: str) -> list[str]:
    """Return the lines of a constant of the house test."""
    for node in ast.parse(HOUSE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return str(ast.literal_eval(node.value)).strip().split("\n")
    raise AssertionError(f"{HOUSE} has no {name}")


def modules(folder: Path, longest: int) -> list[str]:
    """Return a line for each key module of a folder, and one line with the names of the others."""
    key = {PACKAGE / f"{name}.py" for name in KEY_MODULES.split()}
    paths = sorted(path for path in folder.glob("*.py") if not path.stem.startswith("__"))
    lines = [f"- `{path.name}`: {shorten(summary(path), longest)}" for path in paths if path in key]
    names = [f"`{path.name}`" for path in paths if path not in key]
    return [*lines, *([f"- {', '.join(names)}"] if names else [])]


def packages(folder: Path, longest: int) -> list[str]:
    """Return the section of a package, those of its folders after it."""
    name = folder.relative_to(PACKAGE)
    level = "#" * (len(name.parts) + 1)
    lines = ["", f"{level} {name}/", "", f"{shorten(summary(folder / '__init__.py'), min(LONGEST, 2 * longest))}.", ""]
    lines += modules(folder, longest)
    for inner in sorted(path.parent for path in folder.glob("*/__init__.py")):
        lines += packages(inner, longest)
    return lines


def page() -> str:
    """Return the whole page, with lines as long as the limit of words allows."""
    missing = [name for name in KEY_MODULES.split() if not (PACKAGE / f"{name}.py").exists()]
    assert not missing, f"docs/architecture.py names modules that do not exist: {', '.join(missing)}"
    text = ""
    for longest in range(LONGEST, 4, -1):
        lines = [f"    {line}" for line in order("ORDER")]
        lines += ["", "Inside `engine/`:", "", *(f"    {line}" for line in order("INSIDE_ENGINE"))]
        lines += ["", "## mlaforge/", "", *modules(PACKAGE, longest)]
        for name in " ".join(order("ORDER")).split():
            if (PACKAGE / name).is_dir():
                lines += packages(PACKAGE / name, longest)
        text = OPENING + "\n".join(lines).replace("….", "…") + "\n"
        if len(text.split()) <= WORDS:
            break
    return text


if __name__ == "__main__":
    (ROOT / "docs" / "architecture.md").write_text(page(), encoding="utf-8")
