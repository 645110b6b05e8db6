"""Tuned configurations of kernels, by op and shape: tables that `mlaforge tune` writes, and their use.

Layers, the first that has an entry decides: the file of option `tuned` or $MLAFORGE_TUNED, the cache's table of this
device, the packaged one (tuned/). Without an entry a launch takes its default. A call is a *hit* (an entry), a
*default* (no table has entries of its op), or a *miss* (one has, but not for this shape, or the op's source changed).

Keys are tuples of words and numbers. A configuration changes no sum of the CPU kernels: they find theirs in a table
inside the compiled library (cpu/simd/configuration.h), so that a call runs no Python; `load` fills it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from importlib import metadata as packages
from pathlib import Path
from typing import Any

import torch

from mlaforge import runtime
from mlaforge.ops import native
from mlaforge.ops.gpu_properties import gpu_properties

FOLDER = Path(__file__).parent
PACKAGED = FOLDER / "tuned"
Key = tuple[str | int, ...]
Configuration = dict[str, int]

# Files whose change makes an op's entries misses, by the type of the device.
SOURCES = {
    "cpu": {"product": ("cpu/linear", "cpu/simd"), "experts": ("cpu/experts", "cpu/linear/product.h", "cpu/simd")},
    "cuda": {
        "attention": ("paged_attention_triton.py", "attention_program_triton.py", "attention_tiles.py", "work_list.py"),
        "latent": ("latent_attention_gpu.py", "latent_attention_triton.py"),
        "selection": ("token_selection_triton.py",),
        "experts": ("mxfp4_experts_triton.py",),
        "vector_product": ("vector_product_triton.py",),
    },
}
# Kernels of the compiled library by format of the weights, and their constants, both in the order of configuration.h.
PRODUCTS, EXPERTS = {"bfloat16": 0, "int8": 1, "int4": 2}, 3
NATIVE_KERNELS = EXPERTS + 1
CONSTANTS = ("ahead", "panel", "task")
# Formats of weights that the compiled CPU kernels multiply, with tuned configurations.
COMPILED = (*PRODUCTS, "mxfp4")

ROWS, SEQUENCES = (1, 2, 4, 8, 16), (1, 4, 16, 64)
MORE_ROWS = 128


def rows_bucket(rows: int) -> int:
    """Return the bucket of a number of rows, or of query tokens: the next of ROWS, MORE_ROWS for more."""
    return next((bucket for bucket in ROWS if rows <= bucket), MORE_ROWS)


def sequences_bucket(sequences: int) -> int:
    """Return the bucket of a number of sequences: the next of SEQUENCES, the last for more."""
    return next((bucket for bucket in SEQUENCES if sequences <= bucket), SEQUENCES[-1])


def span_bucket(span: int) -> int:
    """Return the power of two that is not below a number of cached tokens."""
    return 1 << max(0, span - 1).bit_length()


def product_key(format: str, outputs: int, inputs: int, rows: int) -> Key:
    """Return the key of rows times weights [outputs, inputs] in `format`."""
    return format, outputs, inputs, rows_bucket(rows)


def vector_product_key(weight_MK: torch.Tensor) -> Key:
    """Return the key of a few rows times weights [outputs, inputs] on a GPU: one for all numbers of rows."""
    return str(weight_MK.dtype).removeprefix("torch."), *weight_MK.shape


def experts_key(experts: int, top_k: int, hidden: int, intermediate: int, rows: int) -> Key:
    """Return the key of a mixture of experts on so many rows."""
    return experts, top_k, hidden, intermediate, rows_bucket(rows)


def attention_key(
    kind: str, D: int, V: int, heads: int, kv_heads: int, format: str, queries: int, sequences: int, span: int,
    sparse: bool,
) -> Key:  # fmt: skip
    """Return the key of attention. kind: gqa, mla or latent; D, V: widths of keys and values; heads: query heads;
    queries: of a sequence; span: the most cached tokens that one reads; sparse: over selected tokens."""
    reading = "sparse" if sparse else "dense"
    shape = rows_bucket(queries), sequences_bucket(sequences), span_bucket(span)
    return kind, D, V, heads, kv_heads, format, *shape, reading


def selection_key(heads: int, width: int, sequences: int, span: int) -> Key:
    """Return the key of a selection of tokens by index keys of so many elements."""
    return heads, width, sequences_bucket(sequences), span_bucket(span)


def text(key: Key) -> str:
    """Return a key as tables name it."""
    return ",".join(map(str, key))


class Refused(Exception):
    """A table is not for this device, or damaged. The message says why."""


@dataclasses.dataclass
class Table:
    """entries: op -> key, as text -> entry. ops: those that were tuned, entries or not."""

    path: Path
    entries: dict[str, dict[str, dict[str, Any]]]
    ops: frozenset[str]

    @property
    def size(self) -> int:
        return sum(map(len, self.entries.values()))

    def find(self, op: str, key: str) -> dict[str, Any] | None:
        return self.entries.get(op, {}).get(key)


@dataclasses.dataclass
class _State:
    """The tables in use, the first goes first; since they were set, calls of Python by op and outcome, and shapes that
    missed; counts of the compiled kernels before; shapes seen by this process."""

    layers: list[Table] = dataclasses.field(default_factory=list)
    calls: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    missing: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    native_before: list[int] = dataclasses.field(default_factory=lambda: [0] * (2 * NATIVE_KERNELS))
    seen: Counter[tuple[str, Key]] = dataclasses.field(default_factory=Counter)
    logged: set[str] = dataclasses.field(default_factory=set)


_state = _State()


def config(op: str, key: Key) -> Configuration | None:
    """Return the configuration of a shape; None: the launch's default. Counts the call."""
    record = entry(op, key)
    outcome = "hit" if record is not None else "miss" if is_tuned(op) else "default"
    _state.calls[op, outcome] += 1
    _state.seen[op, key] += 1
    if outcome == "miss":
        _state.missing[op, text(key)] += 1
    return (record or {}).get("configuration") or None


