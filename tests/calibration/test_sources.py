"""Documents out of every kind of source; what is no text is counted and named, and never the end of a run by itself."""

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


def read(given):
    notes = Notes()
    return {d.name: d.parts for d in Source.of(str(given)).documents(notes)}, notes.describe()


# RFCs

WORDS = st.lists(st.text("abcdefghij", min_size=2, max_size=9), min_size=30, max_size=120).map(" ".join)


def paged(sections, lines, number=9999):
    """An RFC as it was published: 72 columns, pages of so many lines, a footer and a header at every break."""
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
def test_pages_of_an_rfc_are_taken_away_and_sections_kept(texts, lines):
    titles = [f"{i + 1}.{'2.' * (i % 2)}  Title of {i}" for i in range(len(texts))]
    wanted = [(title, f"{text} {PROSE * 4}".strip(" .")) for title, text in zip(titles, texts, strict=True)]
    found = rfc.sections(paged(wanted, lines))
    # The same words, in the same sections.
    assert [part.split() for part in found] == [[*title.split(), "X", *f"{text}.".split()] for title, text in wanted]
    # A paragraph that a page broke is one again, unless the break came where a sentence ended.
    assert not any(line == "" for part in found for line in part.split("\n")[2:-1] if "." not in part[:-1])


def test_the_table_of_contents_is_no_heading():
    contents = "\n".join(f"{i}.  Title {'. ' * 20} {i}" for i in range(1, 9))
    assert len(rfc.sections(f"{contents}\n\n1.  Title\n\n{PROSE * 9}\n\nAppendix A.  More\n\n{PROSE * 9}")) == 3


def test_a_folder_of_rfcs(tmp_path):
    (tmp_path / "rfc1.txt").write_text(paged([("1.  One", PROSE * 9), ("2.  Two", PROSE * 9)], 10))
    (tmp_path / "index.html").write_text("<p>")
    found, _ = read(f"rfc:{tmp_path}")
    assert list(found) == ["rfc1.txt"] and [part[:3] for part in found["rfc1.txt"]] == ["1. ", "2. "]
    with pytest.raises(UserError, match="rfc:FOLDER"):
        Source.of(f"rfc:{tmp_path / 'rfc1.txt'}")


# Files


def test_files_of_a_folder_in_order(tmp_path):
    (tmp_path / "b.md").write_text("B")
    (tmp_path / "a.py").write_text("A = 1")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.rs").write_text("fn c() {}")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "photo.png").write_bytes(b"\x89PNG")
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "D\n1"}) + "\n\n" + '{"text": "a\u2028b"}\n')
    found, notes = read(tmp_path)
    names = {"a.py": "A = 1", "b.md": "B", "d.jsonl:1": "D\n1", "d.jsonl:3": "a\u2028b", "deep/c.rs": "fn c() {}"}
    assert found == {name: (text,) for name, text in names.items()} and notes == {}


@settings(max_examples=50)
@given(text=st.text(st.characters(codec="utf-8"), min_size=1), piece=st.integers(1, 40))
def test_a_large_file_comes_in_pieces(tmp_path_factory, text, piece):
    path = tmp_path_factory.mktemp("large") / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE", piece)
        try:
            parts = [d.parts[0] for d in Source.of(str(path))._documents(Notes())]
        except UserError:
            assert any(ord(c) < 32 for c in text)
            return
    assert "".join(parts) == path.read_text(encoding="utf-8-sig")
    assert all(len(part) <= 2 * piece for part in parts)


