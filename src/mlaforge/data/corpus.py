"""Text in, token windows out; and the promise that nothing is judged on what it was tuned on.

A source is a file (.txt and the like; .jsonl or .parquet with `text` or `messages` in each record), a folder of such
files, what `calibrate` wrote, or `embedded`: English and Python that the Python installation itself carries, so that
everything runs offline.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlaforge.artifact import Manifest, record_name
from mlaforge.data import records
from mlaforge.runtime import UserError

# Text that the Python installation carries, and text that the model at hand writes itself.
EMBEDDED, SELF = "embedded", "self"
# The sets of a directory that `calibrate` wrote: for layers with a sliding window, for those without, and both.
CALIBRATION_SETS = {name: f"calib_{name}_golden.jsonl" for name in ("swa", "full", "mixed")}
PARQUET = ".parquet"
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".raw", ".tokens", ".py", ".jsonl", PARQUET)
# Share of the embedded documents that only evaluation sees.
HELD_OUT = 0.25
# Tokens before the end of a text that was cut which are not trusted.
CUT = 1024


class TooShort(UserError):
    """A text that holds no window."""


@dataclass(frozen=True)
class Windows:
    """Token windows [N, T] and where they came from; `sha256` is over the token ids."""

    ids: Tensor
    source: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.ids.to(torch.int64).numpy().tobytes()).hexdigest()

    def take(self, numbers: list[int]) -> Windows:
        """Some of them."""
        return Windows(self.ids[numbers], self.source)

    def describe(self) -> dict[str, Any]:
        """What a manifest records."""
        n, t = self.ids.shape
        return {"source": record_name(self.source), "sha256": self.sha256, "windows": n, "seqlen": t, "tokens": n * t}


def _read(path: Path, tokenizer: Any) -> list[str]:
    """The documents of a file."""
    if path.suffix.lower() == PARQUET:
        return [records.text_of(record, tokenizer) for record in records.parquet_records(path) if any(record.values())]
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; give another text") from error
    if path.suffix.lower() != ".jsonl":
        return [text]
    documents = []
    for number, document in records.json_lines(
        text.split("\n"), functools.partial(records.text_of, tokenizer=tokenizer)
    ):
        if document is None:
            raise UserError(f"{path} line {number} is not a JSON object with a 'text' or 'messages' field")
        documents.append(document)
    return documents


def calibration_sets(source: str) -> dict[str, str]:
    """Name of CALIBRATION_SETS -> file, of a directory that `calibrate` wrote; nothing of any other source."""
    folder = Path(source).expanduser()
    manifest = Manifest.load(folder) if source != EMBEDDED and folder.is_dir() else None
    if manifest is None or manifest.stage != "calibrate":
        return {}
    return {name: str(folder / file) for name, file in CALIBRATION_SETS.items()}


def read_documents(source: str, tokenizer: Any = None) -> list[str]:
    """The documents of a file or folder (its files in order of name). Raises UserError where there is no text.

    A record of a .jsonl or .parquet file is a document, and so is any other file; conversations become text through the
    tokenizer's chat template. Of what `calibrate` wrote it is the mixed set.
    """
    path = Path(calibration_sets(source).get("mixed", source)).expanduser()
    if not path.exists():
        raise UserError(f"text {source!r} does not exist; give a file, a folder or {EMBEDDED!r}")
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file())
        if not files:
            raise UserError(f"folder {source!r} holds no text file ({', '.join(TEXT_SUFFIXES)})")
    texts = [document for path in files for document in _read(path, tokenizer)]
    if not any(document.strip() for document in texts):
        raise UserError(f"text {source!r} is empty; give a file or folder with text, or {EMBEDDED!r}")
    return texts


def read_text(source: str, tokenizer: Any = None) -> str:
    """`read_documents` as running text."""
    return "\n\n".join(read_documents(source, tokenizer))


def documents(source: str, judged: bool = False, tokenizer: Any = None) -> list[str]:
    """The documents of a file or folder, or of one side of the embedded text (`judged`: what only evaluation sees)."""
    if source != EMBEDDED:
        return read_documents(source, tokenizer)
    return [
        text
        for kind in embedded_documents().values()
        for name, text in sorted(kind.items())
        if held_out(name) == judged
    ]


def _docstrings(tree: ast.Module) -> str:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n\n".join(text for text in docstrings if text and len(text) > 80)


@functools.cache
def embedded_documents() -> dict[str, dict[str, str]]:
    """kind -> name -> text: `manual` (the language reference), `docstrings` and `code` of the standard library.

    A module gives either its docstrings or its code, so that the kinds share no text.
    """
    from pydoc_data.topics import topics

    kinds: dict[str, dict[str, str]] = {"manual": dict(topics), "docstrings": {}, "code": {}}
    library = Path(sysconfig.get_paths()["stdlib"])
    folders = ("", "asyncio", "concurrent/futures", "email", "http", "importlib", "json", "logging", "multiprocessing",
               "unittest", "urllib", "xml/dom", "xml/etree")  # fmt: skip
    for path in (p for folder in folders for p in sorted((library / folder).glob("*.py"))):
        name = str(path.relative_to(library))
        text = path.read_text(encoding="utf-8", errors="replace")
        if _draw(name, "kind") < 0.5:
            kinds["code"][name] = text
        elif prose := _docstrings(ast.parse(text)):
            kinds["docstrings"][name] = prose
    return kinds


def _draw(name: str, purpose: str) -> float:
    """A number in [0, 1) that depends on nothing but the words."""
    return int.from_bytes(hashlib.sha256(f"{purpose}:{name}".encode()).digest()[:6], "big") / 2**48


def held_out(name: str) -> bool:
    """Whether only evaluation sees the embedded document of this name."""
    return _draw(name, "split") < HELD_OUT


def tokens(tokenizer: Any, text: str, wanted: int | None = None) -> Tensor:
    """Token ids of `text`; where only the first `wanted` are, the rest of a long text is not read."""
    size = len(text) if wanted is None else 8 * wanted
    while True:
        # Counted in windows, so that the tokenizer's warning about its model's length does not apply.
        ids = tokenizer(text[:size], add_special_tokens=False, verbose=False)["input_ids"]
        if wanted is None or size >= len(text):
            return torch.tensor(ids, dtype=torch.int64)
        # Only the last tokens before a cut can differ from those of the whole text.
        if len(ids) >= wanted + CUT:
            return torch.tensor(ids[:wanted], dtype=torch.int64)
        size *= 4


def _cut(ids: Tensor, seqlen: int) -> Tensor:
    return ids[: len(ids) // seqlen * seqlen].view(-1, seqlen)


def _embedded_windows(tokenizer: Any, count: int, seqlen: int, judged: bool, seed: int) -> Tensor:
    """The first `count` windows of one side of the split, the kinds interleaved, each in seeded order."""
    per_kind = []
    for kind, documents in embedded_documents().items():
        names = sorted(n for n in documents if held_out(n) == judged)
        random.Random(f"{seed}:{kind}").shuffle(names)
        per_kind.append(_cut(tokens(tokenizer, "\n\n".join(documents[n] for n in names), count * seqlen), seqlen))
    rows = [kind[i] for i in range(max(map(len, per_kind))) for kind in per_kind if i < len(kind)]
    return torch.stack(rows[:count]) if rows else torch.empty(0, seqlen, dtype=torch.int64)


def windows(
    tokenizer: Any, source: str, count: int, seqlen: int, *, judged: bool = False, seed: int | None = None
) -> Windows:
    """`count` windows of `seqlen` tokens that do not overlap, no special tokens added.

    From a file or folder they are the first ones, or with a seed a random choice in order. `embedded` gives a
    mixture of its kinds, `judged` choosing the side of the split that only evaluation sees.
    Fewer windows than asked for are given as they are; none at all is a UserError.
    """
    if source == EMBEDDED:
        ids = _embedded_windows(tokenizer, count, seqlen, judged, seed or 0)
    else:
        text = read_text(source, tokenizer)
        ids = _cut(tokens(tokenizer, text, count * seqlen if seed is None else None), seqlen)
        if seed is not None and len(ids) > count:
            ids = ids[sorted(random.Random(seed).sample(range(len(ids)), count))]
        ids = ids[:count]
    if not len(ids):
        raise TooShort(f"text {source!r} has fewer than {seqlen} tokens; give more text or a smaller --seqlen")
    return Windows(ids, source if source == EMBEDDED else str(Path(source).expanduser().absolute()))