def entry(op: str, key: Key) -> dict[str, Any] | None:
    """Return a shape's entry, if there is one, without counting."""
    name = text(key)
    return next((record for table in _state.layers if (record := table.find(op, name)) is not None), None)


def is_tuned(op: str) -> bool:
    """Return whether a table was tuned for an op, so that a shape without an entry is a miss."""
    return any(op in table.ops for table in _state.layers)


def missing() -> Counter[tuple[str, str]]:
    """Return the shapes (op, key as text) that missed in `config` since the tables were set, with their calls."""
    return Counter(_state.missing)


def seen() -> Counter[tuple[str, Key]]:
    """Return the shapes (op, key) of all calls of `config` since the start."""
    return Counter(_state.seen)


def counts() -> dict[str, Counter[str]]:
    """Return the hits, defaults and misses of each op since the tables were set. Calls within a captured graph count
    once, at its capture."""
    totals: dict[str, Counter[str]] = {}
    for (op, outcome), count in _state.calls.items():
        totals.setdefault(op, Counter())[outcome] += count
    numbers = [number - before for number, before in zip(_native_counts(), _state.native_before, strict=True)]
    half = len(numbers) // 2
    for kernel, (calls, hits) in enumerate(zip(numbers[:half], numbers[half:], strict=True)):
        op = "experts" if kernel == EXPERTS else "product"
        of_op = totals.setdefault(op, Counter())
        of_op["hit"] += hits
        of_op["miss" if is_tuned(op) else "default"] += calls - hits
    return totals


def _native_counts() -> list[int]:
    """Calls of the compiled kernels, then those with an entry, by kernel."""
    if not (native.is_loaded() and native.is_available()):
        return [0] * (2 * NATIVE_KERNELS)
    numbers: list[int] = native.kernel("configured")()
    return numbers


def totals() -> Counter[str]:
    """Return the hits, defaults and misses of all ops together."""
    return sum(counts().values(), Counter())


def identity() -> dict[str, Any]:
    """Return what results record: a hash of all configurations in use, their number, and the names of the files."""
    merged: dict[str, Any] = {}
    for table in reversed(_state.layers):
        for op, entries in table.entries.items():
            merged |= {f"{op} {key}": record["configuration"] for key, record in entries.items()}
    content = json.dumps(merged, sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:12] if merged else None
    return {"hash": digest, "entries": len(merged), "files": [table.path.name for table in _state.layers]}


@functools.cache
def sources(device_type: str) -> dict[str, str]:
    """Return a hash of each op's source, with the versions of torch and Triton that compile it."""
    hashes = {}
    for op, names in SOURCES[device_type].items():
        parts = [f"{torch.__version__} {_version('triton') if device_type == 'cuda' else ''}".encode()]
        for name in names:
            path = FOLDER / name
            files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
            parts += [file.read_bytes() for file in files]
        hashes[op] = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    return hashes


def _version(package: str) -> str | None:
    try:
        return packages.version(package)
    except packages.PackageNotFoundError:
        return None


