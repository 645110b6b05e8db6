"""Documents out of files, folders, RFCs, data sets of the hub and the embedded text: what `calibrate` reads.

Documents come one after the other, a large file in pieces, so that memory does not grow with the source. What cannot
be used is counted and named in `Notes`; a source that gives nothing at all is the user's mistake.
"""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlaforge.artifact import record_name, sha256
from mlaforge.calibration import rfc
from mlaforge.config import nearest
from mlaforge.data import corpus, records
from mlaforge.runtime import UserError, install, log
from mlaforge.synthesis.own_text import OwnText

CODE = (".c", ".cc", ".cpp", ".cu", ".go", ".h", ".hpp", ".java", ".js", ".rb", ".rs", ".sh", ".sql", ".ts")
SUFFIXES = (*corpus.TEXT_SUFFIXES, *CODE)
LICENCES = ("LICENSE*", "LICENCE*", "COPYING*")
UNKNOWN = "unknown"
# The manual, docstrings and code that Python carries.
EMBEDDED_LICENCE = "PSF-2.0 (as the Python installation itself)"
SELF_LICENCE = "as the model's own licence says of what it writes"
# Lines of one .jsonl file that may be unusable.
BAD_LINES = 100
# Bytes by which a file is told to be text, and characters of a large file that are one document.
BLOCK, PIECE = 1 << 20, 1 << 22
# Bytes that no text holds, whatever its encoding; more than one in CONTROLS of them makes a file binary.
CONTROL, CONTROLS = bytes({*range(32)} - set(b"\t\n\v\f\r\x1b")), 200
# What text that is not UTF-8 is taken for: windows-1252 has a character for nearly every byte.
FALLBACK = "cp1252"
BYTE_ORDER_MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
                    codecs.BOM_UTF16_BE: "utf-16"}  # fmt: skip
HUB_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Document:
    """A text in parts that no window crosses (an RFC's sections; most documents are one part)."""

    name: str
    parts: tuple[str, ...]


@dataclasses.dataclass
class Notes:
    """What was not as it should be: how often, and where at first."""

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    examples: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def add(self, what: str, where: str) -> None:
        """Counts `what`; the first few places are named at once."""
        self.counts[what] += 1
        named = self.examples.setdefault(what, [])
        if len(named) < 3:
            named.append(where)
            log(f"warning: {where}: {what}")

    def describe(self) -> dict[str, Any]:
        return {what: {"count": n, "examples": self.examples.get(what, [])} for what, n in sorted(self.counts.items())}