@pytest.mark.parametrize(
    ("encoding", "noted"),
    [
        ("utf-8", None), ("utf-8-sig", None), ("latin-1", "not UTF-8, decoded as cp1252"),
        ("utf-16", "UTF-16, decoded as such"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_encodings(suffix, encoding, noted, tmp_path, capsys):
    text = "Grüße, naïve café. " * 50
    path = tmp_path / f"a.{suffix}"
    path.write_bytes((json.dumps({"text": text}, ensure_ascii=False) if suffix == "jsonl" else text).encode(encoding))
    found, notes = read(path)
    assert list(found.values()) == [(text,)]
    assert notes == ({noted: {"count": 1, "examples": [path.name]}} if noted else {})
    assert (f"warning: {path.name}: {noted}" in capsys.readouterr().err) == bool(noted)


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", bytes(range(256)) * 9, b"\x01\x02text" * 40])
def test_a_binary_file(content, tmp_path):
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "b.txt").write_text(PROSE)
    found, notes = read(tmp_path)
    assert list(found) == ["b.txt"] and notes == {"binary, left out": {"count": 1, "examples": ["a.txt"]}}
    with pytest.raises(UserError, match="is a binary file"):
        read(tmp_path / "a.txt")


BAD = ['{"text": "a"', "[1]", '"text"', '{"txt": "b"}', '{"text": null}', '{"text": "\\ud83d"}']


def test_lines_that_are_no_json(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    good = '{"text": "good"}'
    path.write_text("\n".join([*BAD, good]))
    found, notes = read(path)
    assert found == {"a.jsonl:7": ("good",)}
    (noted,) = notes.values()
    assert noted == {"count": len(BAD), "examples": ["a.jsonl line 1", "a.jsonl line 2", "a.jsonl line 3"]}
    assert capsys.readouterr().err.count("warning: a.jsonl line") == 3
    path.write_text("\n".join([good, *BAD * 17]))
    with pytest.raises(UserError, match="more than 100 lines up to line 102"):
        read(path)


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra mlaforge[calibrate] is not installed")
    from pyarrow import parquet

    texts = [f"Text {i}. {PROSE}" for i in range(600)]
    parquet.write_table(pyarrow.table({"id": range(601), "text": [*texts, None]}), tmp_path / "a.parquet")
    found, _ = read(tmp_path / "a.parquet")
    assert list(found.items()) == [(f"a.parquet:{i + 1}", (text,)) for i, text in enumerate(texts)]
    parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"no column 'text' \(but body\)"):
        read(tmp_path / "b.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    # The end, which says where what is, is whole.
    zeroed = b"PAR1" + bytes(len(whole) - 2004) + whole[-2000:]
    for damaged in (b"", b"PAR1", whole[: len(whole) // 2], zeroed):
        (tmp_path / "c.parquet").write_bytes(damaged)
        with pytest.raises(UserError, match=r"c.parquet cannot be read as parquet|holds no text"):
            read(tmp_path / "c.parquet")


@pytest.mark.parametrize(("module", "given"), [("pyarrow", "a.parquet"), ("datasets", "hf:owner/name")])
def test_a_missing_extra_is_named(module, given, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=rf"{module}: pip install '\.\["):
        read(given if given.startswith("hf:") else tmp_path / given)


def test_nothing_there(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "none").mkdir()
    for name, words in (
        ("empty.txt", "holds no text"), ("none", "holds no text file"), ("absent", "does not exist"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            read(tmp_path / name)
    with pytest.raises(UserError, match="hf:owner/name for the data set"):
        Source.of("owner/name")


# The embedded text and the hub


def test_what_evaluation_sees_is_not_among_the_embedded_documents():
    found, _ = read(corpus.EMBEDDED)
    kinds = corpus.embedded_documents()
    # Some modules are empty.
    everything = {f"{kind}/{name}" for kind, own in kinds.items() for name in own if own[name].strip()}
    assert {name for name in everything if not corpus.is_evaluation_document(name.partition("/")[2])} == set(found)
    assert 0.6 < len(found) / len(everything) < 0.9


def test_a_data_set_of_the_hub(monkeypatch):
    """What is asked of the hub's libraries; the hub itself cannot be reached here."""
    asked = []

    def load_dataset(*names, **how):
        asked.append((names, how))
        return iter([{"text": "one"}, {"text": "two"}])

    stand_in = SimpleNamespace(load_dataset=load_dataset, exceptions=SimpleNamespace(DatasetsError=RuntimeError))
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    info = SimpleNamespace(sha="abc", card_data={"license": ["cc-by-4.0", "mit"]})
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda self, name, timeout: info)
    source = Source.of("hf:owner/name:sub:test")
    assert source.describe(None) == {"revision": "abc", "licence": "cc-by-4.0, mit"}
    assert [d.parts for d in source.documents(Notes())] == [("one",), ("two",)]
    assert asked == [(("owner/name", "sub"), {"split": "test", "streaming": True, "revision": "abc"})]


def test_a_hub_that_cannot_be_reached():
    with pytest.raises(UserError, match="the hub cannot be reached for 'hf:owner/name'"):
        Source.of("hf:owner/name").describe(None)


# Hash and licence


def test_hash_and_licence(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(PROSE)
    source = Source.of(str(folder))
    first = source.describe(None)
    assert first["licence"] == "unknown" and source.describe("MIT") == {**first, "licence": "MIT"}
    (folder / "LICENSE").write_text("\n  Apache License\n  Version 2.0\n")
    assert source.describe(None) == {**first, "licence": "Apache License (LICENSE)"}
    assert Source.of(str(folder / "a.txt")).describe(None)["licence"] == "Apache License (LICENSE)"
    (folder / "a.txt").rename(folder / "b.txt")
    assert source.describe(None)["sha256"] != first["sha256"]


def test_licences_name_their_source():
    given = [Source("a=b.txt", "local", ""), Source("c.txt", "local", "")]
    assert licences(("a=b.txt=MIT", "c.txt=CC-BY-4.0"), given) == {"a=b.txt": "MIT", "c.txt": "CC-BY-4.0"}
    for wrong, words in (("MIT", "SOURCE=LICENCE"), ("c.tx=MIT", "did you mean 'c.txt'"), ("c.txt=", "SOURCE=")):
        with pytest.raises(UserError, match=words):
            licences((wrong,), given)
