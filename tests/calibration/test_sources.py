"""Documents from every kind of source; unusable input is counted and logged instead of ending the run."""

import json
import sys
import textwrap
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaforge.calibration import rfc, sources
from mlaforge.calibration.sources import Notes, Source, licences
from mlaforge.data import corpus
from mlaforge.runtime import UserError

PROSE = "Some prose that is long enough to be text. "


def read(argument):
    notes = Notes()
    return {d.name: d.parts for d in Source.parse(str(argument)).documents(notes)}, notes.describe()


# RFCs

WORDS = st.lists(st.text("abcdefghij", min_size=2, max_size=9), min_size=30, max_size=120).map(" ".join)


def paged(sections, lines, number=9999):
    """Format an RFC as published: 72 columns, pages of `lines` lines, a footer and a header at every page break."""
    body = []
    for title, text in sections:
        body += [title, "", *textwrap.wrap(f"X {text}.", 69, initial_indent="   ", subsequent_indent="   "), ""]
    pages = [body[i : i + lines] for i in range(0, len(body), lines)]
    header = f"RFC {number}                    A Test of Pages             October 2026"
    text = ""
    for at, page in enumerate(pages, 1):
        head = "" if at == 1 else f"\f\n{header}\n\n"
        text += head + "\n".join(page) + f"\n\n\nAuthor{' ' * 40}[Page {at}]\n"
    return text


@given(st.lists(WORDS, min_size=1, max_size=6), st.integers(5, 50))
def test_rfc_sections_without_page_breaks(texts, lines):
    titles = [f"{i + 1}.{'2.' * (i % 2)}  Title of {i}" for i in range(len(texts))]
    expected = [(title, f"{text} {PROSE * 4}".strip(" .")) for title, text in zip(titles, texts, strict=True)]
    documents = rfc.sections(paged(expected, lines))
    # The sections contain the same words.
    assert [part.split() for part in documents] == [
        [*title.split(), "X", *f"{text}.".split()] for title, text in expected
    ]
    # A paragraph divided by a page break is rejoined, unless a sentence ended at the break.
    assert not any(line == "" for part in documents for line in part.split("\n")[2:-1] if "." not in part[:-1])


def test_a_table_of_contents_is_not_a_heading():
    contents = "\n".join(f"{i}.  Title {'. ' * 20} {i}" for i in range(1, 9))
    assert len(rfc.sections(f"{contents}\n\n1.  Title\n\n{PROSE * 9}\n\nAppendix A.  More\n\n{PROSE * 9}")) == 3


def test_reads_a_folder_of_rfcs(tmp_path):
    (tmp_path / "rfc1.txt").write_text(paged([("1.  One", PROSE * 9), ("2.  Two", PROSE * 9)], 10))
    (tmp_path / "index.html").write_text("<p>")
    documents, _ = read(f"rfc:{tmp_path}")
    assert list(documents) == ["rfc1.txt"] and [part[:3] for part in documents["rfc1.txt"]] == ["1. ", "2. "]
    with pytest.raises(UserError, match="rfc:FOLDER"):
        Source.parse(f"rfc:{tmp_path / 'rfc1.txt'}")


# Files


def test_reads_the_files_of_a_folder_in_order(tmp_path):
    (tmp_path / "b.md").write_text("B")
    (tmp_path / "a.py").write_text("A = 1")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.rs").write_text("fn c() {}")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "photo.png").write_bytes(b"\x89PNG")
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "D\n1"}) + "\n\n" + '{"text": "a\u2028b"}\n')
    documents, notes = read(tmp_path)
    names = {"a.py": "A = 1", "b.md": "B", "d.jsonl:1": "D\n1", "d.jsonl:3": "a\u2028b", "deep/c.rs": "fn c() {}"}
    assert documents == {name: (text,) for name, text in names.items()} and notes == {}


@settings(max_examples=50)
@given(text=st.text(st.characters(codec="utf-8"), min_size=1), piece=st.integers(1, 40))
def test_large_files_are_read_in_pieces(tmp_path_factory, text, piece):
    path = tmp_path_factory.mktemp("large") / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "DOCUMENT_CHARACTERS", piece)
        try:
            parts = [d.parts[0] for d in Source.parse(str(path))._documents(Notes())]
        except UserError:
            assert any(ord(c) < 32 for c in text)
            return
    assert "".join(parts) == path.read_text(encoding="utf-8-sig")
    assert all(len(part) <= 2 * piece for part in parts)


