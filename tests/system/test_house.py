"""The house rules that a machine can check: who imports whom, what stays light, what is never used."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlaforge

ROOT = Path(mlaforge.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# The demo's model is of one family and is rewritten as another, or random tensors are: the families are their noun.
MAKERS = ("demo/model.py", "demo/gpt_oss.py", "demo/geometry.py")
# Formats of tool calls, by vLLM's names, which are also names of families.
CALL_FORMATS = {"mistral"}

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
tuning
demo
gpu_verification
cli
"""
# The same inside engine/, where files and folders are packages.
INSIDE_ENGINE = """
vllm_names
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


@functools.cache
def source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(source(path))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(syntax(path)))


def place(path: Path, node: ast.AST | None = None) -> str:
    """Where an offence is: "ops/native.py:12", or the file alone."""
    return f"{path.relative_to(ROOT)}:{node.lineno}" if node is not None else str(path.relative_to(ROOT))


def lines(order: str) -> dict[str, int]:
    """Package -> its line."""
    return {name: number for number, line in enumerate(order.split("\n")) for name in line.split()}


@functools.cache
def imports(path: Path) -> dict[tuple[str, ...], str]:
    """What of ours a file imports, wherever in it: ("engine", "cache", "view", "CacheView") -> its place."""
    names: dict[str, str] = {}
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name: place(path, node) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = ("mlaforge", *path.relative_to(ROOT).parts[:-1])
            base = [".".join(package[: len(package) - node.level + 1])] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}": place(path, node) for alias in node.names}
    return {
        tuple(name.split(".")[1:]): at for name, at in names.items() if name.split(".")[0] == "mlaforge" and "." in name
    }


def may_import(parts: tuple[str, ...], name: tuple[str, ...]) -> bool:
    """Whether the file `parts` may import `name`, by ORDER and INSIDE_ENGINE."""
    order, inside = lines(ORDER), lines(INSIDE_ENGINE)

    def above(order: dict[str, int], importer: str, other: str) -> bool:
        return importer == other or order[other] < order[importer]

    if name[0] in ROOM and parts[0] in ROOM:
        return True
    if not above(order, parts[0], name[0]):
        return False
    return not parts[0] == name[0] == "engine" or parts[1] == "__init__" or above(inside, parts[1], name[1])


def test_import_direction():
    modules = {path: path.relative_to(ROOT).with_suffix("").parts for path in FILES}
    modules = {path: parts for path, parts in modules.items() if parts not in (("__init__",), ("__main__",))}
    new = {parts[0] for parts in modules.values()} - lines(ORDER).keys()
    assert not new, f"new packages, which need a line of ORDER: {', '.join(sorted(new))}"
    offenders = [
        f"{at} imports {'.'.join(name)}, which ORDER and INSIDE_ENGINE have on the same line or below"
        for path, parts in modules.items()
        for name, at in imports(path).items()
        if name != ("__version__",) and not may_import(parts, name)
    ]
    assert not offenders, "\n".join(offenders)


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
        assert ast.get_docstring(syntax(folder / "__init__.py")), folder


def test_modeling_is_self_contained_and_flat():
    """What is copied into checkpoints imports torch, transformers, the standard library and flat siblings only."""
    for path in (ROOT / "modeling").glob("*.py"):
        for node in nodes(path):
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


FAMILY_WORDS = re.compile(r"\b(llama|qwen[23]?|mistral|ministral|mixtral|mimo|gpt_oss|gptoss)\b", re.IGNORECASE)


def named_families(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Yield where a file names a family: in a string that is no docstring, or in a name."""
    docs = {
        id(node.body[0].value)
        for node in nodes(path)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            name = "" if node.value in CALL_FORMATS else node.value
        else:
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if FAMILY_WORDS.search(name):
            yield node, name


def test_no_family_is_named_outside_families():
    offenders = [
        f"{place(path, node)}: {name!r} names a family; only families/ may"
        for path in FILES
        if path.parent.name != "families" and str(path.relative_to(ROOT)) not in MAKERS
        for node, name in named_families(path)
    ]
    assert not offenders, "\n".join(offenders)


PICKLES = re.compile(r"\bimport pickle\b|torch\.load\(|allow_pickle=True|weights_only=False")


def test_never_pickle_never_silence():
    offenders = []
    for path in FILES:
        text = source(path).splitlines()
        offenders += [f"{place(path)}:{n} reads pickles" for n, line in enumerate(text, 1) if PICKLES.search(line)]
        for node in nodes(path):
            if isinstance(node, ast.ExceptHandler):
                broad = node.type is None or (isinstance(node.type, ast.Name) and node.type.id == "Exception")
                if broad and "raises nothing narrower" not in text[node.lineno - 1]:
                    offenders.append(f"{place(path, node)} catches everything; catch what can be raised")
    assert not offenders, "\n".join(offenders)


def test_files_stay_readable():
    offenders = []
    for path in FILES:
        count = len(source(path).splitlines())
        offenders += [f"{place(path)} has no docstring"] * (not ast.get_docstring(syntax(path)))
        offenders += [f"{place(path)} has {count} lines; at most 450"] * (count > 450)
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno > 90:
                offenders.append(f"{place(path, node)} {node.name} has more than 90 lines")
    assert not offenders, "\n".join(offenders)


# Pronouns, passives and vague adjectives: the noun that an identifier holds is the better name.
VAGUE = set(re.findall(r"\w+", "own told made asked each found judged wanted kept held whoever burnt hush given both"))
# Identifiers that may have such a part, each with its reason; at most 40.
STANDARD = {
    "held_out": "held-out data is the field's term",
    "connection_made": "method of asyncio.Protocol",
}


def identifiers(path: Path) -> set[str]:
    """Names that a Python file defines, or all names of a C++ file."""
    if path.suffix != ".py":
        return set(re.findall(r"[A-Za-z_]\w*", re.sub(r'//.*|/\*.*?\*/|"[^"\n]*"', "", source(path))))
    names = {path.stem}
    for node in nodes(path):
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
