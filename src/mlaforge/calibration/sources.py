"""Text sources of `calibrate`: files, folders, RFCs, data sets of the hub, self-generated text and the embedded text.

Documents are streamed, large files in pieces, so memory does not grow with the source. Unusable input is counted in
`Notes`; a source without any text is a UserError.
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
from mlaforge.synthesis.self_generated_text import SelfGeneratedText

CODE = (".c", ".cc", ".cpp", ".cu", ".go", ".h", ".hpp", ".java", ".js", ".rb", ".rs", ".sh", ".sql", ".ts")
SUFFIXES = (*corpus.TEXT_SUFFIXES, *CODE)
LICENCES = ("LICENSE*", "LICENCE*", "COPYING*")
UNKNOWN = "unknown"
# Manual, docstrings and code of the Python distribution.
EMBEDDED_LICENCE = "PSF-2.0 (as the Python installation itself)"
SELF_LICENCE = "as the model's own licence says of what it writes"
# Maximum number of unusable lines in one .jsonl file.
BAD_LINES = 100
# Bytes read at a time to detect the encoding; characters per document of a large file.
READ_BYTES, DOCUMENT_CHARACTERS = 1 << 20, 1 << 22
# Control bytes do not occur in text of any encoding; a file with more than one in MIN_BYTES_PER_CONTROL is binary.
CONTROL_BYTES, MIN_BYTES_PER_CONTROL = bytes({*range(32)} - set(b"\t\n\v\f\r\x1b")), 200
# Encoding for text that is not UTF-8: windows-1252 maps nearly every byte to a character.
FALLBACK = "cp1252"
BYTE_ORDER_MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
                    codecs.BOM_UTF16_BE: "utf-16"}  # fmt: skip
HUB_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Document:
    """A text in parts that windows do not cross (the sections of an RFC; most documents have one part)."""

    name: str
    parts: tuple[str, ...]


@dataclasses.dataclass
class Notes:
    """Issues with the input: counts, and the first locations of each."""

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    examples: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def add(self, issue: str, location: str) -> None:
        """Count an issue; record and log its first three locations."""
        self.counts[issue] += 1
        examples = self.examples.setdefault(issue, [])
        if len(examples) < 3:
            examples.append(location)
            log(f"warning: {location}: {issue}")

    def describe(self) -> dict[str, Any]:
        counts = sorted(self.counts.items())
        return {issue: {"count": count, "examples": self.examples.get(issue, [])} for issue, count in counts}


@dataclasses.dataclass(frozen=True)
class Source:
    """A source of text.

    argument: as on the command line. kind: embedded, self, rfc, hub or local. location: the argument without the prefix
    of its kind. generated: the text of kind self.
    """

    argument: str
    kind: str
    location: str
    generated: SelfGeneratedText | None = None

    @classmethod
    def parse(cls, argument: str) -> Source:
        """Parse a --source argument. Raises UserError if there is no such source."""
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
            raise UserError(f"source {argument!r} is not a folder; give rfc:FOLDER with RFCs as .txt files")
        return cls(argument, kind, str(path))

    @property
    def files(self) -> list[Path]:
        """The files of a local source, sorted. Raises UserError for a folder without text files."""
        path, suffixes = Path(self.location), (".txt",) if self.kind == "rfc" else SUFFIXES
        if not path.is_dir():
            return [path]
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in suffixes and p.is_file())
        if not files:
            raise UserError(f"source {self.argument!r} contains no text file ({', '.join(suffixes)})")
        return files

    def name(self, file: Path) -> str:
        """Return the name of a file in records: relative to the source."""
        path = Path(self.location)
        return str(file.relative_to(path)) if path.is_dir() else path.name

    @property
    def label(self) -> str:
        """Name of the source in records: without its parent folders."""
        if self.kind in ("embedded", "self", "hub"):
            return self.argument
        return "rfc:" * (self.kind == "rfc") + record_name(self.location)

    def describe(self, licence: str | None) -> dict[str, str]:
        """Return hash (or revision) and licence of the source; `licence` is that of --license, if any."""
        if self.kind == "hub":
            return _hub_facts(self, licence)
        if self.kind in ("embedded", "self"):
            digest = hashlib.sha256()
            for document in self._documents(Notes()):
                digest.update(f"{document.name}\n{document.parts[0]}\n".encode())
            known = EMBEDDED_LICENCE if self.kind == "embedded" else SELF_LICENCE
            return {"sha256": digest.hexdigest(), "licence": licence or known}
        if not Path(self.location).is_dir():
            return {"sha256": sha256(Path(self.location)), "licence": licence or self._licence()}
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{self.name(file)} {sha256(file)}\n".encode())
        return {"sha256": digest.hexdigest(), "licence": licence or self._licence()}

    def _licence(self) -> str:
        """Return the first line of a licence file in the source's folder."""
        path = Path(self.location)
        folder = path if path.is_dir() else path.absolute().parent
        for file in sorted(p for pattern in LICENCES for p in folder.glob(pattern) if p.is_file()):
            with file.open(encoding="utf-8", errors="replace") as text:
                line = next((line.strip() for line in text if line.strip()), "")
            return f"{line[:80]} ({file.name})" if line else UNKNOWN
        return UNKNOWN

    def documents(self, notes: Notes) -> Iterator[Document]:
        """Yield every document that has text. Raises UserError if there is none."""
        has_text = False
        for document in self._documents(notes):
            if any(part.strip() for part in document.parts):
                has_text = True
                yield document
        if not has_text:
            raise UserError(f"source {self.argument!r} contains no text; give another, or {corpus.EMBEDDED!r}")

    def _documents(self, notes: Notes) -> Iterator[Document]:
        if self.kind == "embedded":
            yield from _embedded()
        elif self.generated is not None:
            for name, text in self.generated.documents():
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
            if file == Path(self.location):
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
                # readline ends the piece with its line, unless the line is as long as another piece.
                while piece := text.read(DOCUMENT_CHARACTERS):
                    yield Document(name, (piece + text.readline(DOCUMENT_CHARACTERS),))