def metadata(device: torch.device) -> dict[str, Any]:
    """Return the facts of this machine under which a table is valid."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else runtime.processor_name(),
        "form": None if cuda else native.form(), "threads": None if cuda else torch.get_num_threads(),
        "multiprocessors": gpu_properties(device).multiprocessors if cuda else None,
        "torch": torch.__version__, "triton": _version("triton"), "sources": sources(device.type),
    }  # fmt: skip


def file_name(facts: dict[str, Any]) -> str:
    """Return the name of a device's table."""
    words = [facts["device"], facts["form"], facts["threads"] and f"{facts['threads']} threads"]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(filter(None, words)).lower()).strip("-") + ".json"


def cache_file(facts: dict[str, Any]) -> Path:
    """Return the table of this device in the cache, where `mlaforge tune` writes without --out."""
    return runtime.cache_home() / "tuned" / file_name(facts)


def read(path: Path, facts: dict[str, Any]) -> Table:
    """Return the table of a file. Entries of ops whose source has changed are left out. Raise Refused, OSError."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        header = body.pop("_metadata")
        machine = {name: header[name] for name in ("device", "form", "threads", "multiprocessors")}
        tuned_sources = dict(header["sources"])
        for op, entries in body.items():
            for key, record in entries.items():
                numbers = record["configuration"].items()
                if op not in tuned_sources or not all(type(number) is int and number >= 0 for _, number in numbers):
                    raise Refused(f"{path} is damaged: {op} {key}")
        _native_rows(Table(path, body, frozenset(body)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{path} is damaged: it is no table that `mlaforge tune` wrote") from error
    for name, value in machine.items():
        if value != facts[name]:
            raise Refused(f"{path} was tuned for {name} {value}, here it is {facts[name]}; run `mlaforge tune` here")
    current = {op: entries for op, entries in body.items() if tuned_sources[op] == facts["sources"].get(op)}
    return Table(path, current, frozenset(body))


def save(path: Path, facts: dict[str, Any], entries: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Write a table, atomically."""
    runtime.replace_file(path, runtime.compact_json({"_metadata": facts, **entries}, 200) + "\n")


def load(device: torch.device, file: str | None = None) -> None:
    """Use the tables of a device from now on; `file`, else $MLAFORGE_TUNED, goes first. `none` as the file: no table.

    Raise UserError if that file is missing, damaged or another device's; the cache's is then ignored with a log line.
    """
    name, layers = file or runtime.tuned_file(), list[Table]()
    facts = metadata(device)
    if name and name != "none":
        try:
            layers.append(read(Path(name), facts))
        except OSError as error:
            raise runtime.UserError(f"tuned = {name!r} cannot be read: {error.strerror}") from error
        except Refused as error:
            raise runtime.UserError(str(error)) from error
    for path in (cache_file(facts), PACKAGED / file_name(facts)) if name != "none" else ():
        try:
            layers.append(read(path, facts))
        except FileNotFoundError:
            continue
        except (OSError, Refused) as error:
            _log_once(f"tuned kernels: the cache's table is ignored: {error}")
    for table in layers:
        _log_once(f"tuned kernels: {table.size} entries for {facts['device']} ({table.path})")
    use(layers, device)


def _log_once(line: str) -> None:
    if line not in _state.logged:
        _state.logged.add(line)
        runtime.log(line)


def use(layers: Iterable[Table], device: torch.device) -> None:
    """Use these tables from now on, the first goes first, and count from zero."""
    _state.layers = list(layers)
    _state.missing.clear()
    _state.calls.clear()
    if device.type == "cpu" and native.is_available():
        rows = [row for table in reversed(_state.layers) for row in _native_rows(table)]
        native.kernel("configure")([number for row in rows for number in row])
    _state.native_before = _native_counts()


def candidate(op: str, key: Key, configuration: Configuration) -> Table:
    """Return a table of one configuration, to measure it."""
    return Table(Path("candidate"), {op: {text(key): {"configuration": configuration}}}, frozenset((op,)))


def _native_rows(table: Table) -> list[list[int]]:
    """Rows of the compiled kernels' table."""
    rows = []
    for key, record in table.entries.get("product", {}).items():
        format, outputs, inputs, bucket = key.split(",")
        rows.append([PRODUCTS[format], int(outputs), int(inputs), 0, 0, int(bucket), *_constants(record)])
    for key, record in table.entries.get("experts", {}).items():
        experts, top_k, hidden, intermediate, rows_of = map(int, key.split(","))
        rows.append([EXPERTS, intermediate, hidden, experts, top_k, rows_of, *_constants(record)])
    return rows


def _constants(record: dict[str, Any]) -> list[int]:
    return [record["configuration"].get(name, 0) for name in CONSTANTS]
