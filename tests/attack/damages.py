"""How files are damaged: whatever a disk, an editor, another tool or an enemy may do to them.

A damage changes one file of a copy and says what it did. `certain`: no command that reads the file may accept it.
"""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What may stand where something else belongs.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 33, 1.5, -0.0, 2**31, 2**63, 10**12, 10**30, 1e308, float("nan"), float("inf"),
    "", "x", "1", "auto", "../../etc", "\u0000", "é" * 40, "x" * 100_000, [], ["x"], [[]], [0], [-1], [10**12], [None],
    {}, {"x": 1}, [{}], [1] * 10_000,
)  # fmt: skip
# Of a config: sizes, which are whole numbers of at least 1.
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
NO_SIZE: tuple[Any, ...] = (0, -1, 1.5, "", "x", "64", [], [64], {}, 10**12, 10**30)
DTYPES = ("I8", "U8", "I16", "I32", "I64", "BOOL", "F64", "F8_E4M3", "F8_E5M2", "F16", "C64", "F4", "", "X")
YAML = (
    "steps: 3\nsteps: 4\n", "&a [*a]\n", "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]\n", "\tx: 1\n",
    "!!python/object/apply:os.system ['true']\n", "- x\n", "x\n", "? [a]\n: b\n", "seed: 1e400\n", "seed: .nan\n",
    "device: [cpu]\n", "device: {cpu: 1}\n", "seed: 0x10\n", "seed: 1_0\n", "seed: yes\n", "seed: 2026-01-01\n",
    "seed: !!binary aGk=\n", "1: 2\n", "null: 1\n", "true: 1\n", "seed: |\n  1\n", "---\nseed: 1\n---\nseed: 2\n",
    "%YAML 9.9\n---\nseed: 1\n", "[" * 20_000, "a: " * 20_000, "seed: " + "9" * 5000 + "\n", "<<: {seed: 1}\n",
    "<<: *x\n", "Seed: 1\n", "seed : 1\n", "SEED: 1\n", "recipe: x.yaml\n", "config: {}\n", "first: 1\n",
)  # fmt: skip
LINES = (
    "{", "null", "[]", "7", '{"text": null}', '{"text": 7}', '{"text": "\\ud83d"}', '{"txt": "a"}', '{"text": ""}',
    '{"text": "' + "x" * 100_000 + '"}', "[" * 100_000, '{"number": "x"}', '{"prompt": [-1], "answer": [1]}',
    '{"number": 0, "said": "", "prompt": [1], "answer": [100000]}', '{"number": 0, "prompt": [true], "answer": [1]}',
    '{"number": 0, "said": "", "prompt": [1], "answer": [1.5]}',
    '{"number": 0, "said": "", "prompt": [], "answer": []}',
)  # fmt: skip


@dataclass(frozen=True)
class Damage:
    what: str
    certain: bool = False


Damaging = Callable[[random.Random, Path], Damage]


def damage(dice: random.Random, path: Path) -> Damage:
    """Damages one file, by what it is and as any file may be damaged."""
    own = {".json": in_json, ".safetensors": in_tensors, ".yaml": in_yaml, ".jsonl": in_lines}.get(path.suffix)
    ways = (own, own, own, in_bytes, in_place) if own else (in_bytes, in_bytes, in_place)
    done = dice.choice(ways)(dice, path)
    return Damage(f"{path.name}: {done.what}", done.certain)


def in_place(dice: random.Random, path: Path) -> Damage:
    """The file is something else, or is gone."""
    raw = path.read_bytes()
    path.unlink()
    match dice.randrange(7):
        case 0:
            return Damage("gone")
        case 1:
            os.mkfifo(path)
            return Damage("a pipe that nobody writes to", True)
        case 2:
            path.mkdir()
            return Damage("a folder", True)
        case 3:
            path.symlink_to("gone")
            return Damage("a link to nothing")
        case 4:
            path.symlink_to(path.name)
            return Damage("a link to itself")
        case 5:
            path.write_bytes(b"")
            # An empty recipe changes nothing.
            return Damage("empty", path.suffix != ".yaml")
        case _:
            path.write_bytes(dice.choice((b"\0" * 4096, b"\x80\x04K*.", b"PK\x03\x04", b"\xef\xbb\xbf" + raw, raw * 2)))
            return Damage("zeros, a pickle, an archive, a byte order mark before it, or itself twice")


def in_bytes(dice: random.Random, path: Path) -> Damage:
    """Bytes are changed, cut off, put in or moved."""
    raw = bytearray(path.read_bytes())
    match dice.randrange(4):
        case 0:
            size = int(len(raw) * dice.random() ** 2)
            path.write_bytes(raw[:size])
            return Damage(f"cut after {size} of {len(raw)} bytes", path.suffix in (".safetensors", ".gguf"))
        case 1:
            # Where headers are, as often as anywhere.
            end = dice.choice((min(64, len(raw)), min(4096, len(raw)), len(raw)))
            places = [dice.randrange(end) for _ in range(dice.choice((1, 1, 8)))]
            for at in places:
                raw[at] ^= 1 << dice.randrange(8)
            path.write_bytes(raw)
            return Damage(f"a bit flipped at {places}")
        case 2:
            at, more = dice.randrange(len(raw)), dice.randbytes(dice.choice((1, 8, 4096)))
            path.write_bytes(raw[:at] + more + raw[at:])
            return Damage(f"{len(more)} bytes put in at {at}")
        case _:
            at, size = dice.randrange(len(raw)), dice.choice((1, 64, 4096))
            path.write_bytes(raw[:at] + bytes(len(raw[at : at + size])) + raw[at + size :])
            return Damage(f"{size} zeros from {at} on")