def names(sources: list[Source]) -> dict[str, str]:
    """Return argument -> name in records, made unique."""
    record_names: dict[str, str] = {}
    for source in sources:
        duplicates = sum(other.label == source.label for other in sources[: len(record_names)])
        record_names[source.argument] = f"{source.label} ({duplicates + 1})" if duplicates else source.label
    return record_names


def licences(options: tuple[str, ...], sources: list[Source]) -> dict[str, str]:
    """Return SOURCE -> LICENCE of the --license options. Raises UserError for an unknown source."""
    return _by_source("license", "SOURCE=LICENCE", "CC-BY-4.0", options, sources)


def shares(options: tuple[str, ...], sources: list[Source]) -> dict[str, float]:
    """Return SOURCE -> fraction of the tokens for all sources, from the --share options; {} without options.

    Raises UserError for an unknown source, and for fractions that do not sum to 1.
    """
    fractions: dict[str, float] = {}
    for source, fraction in _by_source("share", "SOURCE=FRACTION", "0.5", options, sources).items():
        try:
            fractions[source] = float(fraction)
        except ValueError:
            fractions[source] = math.nan
        if not 0 < fractions[source] < 1:
            raise UserError(f"share {source}={fraction} must be a fraction between 0 and 1, such as {source}=0.5")
    others = [source.argument for source in sources if source.argument not in fractions]
    remainder = 1 - sum(fractions.values())
    if fractions and (remainder < 1e-9 if others else abs(remainder) > 1e-9):
        bound = f"sum to less than 1, as {', '.join(others)} get the rest" if others else "sum to 1"
        raise UserError(f"share: {', '.join(options)} must {bound}")
    return fractions | dict.fromkeys(others, remainder / len(others)) if fractions and others else fractions


def _by_source(name: str, form: str, example: str, options: tuple[str, ...], sources: list[Source]) -> dict[str, str]:
    """Parse options of the form SOURCE=VALUE. Raises UserError for another form and for an unknown source."""
    names = [source.argument for source in sources]
    by_source = {}
    for option in options:
        source, equals, value = option.rpartition("=")
        if not equals or not value.strip():
            raise UserError(f"{name} {option!r} must be {form}, such as {names[0]}={example}")
        if source not in names:
            known = ", ".join(names)
            raise UserError(f"{name} {option!r} names no source{nearest(source, names)}; the sources are {known}")
        by_source[source] = value.strip()
    return by_source


def _embedded() -> Iterator[Document]:
    """Yield the embedded documents that are not held out for evaluation."""
    for kind, documents in corpus.embedded_documents().items():
        for name in sorted(documents):
            if not corpus.is_evaluation_document(name):
                yield Document(f"{kind}/{name}", (documents[name],))


def _encoding(path: Path) -> str | None:
    """Return the encoding of a file, None if it is binary. Raises UserError if it cannot be read."""
    utf8 = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            block = file.read(READ_BYTES)
            for mark, encoding in BYTE_ORDER_MARKS.items():
                if block.startswith(mark):
                    return encoding
            controls = len(block) - len(block.translate(None, CONTROL_BYTES))
            if b"\0" in block or controls > len(block) / MIN_BYTES_PER_CONTROL:
                return None
            while block:
                utf8.decode(block)
                block = file.read(READ_BYTES)
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
                    "field; give a .jsonl file with one object per line"
                )


def _parquet(path: Path, name: str) -> Iterator[Document]:
    for number, record in enumerate(records.parquet_records(path), 1):
        if isinstance(text := record.get(records.TEXT), str):
            yield Document(f"{name}:{number}", (text,))


def _hub_facts(source: Source, licence: str | None) -> dict[str, str]:
    """Return the revision of a data set (the hash of its files) and the licence of its card."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    name = source.location.split(":")[0]
    try:
        info = HfApi().dataset_info(name, timeout=HUB_SECONDS)
    except HFValidationError as error:
        raise UserError(f"{source.argument!r} names no data set; give hf:owner/name") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no answer"
        raise UserError(f"the hub refuses the data set {name!r} (status {status}); check its name") from error
    except (HTTPError, OSError, RuntimeError) as error:
        raise UserError(
            f"the hub cannot be reached for {source.argument!r}; give its files as --source instead"
        ) from error
    card_licence = info.card_data.get("license") if info.card_data else None
    card_licence = ", ".join(card_licence) if isinstance(card_licence, list) else card_licence
    return {"revision": str(info.sha), "licence": licence or card_licence or UNKNOWN}


def _hub_documents(source: Source) -> Iterator[Document]:
    """Stream the documents of hf:ID[:CONFIG[:SPLIT]]; the default split is `train`."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise UserError(f"{source.argument!r} needs datasets: {install('datasets')}") from error
    name, config, split = (*source.location.split(":"), "", "")[:3]
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