@pytest.mark.parametrize(
    ("encoding", "issue"),
    [
        ("utf-8", None), ("utf-8-sig", None), ("latin-1", "not UTF-8, decoded as cp1252"),
        ("utf-16", "UTF-16, decoded as such"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_detects_encodings(suffix, encoding, issue, tmp_path, capsys):
    text = "Grüße, naïve café. " * 50
    path = tmp_path / f"a.{suffix}"
    path.write_bytes((json.dumps({"text": text}, ensure_ascii=False) if suffix == "jsonl" else text).encode(encoding))
    documents, notes = read(path)
    assert list(documents.values()) == [(text,)]
    assert notes == ({issue: {"count": 1, "examples": [path.name]}} if issue else {})
    assert (f"warning: {path.name}: {issue}" in capsys.readouterr().err) == bool(issue)


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", bytes(range(256)) * 9, b"\x01\x02text" * 40])
def test_binary_files_are_skipped_or_rejected(content, tmp_path):
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "b.txt").write_text(PROSE)
    documents, notes = read(tmp_path)
    assert list(documents) == ["b.txt"] and notes == {"binary, left out": {"count": 1, "examples": ["a.txt"]}}
    with pytest.raises(UserError, match="is a binary file"):
        read(tmp_path / "a.txt")


BAD = ['{"text": "a"', "[1]", '"text"', '{"txt": "b"}', '{"text": null}', '{"text": "\\ud83d"}']


def test_invalid_json_lines_are_counted_up_to_a_limit(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    good = '{"text": "good"}'
    path.write_text("\n".join([*BAD, good]))
    documents, notes = read(path)
    assert documents == {"a.jsonl:7": ("good",)}
    (issue,) = notes.values()
    assert issue == {"count": len(BAD), "examples": ["a.jsonl line 1", "a.jsonl line 2", "a.jsonl line 3"]}
    assert capsys.readouterr().err.count("warning: a.jsonl line") == 3
    path.write_text("\n".join([good, *BAD * 17]))
    with pytest.raises(UserError, match="more than 100 lines up to line 102"):
        read(path)


def test_reads_parquet_and_rejects_damaged_files(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra mlaforge[calibrate] is not installed")
    from pyarrow import parquet

    texts = [f"Text {i}. {PROSE}" for i in range(600)]
    parquet.write_table(pyarrow.table({"id": range(601), "text": [*texts, None]}), tmp_path / "a.parquet")
    documents, _ = read(tmp_path / "a.parquet")
    assert list(documents.items()) == [(f"a.parquet:{i + 1}", (text,)) for i, text in enumerate(texts)]
    parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"no column 'text' \(but body\)"):
        read(tmp_path / "b.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    # The footer with the file metadata is intact.
    zeroed = b"PAR1" + bytes(len(whole) - 2004) + whole[-2000:]
    for damaged in (b"", b"PAR1", whole[: len(whole) // 2], zeroed):
        (tmp_path / "c.parquet").write_bytes(damaged)
        with pytest.raises(UserError, match=r"c.parquet cannot be read as parquet|contains no text"):
            read(tmp_path / "c.parquet")


@pytest.mark.parametrize(("module", "argument"), [("pyarrow", "a.parquet"), ("datasets", "hf:owner/name")])
def test_a_missing_extra_is_a_user_error(module, argument, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=rf"{module}: pip install '\.\["):
        read(argument if argument.startswith("hf:") else tmp_path / argument)


def test_rejects_sources_without_text(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "none").mkdir()
    for name, words in (
        ("empty.txt", "contains no text"), ("none", "contains no text file"), ("absent", "does not exist"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            read(tmp_path / name)
    with pytest.raises(UserError, match="hf:owner/name for the data set"):
        Source.parse("owner/name")


# The embedded text and the hub


def test_held_out_documents_are_not_a_source():
    documents, _ = read(corpus.EMBEDDED)
    kinds = corpus.embedded_documents()
    # Some modules are empty.
    everything = {f"{kind}/{name}" for kind, modules in kinds.items() for name in modules if modules[name].strip()}
    assert {name for name in everything if not corpus.is_evaluation_document(name.partition("/")[2])} == set(documents)
    assert 0.6 < len(documents) / len(everything) < 0.9


def test_streams_a_hub_data_set(monkeypatch):
    """The calls of the hub's libraries, which are replaced: tests have no network."""
    calls = []

    def load_dataset(*names, **how):
        calls.append((names, how))
        return iter([{"text": "one"}, {"text": "two"}])

    stand_in = SimpleNamespace(load_dataset=load_dataset, exceptions=SimpleNamespace(DatasetsError=RuntimeError))
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    info = SimpleNamespace(sha="abc", card_data={"license": ["cc-by-4.0", "mit"]})
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda self, name, timeout: info)
    source = Source.parse("hf:owner/name:sub:test")
    assert source.describe(None) == {"revision": "abc", "licence": "cc-by-4.0, mit"}
    assert [d.parts for d in source.documents(Notes())] == [("one",), ("two",)]
    assert calls == [(("owner/name", "sub"), {"split": "test", "streaming": True, "revision": "abc"})]


def test_an_unreachable_hub_is_a_user_error():
    with pytest.raises(UserError, match="the hub cannot be reached for 'hf:owner/name'"):
        Source.parse("hf:owner/name").describe(None)


# Hash and licence


def test_describes_hash_and_licence(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(PROSE)
    source = Source.parse(str(folder))
    first = source.describe(None)
    assert first["licence"] == "unknown" and source.describe("MIT") == {**first, "licence": "MIT"}
    (folder / "LICENSE").write_text("\n  Apache License\n  Version 2.0\n")
    assert source.describe(None) == {**first, "licence": "Apache License (LICENSE)"}
    assert Source.parse(str(folder / "a.txt")).describe(None)["licence"] == "Apache License (LICENSE)"
    (folder / "a.txt").rename(folder / "b.txt")
    assert source.describe(None)["sha256"] != first["sha256"]


def test_licences_are_matched_to_sources():
    sources = [Source("a=b.txt", "local", ""), Source("c.txt", "local", "")]
    assert licences(("a=b.txt=MIT", "c.txt=CC-BY-4.0"), sources) == {"a=b.txt": "MIT", "c.txt": "CC-BY-4.0"}
    for wrong, words in (("MIT", "SOURCE=LICENCE"), ("c.tx=MIT", "did you mean 'c.txt'"), ("c.txt=", "SOURCE=")):
        with pytest.raises(UserError, match=words):
            licences((wrong,), sources)