def in_json(dice: random.Random, path: Path) -> Damage:
    """A value is another one, a key is gone, or the whole is another kind of JSON."""
    body = json.loads(path.read_text(encoding="utf-8"))
    if dice.random() < 0.15:
        texts = ("[]", "{}", "null", "7", '"x"', "[" * 100_000, '{"a":' * 100_000, "{" + '"a":1,' * 3 + '"a":2}', "NaN")
        path.write_text(text := dice.choice(texts), encoding="utf-8")
        return Damage(f"all of it is {text[:20]}")
    sizes = [key for key in SIZES if isinstance(body, dict) and key in body]
    if path.name == "config.json" and sizes and dice.random() < 0.2:
        key, value = dice.choice(sizes), dice.choice(NO_SIZE)
        body[key] = value
        path.write_text(json.dumps(body), encoding="utf-8")
        return Damage(f"{key} = {value!r}", True)
    # A vocabulary must not crowd out what else there is.
    at, trail = body, []
    while isinstance(at, dict | list) and at and (not trail or dice.random() < 0.5):
        key = dice.choice(list(at)[:200]) if isinstance(at, dict) else dice.randrange(len(at))
        parent, at = at, at[key]
        trail.append(key)
    if not trail:
        body, shown = dice.choice(VALUES), "all of it"
    elif isinstance(parent, dict) and dice.random() < 0.25:
        del parent[key]
        shown = f"{'.'.join(map(str, trail))} gone"
    else:
        parent[key] = dice.choice(VALUES)
        shown = f"{'.'.join(map(str, trail))} = {str(parent[key])[:40]!r}"
    path.write_text(json.dumps(body), encoding="utf-8")
    return Damage(shown)


def in_tensors(dice: random.Random, path: Path) -> Damage:
    """A safetensors file whose header says something else, or whose numbers are others."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + size]), bytearray(raw[8 + size :])
    name = dice.choice(sorted(header.keys() - {"__metadata__"}))
    entry, certain = header[name], True
    match dice.randrange(8):
        case 0:
            entry["dtype"] = dice.choice(DTYPES)
            # Of the same size it may be the same numbers.
            shown, certain = f"dtype {entry['dtype']!r}", entry["dtype"] not in ("F64", "F16")
        case 1:
            own = entry["shape"]
            entry["shape"] = dice.choice(([], [0], [-1], [1, *own], own[::-1], [2**40, 2**40], "x"))
            # A square one, turned, is as it was.
            shown, certain = f"shape {entry['shape']}", entry["shape"] != own
        case 2:
            begin, end = entry["data_offsets"]
            choices = ([end, begin], [begin, 2**62], [-4, end], [0, 0], [begin], "x", [1.5, 2])
            entry["data_offsets"] = dice.choice(choices)
            shown = f"data_offsets {entry['data_offsets']}"
        case 3:
            del header[name]
            shown = "its entry gone"
        case 4:
            header["ghost"] = {**entry}
            shown = "another tensor over the same bytes"
        case 5:
            header[f"{name}\n\x1b[31m"] = header.pop(name)
            shown = "another name, with a line break and colours"
        case 6:
            size = dice.choice((0, 1, 2**40, 2**63, 2**64 - 1, size - 1, size + 1))
            path.write_bytes(struct.pack("<Q", size) + raw[8:])
            return Damage(f"a header of {size} bytes", True)
        case _:
            begin, end = entry["data_offsets"]
            number = dice.choice((float("nan"), float("inf"), float("-inf")))
            at = begin + 4 * dice.randrange((end - begin) // 4)
            data[at : at + 4] = struct.pack("<f", number)
            # In two bytes a number it may be another number.
            shown, certain = f"{number} in it", entry["dtype"] == "F32"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    # Tensors of layers that only draft are left out, whatever they hold.
    return Damage(f"{name}: {shown}", certain and "mtp_layers" not in name)


def in_yaml(dice: random.Random, path: Path) -> Damage:
    """A recipe with other keys and values than there are."""
    if dice.random() < 0.6:
        text = dice.choice(YAML)
    else:
        lines = path.read_text(encoding="utf-8").splitlines()
        at = dice.randrange(len(lines))
        key = lines[at].split(":")[0]
        value = dice.choice(VALUES)
        line = lines[at]
        lines[at] = dice.choice((f"{key}: {json.dumps(value)}", f"{key}x: 1", f"{line}\n{line}", f"  {line}"))
        text = "\n".join(lines) + "\n"
    path.write_text(text, encoding="utf-8")
    return Damage(repr(text[:80]), text.startswith(("steps: 3\nsteps", "- x", "[", "seed: 1e400", "!!python")))


def in_lines(dice: random.Random, path: Path) -> Damage:
    """A file of JSON lines with one that is none, or is another record."""
    lines = path.read_text(encoding="utf-8").splitlines()
    at, line = dice.randrange(len(lines)), dice.choice(LINES)
    lines[at] = line
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Damage(f"line {at + 1} is {line[:60]!r}")
