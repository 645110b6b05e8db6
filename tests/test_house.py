"""The house rules that a machine can check: who imports whom, what stays light, what is never used."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mlaforge

ROOT = Path(mlaforge.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in FILES]

BOTTOM = {"runtime", "config", "artifact"}
NOUNS = BOTTOM | {
    "spec",
    "families",
    "plan",
    "roofline",
    "checkpoint",
    "locate",
    "corpus",
    "mxfp4",
    "modeling",
    "options",
    "spill",
    "stream",
    "draft_head",
}
# What `calibrate` is made of.
GOLDEN = {"sources", "rfc", "embedder", "shards", "golden", "datasheet"}
# Module or package -> what of ours it may import. Stages never import each other; demo and cli may.
ALLOWED = {
    "__init__": set(),
    "runtime": {"__init__"},
    "config": {"runtime"},
    "artifact": {"runtime", "__init__"},
    "modeling": {"modeling"},
    "spec": BOTTOM,
    "families": BOTTOM | {"spec", "families"},
    "plan": BOTTOM | {"spec", "families"},
    "roofline": BOTTOM | {"spec", "families", "plan"},
    "plan_report": BOTTOM | {"spec", "families", "plan", "roofline"},
    "options": {"config"},
    "verbs": {"runtime", "config"},
    "spill": set(),
    "mxfp4": {"runtime"},
    "checkpoint": BOTTOM | {"families", "modeling", "mxfp4", "spec"},
    "locate": BOTTOM | {"checkpoint"},
    "stream": BOTTOM | {"families", "modeling", "mxfp4", "checkpoint"},
    "corpus": BOTTOM,
    "rfc": set(),
    "sources": BOTTOM | {"corpus", "rfc"},
    "embedder": {"runtime", "locate"},
    "shards": {"embedder", "sources", "spill"},
    "golden": {"embedder", "runtime"},
    "datasheet": set(),
    "calibrate": NOUNS | GOLDEN,
    "draft_head": BOTTOM | {"checkpoint", "modeling"},
    "draft_import": NOUNS,
    "draft_check": NOUNS | {"answers"},
    "draft_compare": NOUNS | {"draft_check", "engine"},
    "moments": NOUNS,
    "factorize": {"spec", "moments"},
    "spectra": {"runtime", "spec", "plan", "moments", "factorize"},
    "plan_file": {"config", "plan", "runtime", "spec"},
    "attention_stats": {"spec"},
    "routing": {"spec"},
    "geometry": {"spec", "moments", "factorize"},
    "verdicts": {"attention_stats", "plan", "routing", "runtime"},
    "diagnosis_page": {"page"},
    "diagnose": NOUNS
    | {"moments", "spectra", "plan_file", "attention_stats", "routing", "geometry", "verdicts", "diagnosis_page"},
    "refit": {"runtime", "stream"},
    "rebuild": NOUNS | {"moments", "factorize", "refit", "export", "evaluate", "spectra"},
    "export": NOUNS | {"factorize", "moments"},
    "export_deepseek": NOUNS,
    "convert": NOUNS | {"moments", "rebuild", "export", "evaluate", "plan_file"},
    "evaluate": NOUNS,
    "criteria": BOTTOM,
    "needle": {"runtime", "corpus"},
    "harness": BOTTOM,
    "acceptance": NOUNS | {"criteria", "harness", "kl", "needle"},
    "generate": NOUNS | {"engine"},
    "answers": BOTTOM,
    "regenerate": NOUNS | {"answers", "engine"},
    "page": set(),
    "results": {"page"},
    "advice": {"page", "results"},
    "deviations": {"page", "results"},
    "results_figures": {"page", "results"},
    "report_figures": {"page", "results", "diagnosis_page", "results_figures", "__init__"},
    "report": BOTTOM | {"page", "results", "advice", "deviations", "report_figures"},
    "card": BOTTOM | {"deviations", "options", "page", "report", "results"},
    "publish": BOTTOM | {"checkpoint"},
    "demo_model": NOUNS,
    "upcycle": set(),
    "sinks": set(),
    "kl": set(),
    "packing": BOTTOM | {"corpus", "kl"},
    "distill": {"kl", "packing"},
    "trainer": {"packing"},
    "sharding": set(),
    "teacher_cache": {"runtime", "spill", "distill", "kl", "packing"},
    "course": {"runtime", "artifact", "packing", "spill", "trainer", "sharding"},
    "token_map": BOTTOM,
    "draft_vocab": NOUNS | {"answers", "token_map"},
    "draft_lookup": {"runtime", "modeling", "packing", "unroll"},
    "draft_start": {"runtime", "modeling", "packing", "unroll", "draft_lookup"},
    "unroll": {"distill", "kl", "modeling", "packing"},
    "draft_train": NOUNS
    | {"answers", "token_map", "packing", "trainer", "sharding", "teacher_cache", "course", "unroll", "draft_start"},
    "heal": NOUNS | {"refit", "packing", "distill", "trainer", "sharding", "teacher_cache", "course"},
    "ops": {"runtime"},
    "engine": NOUNS | {"ops"},
    # Artifacts, and the engine as LLM hands it out; `evaluate` is what a perplexity is; `answers` knows prompts.
    "bench": NOUNS | {"answers", "engine", "ops", "evaluate"},
    "vllm_plugin": {"runtime", "families", "checkpoint", "modeling", "engine"},
    "make_gptoss": NOUNS | {"demo_model", "upcycle", "sinks", "refit", "packing", "distill", "trainer"},
}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Rooms of ours that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                package = ("mlaforge", *path.relative_to(ROOT).parts[:-1])
                base = ".".join(package[: len(package) - node.level + 1])
                found.add(f"{base}.{node.module}" if node.module else base)
            elif node.module == "mlaforge":
                found |= {f"mlaforge.{alias.name}" for alias in node.names}
            elif node.module:
                found.add(node.module)
    ours = {name for name in found if name.split(".")[0] == "mlaforge"}
    rooms = {name.split(".")[1] if "." in name else "__init__" for name in ours}
    return {"__init__" if name == "__version__" else name for name in rooms}


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_import_direction(path):
    name = room(path)
    if name in ("cli", "draft_cli", "demo", "__main__"):
        return
    assert name in ALLOWED, f"{name} is new: say in this table what it may import"
    assert imports(path) <= ALLOWED[name] | {name}


def test_nobody_imports_the_command_line():
    assert [str(p) for p in FILES if "cli" in imports(p) and room(p) != "__main__"] == []
    assert [str(p) for p in FILES if "draft_cli" in imports(p) and room(p) != "cli"] == []


def test_the_table_names_only_rooms_that_exist():
    assert set(ALLOWED) <= {room(path) for path in FILES}


def test_modeling_is_self_contained_and_flat():
    """What is copied into checkpoints imports torch, transformers, the standard library and flat siblings only."""
    for path in (ROOT / "modeling").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and "." not in (node.module or ""), path
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                for name in names:
                    top = name.split(".")[0]
                    assert top in ("torch", "transformers") or top in sys.stdlib_module_names, (path, name)


def test_importing_the_package_is_light():
    code = (
        "import sys, mlaforge, mlaforge.cli.main, mlaforge.planning.plan\n"
        "heavy = {'torch', 'transformers', 'triton', 'datasets', 'vllm', 'fastapi', 'matplotlib', 'sklearn'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_no_family_is_named_outside_families(path):
    # make_gptoss rewrites one family as another: the families are its noun.
    if room(path) in ("families", "demo_model", "make_gptoss"):
        return
    tree = ast.parse(path.read_text())
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    words = re.compile(r"\b(llama|qwen[23]?|mistral|mixtral|mimo|gpt_oss|gptoss)\b", re.IGNORECASE)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            assert not words.search(node.value), node.value
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            assert not words.search(name), name


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_never_pickle_never_silence(path):
    text = path.read_text()
    assert not re.search(r"\bimport pickle\b|torch\.load\(|allow_pickle=True|weights_only=False", text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or (isinstance(node.type, ast.Name) and node.type.id == "Exception")
            assert not broad, f"{path}:{node.lineno} catches everything"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_files_stay_readable(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path} has no docstring"
    assert len(path.read_text().splitlines()) <= 450
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno <= 90, f"{path}:{node.lineno} {node.name} is long"