@dataclasses.dataclass(frozen=True)
class Source:
    """Where text comes from: `argument` as the user wrote it, `kind` embedded, self, rfc, hub or local, `place` without
    the kind."""

    argument: str
    kind: str
    place: str
    # Of the kind self: what the model wrote.
    own: OwnText | None = None

    @classmethod
    def of(cls, argument: str) -> Source:
        """Raises UserError where there is no such source."""
        if argument in (corpus.EMBEDDED, corpus.SELF):
            return cls(argument, argument, argument)
        if argument.startswith("hf:"):
            return cls(argument, "hub", argument.removeprefix("hf:"))
        kind = "rfc" if argument.startswith("rfc:") else "local"
        path = Path(argument.removeprefix("rfc:")).expanduser()
        if not path.exists():
            hub = argument.count("/") == 1 and argument[0] not in "./~"
            hint = f", or hf:{argument} for the data set of the hub" if hub else ""
            raise UserError(f"source {argument!r} does not exist; give a file, a folder or {corpus.EMBEDDED!r}{hint}")
        if kind == "rfc" and not path.is_dir():
            raise UserError(f"source {argument!r} is no folder; give rfc:FOLDER with RFCs as .txt files")
        return cls(argument, kind, str(path))

    @property
    def files(self) -> list[Path]:
        """The files of a local source, in order of name; UserError where a folder has none that could be text."""
        path, suffixes = Path(self.place), (".txt",) if self.kind == "rfc" else SUFFIXES
        if not path.is_dir():
            return [path]
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in suffixes and p.is_file())
        if not files:
            raise UserError(f"source {self.argument!r} holds no text file ({', '.join(suffixes)})")
        return files

    def name(self, file: Path) -> str:
        """A file of the source as records call it."""
        path = Path(self.place)
        return str(file.relative_to(path)) if path.is_dir() else path.name

    @property
    def recorded(self) -> str:
        """The source as records call it: without the folders that it lies in."""
        if self.kind in ("embedded", "self", "hub"):
            return self.argument
        return "rfc:" * (self.kind == "rfc") + record_name(self.place)

    def describe(self, licence: str | None) -> dict[str, str]:
        """Hash and licence; `licence` is what the user said it is."""
        if self.kind == "hub":
            return _hub_facts(self, licence)
        if self.kind in ("embedded", "self"):
            digest = hashlib.sha256()
            for document in self._documents(Notes()):
                digest.update(f"{document.name}\n{document.parts[0]}\n".encode())
            known = EMBEDDED_LICENCE if self.kind == "embedded" else SELF_LICENCE
            return {"sha256": digest.hexdigest(), "licence": licence or known}
        if not Path(self.place).is_dir():
            return {"sha256": sha256(Path(self.place)), "licence": licence or self._licence()}
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{self.name(file)} {sha256(file)}\n".encode())
        return {"sha256": digest.hexdigest(), "licence": licence or self._licence()}

    def _licence(self) -> str:
        """The first line of a licence file in the source's folder."""
        path = Path(self.place)
        folder = path if path.is_dir() else path.absolute().parent
        for file in sorted(p for pattern in LICENCES for p in folder.glob(pattern) if p.is_file()):
            with file.open(encoding="utf-8", errors="replace") as text:
                line = next((line.strip() for line in text if line.strip()), "")
            return f"{line[:80]} ({file.name})" if line else UNKNOWN
        return UNKNOWN

    def documents(self, notes: Notes) -> Iterator[Document]:
        """Every document with text in it; raises UserError where there is none."""
        has_text = False
        for document in self._documents(notes):
            if any(part.strip() for part in document.parts):
                has_text = True
                yield document
        if not has_text:
            raise UserError(f"source {self.argument!r} holds no text; give another, or {corpus.EMBEDDED!r}")

    def _documents(self, notes: Notes) -> Iterator[Document]:
        if self.kind == "embedded":
            yield from _embedded()
        elif self.own is not None:
            for name, text in self.own.documents():
                yield Document(name, (text,))
        elif self.kind == "hub":
            yield from _hub_documents(self)
        else:
            for file in self.files:
                yield from self._file(file, notes)

    def _file(self, file: Path, notes: Notes) -> Iterator[Document]:
        name = self.name(file)
        if file.suffix.lower() == ".parquet":
            yield from _parquet(file, name)
            return
        encoding = _encoding(file)
        if encoding is None:
            if file == Path(self.place):
                raise UserError(f"source {self.argument!r} is a binary file; give text")
            notes.add("binary, left out", name)
            return
        if encoding not in ("utf-8-sig", "utf-16", "utf-32"):
            notes.add(f"not UTF-8, decoded as {encoding}", name)
        elif encoding != "utf-8-sig":
            notes.add(f"{encoding.upper()}, decoded as such", name)
        if file.suffix.lower() == ".jsonl":
            yield from _jsonl(file, name, encoding, notes)
        elif self.kind == "rfc":
            yield Document(name, tuple(rfc.sections(file.read_text(encoding=encoding, errors="replace"))))
        else:
            with file.open(encoding=encoding, errors="replace") as text:
                # A line is cut only where it is as long as a piece.
                while piece := text.read(PIECE):
                    yield Document(name, (piece + text.readline(PIECE),))


def names(sources: list[Source]) -> dict[str, str]:
    """A source's argument -> its name in records, no two alike."""
    called: dict[str, str] = {}
    for source in sources:
        alike = sum(other.recorded == source.recorded for other in sources[: len(called)])
        called[source.argument] = f"{source.recorded} ({alike + 1})" if alike else source.recorded
    return called


def licences(options: tuple[str, ...], sources: list[Source]) -> dict[str, str]:
    """SOURCE -> LICENCE of the --license options; UserError for one that fits no source."""
    return _by_source("license", "SOURCE=LICENCE", "CC-BY-4.0", options, sources)


def shares(options: tuple[str, ...], sources: list[Source]) -> dict[str, float]:
    """SOURCE -> fraction of the tokens, of all sources, by the --share options; nothing where there are none.
    UserError for one that fits no source, and for fractions that do not make a whole."""
    given: dict[str, float] = {}
    for source, fraction in _by_source("share", "SOURCE=FRACTION", "0.5", options, sources).items():
        try:
            given[source] = float(fraction)
        except ValueError:
            given[source] = math.nan
        if not 0 < given[source] < 1:
            raise UserError(f"share {source}={fraction} must be a fraction between 0 and 1, such as {source}=0.5")
    others = [source.argument for source in sources if source.argument not in given]
    rest = 1 - sum(given.values())
    if given and (rest < 1e-9 if others else abs(rest) > 1e-9):
        left = f"and leave something for {', '.join(others)}" if others else "together"
        raise UserError(f"share: {', '.join(options)} must make 1 {left}")
    return given | dict.fromkeys(others, rest / len(others)) if given and others else given


