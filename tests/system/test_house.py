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
# The demo's model is of one family and is rewritten as another, or random tensors are: the families are their noun.
MAKERS = ("demo/model.py", "demo/gpt_oss.py", "demo/geometry.py")
# Formats of tool calls, by vLLM's names, which are also names of families.
CALL_FORMATS = {"mistral"}
NAMES = [str(path.relative_to(ROOT)) for path in FILES]

# Who may import whom: a file imports its own package, or a line above its own.
ORDER = """
runtime config artifact tensor_store modeling
ops families rendering
checkpoint data
planning training
factorization engine
synthesis
diagnosis calibration conversion sparsity healing drafting evaluation serving
bench report vllm_plugin
demo
gpu_verification
cli
"""
# The same inside engine/, where files and folders are packages.
INSIDE_ENGINE = """
config
cache sampling
request execution
speculation scheduler
stats step config_checks memory
builder
engine
llm
"""
# Files of the root are one package; `__init__` is the public API and `__main__` the command.
ROOM = {"runtime", "config", "artifact", "tensor_store"}


def lines(order: str) -> dict[str, int]:
    """Package -> its line."""
    return {name: number for number, line in enumerate(order.split("\n")) for name in line.split()}


def imports(path: Path) -> set[tuple[str, ...]]:
    """What of ours a file imports, wherever in it: ("engine", "cache", "view", "CacheView")."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = ("mlaforge", *path.relative_to(ROOT).parts[:-1])
            base = [".".join(package[: len(package) - node.level + 1])] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return {tuple(name.split(".")[1:]) for name in names if name.split(".")[0] == "mlaforge" and "." in name}


def above(order: dict[str, int], own: str, other: str) -> bool:
    return own == other or order[other] < order[own]


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_import_direction(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts in (("__init__",), ("__main__",)):
        return
    order, inside = lines(ORDER), lines(INSIDE_ENGINE)
    assert parts[0] in order, f"{parts[0]} is new: say on which line of ORDER it stands"
    for name in imports(path) - {("__version__",)}:
        if name[0] in ROOM and parts[0] in ROOM:
            continue
        assert above(order, parts[0], name[0]), f"{'/'.join(parts)} imports {'.'.join(name)}"
        if parts[0] == name[0] == "engine" and parts[1] != "__init__":
            assert above(inside, parts[1], name[1]), f"{'/'.join(parts)} imports {'.'.join(name)}"


def test_no_file_imports_itself_by_a_detour():
    """No cycle of files, whatever packages they stand in."""
    modules = {path.relative_to(ROOT).with_suffix("").parts: path for path in FILES}
    modules = {parts[:-1] if parts[-1] == "__init__" else parts: path for parts, path in modules.items()}
    edges = {
        parts: {name[:k] for name in imports(path) for k in (len(name), len(name) - 1) if name[:k] in modules} - {parts}
        for parts, path in modules.items()
        if parts
    }
    done: set[tuple[str, ...]] = set()

    def walk(parts: tuple[str, ...], trail: tuple[tuple[str, ...], ...]) -> None:
        assert parts not in trail, " -> ".join("/".join(p) for p in (*trail[trail.index(parts) :], parts))
        if parts in done:
            return
        for other in edges.get(parts, ()):
            walk(other, (*trail, parts))
        done.add(parts)

    for parts in edges:
        walk(parts, ())


def test_the_root_holds_five_modules():
    assert {path.stem for path in ROOT.glob("*.py")} - {"__main__"} == {"__init__", *ROOM}


def test_every_package_says_what_it_is():
    for folder in {path.parent for path in FILES}:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


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
    if path.parent.name == "families" or str(path.relative_to(ROOT)) in MAKERS:
        return
    tree = ast.parse(path.read_text())
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    words = re.compile(r"\b(llama|qwen[23]?|mistral|ministral|mixtral|mimo|gpt_oss|gptoss)\b", re.IGNORECASE)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            assert not words.search(node.value) or node.value in CALL_FORMATS, node.value
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
            foreign = "raises nothing narrower" in text.splitlines()[node.lineno - 1]
            assert not broad or foreign, f"{path}:{node.lineno} catches everything"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_files_stay_readable(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path} has no docstring"
    assert len(path.read_text().splitlines()) <= 450
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno <= 90, f"{path}:{node.lineno} {node.name} is long"


# Pronouns, passives and vague adjectives: the noun that an identifier holds is the better name.
VAGUE = set(re.findall(r"\w+", "own told made asked each found judged wanted kept held whoever burnt hush given both"))
# Identifiers that may have such a part, each with its reason; at most 40.
STANDARD = {
    "held_out": "held-out data is the field's term",
    "connection_made": "method of asyncio.Protocol",
}


def identifiers(path: Path) -> set[str]:
    """Names that a Python file defines, or all names of a C++ file."""
    text = path.read_text()
    if path.suffix != ".py":
        return set(re.findall(r"[A-Za-z_]\w*", re.sub(r'//.*|/\*.*?\*/|"[^"\n]*"', "", text)))
    names = {path.stem}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.alias) and node.asname:
            names.add(node.asname)
    return names


def parts(name: str) -> set[str]:
    """Lower-case parts of an identifier: KeptKeys and kept_keys have kept and keys."""
    return {part.lower() for part in re.split(r"_+|(?<=[a-z0-9])(?=[A-Z])", name)}


def test_identifiers_are_nouns():
    assert parts("KeptKeys") & VAGUE and parts("_own_N") & VAGUE and not parts("downs") & VAGUE
    files = [path for path in sorted(ROOT.rglob("*")) if path.suffix in (".py", ".h", ".cpp")]
    offenders = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in identifiers(path) - STANDARD.keys()
        if parts(name) & VAGUE
    }
    assert len(STANDARD) <= 40 and not offenders, "\n".join(sorted(offenders))