def _by_source(name: str, form: str, example: str, options: tuple[str, ...], sources: list[Source]) -> dict[str, str]:
    """What options of the form SOURCE=VALUE say; UserError for one that fits no source."""
    names = [source.argument for source in sources]
    by_source = {}
    for option in options:
        source, equals, value = option.rpartition("=")
        if not equals or not value.strip():
            raise UserError(f"{name} {option!r} must be {form}, such as {names[0]}={example}")
        if source not in names:
            raise UserError(f"{name} {option!r} names no source{nearest(source, names)}; there is {', '.join(names)}")
        by_source[source] = value.strip()
    return by_source


def _embedded() -> Iterator[Document]:
    """The embedded documents that evaluation never sees."""
    for kind, documents in corpus.embedded_documents().items():
        for name in sorted(documents):
            if not corpus.is_evaluation_document(name):
                yield Document(f"{kind}/{name}", (documents[name],))


def _encoding(path: Path) -> str | None:
    """How a file's bytes are to be decoded, None where it is binary. Raises UserError where it cannot be read."""
    utf8 = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            block = file.read(BLOCK)
            for mark, encoding in BYTE_ORDER_MARKS.items():
                if block.startswith(mark):
                    return encoding
            if b"\0" in block or len(block) - len(block.translate(None, CONTROL)) > len(block) / CONTROLS:
                return None
            while block:
                utf8.decode(block)
                block = file.read(BLOCK)
            utf8.decode(b"", final=True)
    except UnicodeDecodeError:
        return FALLBACK
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; give another source") from error
    return "utf-8-sig"


def _jsonl(path: Path, name: str, encoding: str, notes: Notes) -> Iterator[Document]:
    bad = 0
    with path.open(encoding=encoding, errors="replace", newline="\n") as lines:
        for number, text in records.json_lines(lines, records.text_field):
            if text is not None:
                yield Document(f"{name}:{number}", (text,))
                continue
            notes.add("no JSON object with a 'text' field, skipped", f"{name} line {number}")
            bad += 1
            if bad > BAD_LINES:
                raise UserError(
                    f"{path}: more than {BAD_LINES} lines up to line {number} are not JSON objects with a 'text' "
                    "field; give a .jsonl file that has one object a line"
                )


def _parquet(path: Path, name: str) -> Iterator[Document]:
    for number, record in enumerate(records.parquet_records(path), 1):
        if isinstance(text := record.get(records.TEXT), str):
            yield Document(f"{name}:{number}", (text,))


def _hub_facts(source: Source, licence: str | None) -> dict[str, str]:
    """The revision of a data set, which is the hash of its files, and the licence of its card."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    name = source.place.split(":")[0]
    try:
        info = HfApi().dataset_info(name, timeout=HUB_SECONDS)
    except HFValidationError as error:
        raise UserError(f"{source.argument!r} names no data set; give hf:owner/name") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no answer"
        raise UserError(f"the hub does not give the data set {name!r} (status {status}); check its name") from error
    except (HTTPError, OSError, RuntimeError) as error:
        raise UserError(
            f"the hub cannot be reached for {source.argument!r}; give files of it as --source instead"
        ) from error
    card_licence = info.card_data.get("license") if info.card_data else None
    card_licence = ", ".join(card_licence) if isinstance(card_licence, list) else card_licence
    return {"revision": str(info.sha), "licence": licence or card_licence or UNKNOWN}


def _hub_documents(source: Source) -> Iterator[Document]:
    """hf:ID[:CONFIG[:SPLIT]], streamed; the split is `train` where none is named."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise UserError(f"{source.argument!r} needs datasets: {install('datasets')}") from error
    name, config, split = (*source.place.split(":"), "", "")[:3]
    revision = _hub_facts(source, None)["revision"]
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True, revision=revision)
        for number, row in enumerate(rows, 1):
            if not isinstance(row.get("text"), str):
                raise UserError(
                    f"{source.argument!r} has no column 'text' (but {', '.join(row)}); give another data set"
                )
            yield Document(f"{name}:{number}", (row["text"],))
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{source.argument!r} cannot be read: {' '.join(str(error).split())[:200]}") from error
