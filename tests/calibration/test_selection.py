"""Windows, embeddings and what is chosen of them, each against an oracle of its own."""

import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlaforge.calibration import embedder, selection, window_store
from mlaforge.calibration.selection import FARTHEST, SAME
from mlaforge.calibration.sources import Document
from mlaforge.calibration.window_store import LEAST, cut, passages
from mlaforge.runtime import UserError

pytest.importorskip("sklearn", reason="the extra mlaforge[calibrate] is not installed")

# Windows


@given(st.text("ab .\n", max_size=3000), st.integers(8, 300))
def test_windows_are_the_text(text, size):
    found = list(cut(text, size))
    assert "".join(found) == text
    assert all(len(window) <= size for window in found[:-1]) and len(found[-1]) <= size * (1 + LEAST)
    assert all(len(window) >= size / 2 for window in found[:-1])


def test_windows_end_where_text_does():
    sentence = "A sentence of some length that ends here. "
    assert all(window.endswith(". ") for window in list(cut(sentence * 40, 300))[:-1])
    paragraphs = f"{sentence * 4}\n\n" * 20
    assert all(window.endswith("\n\n") for window in list(cut(paragraphs, 300))[:-1])


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=4), st.integers(50, 200), st.integers(2, 9))
def test_passages_are_documents_in_even_parts(lengths, size, longest):
    document = Document("d", tuple(("word " * length)[:length].strip() + "!" for length in lengths))
    found = list(passages("s", [document], size, longest))
    assert "".join(p.text for p in found).split() == " ".join(document.parts).split()
    counts = [len(p.windows) for p in found]
    assert max(counts) <= longest and max(counts) - min(counts) <= 1
    # No window crosses from one part to the next.
    assert not any("!\n" in window[:-3] for p in found for window in p.windows)


def test_repetition_is_not_dense():
    prose = "The quick brown fox jumps over the lazy dog while seven wizards make toxic brew for an evil queen."
    assert (
        window_store.density("-" * 400)
        < window_store.density("a table | of | cells\n" * 20)
        < 0.3
        < window_store.density(prose)
    )


def test_spread():
    one = np.eye(8, dtype=np.float32)
    assert window_store.spread(one[[0, 0, 0]]) == 0.0
    assert window_store.spread(one[:4]) == pytest.approx(1 - 4**-0.5)


# Choosing


@pytest.fixture(scope="module")
def blobs():
    """300 unit vectors in three far clusters, of which some are nearly the same, and scores."""
    draw = np.random.default_rng(0)
    centres = embedder.unit(draw.normal(size=(3, 16)))
    vectors = embedder.unit(np.repeat(centres, 100, axis=0) + 0.12 * draw.normal(size=(300, 16)))
    vectors[10:20] = vectors[0]
    return vectors[(order := draw.permutation(300))].astype(np.float32), draw.random(300), order // 100


def in_blocks(vectors, size=70):
    return lambda: (vectors[i : i + size] for i in range(0, len(vectors), size))


def test_what_a_cluster_gives(blobs):
    vectors, score, truth = blobs
    usable = np.ones(300, bool)
    usable[:30] = False
    found, duplicates = selection.choose(in_blocks(vectors), score, usable, 3, 6, seed=0)
    rows = [choice.row for choice in found]
    assert len(set(rows)) == len(rows) and min(rows) >= 30
    near = vectors[rows] @ vectors[rows].T - 2 * np.eye(len(rows))
    assert near.max() < SAME
    for blob in range(3):
        own = [choice for choice in found if truth[choice.row] == blob]
        assert len({choice.cluster for choice in own}) == 1
        members = np.flatnonzero((truth == blob) & usable)
        upper = members[score[members] >= np.median(score[members])]
        assert {choice.row for choice in own} <= set(upper)
        distance = {choice.row: choice.distance for choice in own}
        typical, hard = ([c.row for c in own if c.kind == kind] for kind in ("typical", "hard"))
        assert len(typical) == 6 and 1 <= len(hard) <= math.ceil(FARTHEST * len(upper))
        # No text that was passed over is nearer than the typical ones, unless it is nearly one of them.
        centre = vectors[members].mean(0)
        order = sorted(upper, key=lambda row: np.linalg.norm(vectors[row] - centre))
        passed = [r for r in order[: order.index(typical[-1])] if r not in typical]
        assert all((vectors[typical] @ vectors[r]).max() >= SAME for r in passed)
        assert max(distance[r] for r in typical) < min(distance[r] for r in hard)
        assert distance[typical[0]] == pytest.approx(np.linalg.norm(vectors[typical[0]] - centre), abs=0.05)
    assert duplicates > 0


def test_blocks_and_runs_do_not_matter(blobs):
    vectors, score, _ = blobs
    usable = np.ones(300, bool)
    # Of texts that are the same to the bit any may be taken.
    same = np.unique(vectors, axis=0, return_inverse=True)[1].ravel()

    def without_distances(chosen):
        choices, duplicates = chosen
        return [(same[c.row], c.cluster, c.kind) for c in choices], duplicates

    first = selection.choose(in_blocks(vectors), score, usable, 5, 4, seed=1)
    assert selection.choose(in_blocks(vectors), score, usable, 5, 4, seed=1) == first
    whole = selection.choose(in_blocks(vectors, 300), score, usable, 5, 4, seed=1)
    assert without_distances(whole) == without_distances(first)
    # A product of other rows may sum in another order.
    assert [c.distance for c in whole[0]] == pytest.approx([c.distance for c in first[0]], abs=1e-5)
    assert selection.choose(in_blocks(vectors), score, usable, 5, 4, seed=2) != first


def test_any_beginning_holds_every_cluster(blobs):
    vectors, score, _ = blobs
    found, _ = selection.choose(in_blocks(vectors), score, np.ones(300, bool), 3, 9, seed=0)
    third = found[: len(found) // 3]
    assert {choice.cluster for choice in third} == {0, 1, 2}
    assert {choice.kind for choice in third} == {"typical", "hard"}


def test_more_texts_than_are_clustered_at_once(blobs, monkeypatch):
    vectors, _, truth = blobs
    monkeypatch.setattr(selection, "SAMPLE", 60)
    label, distance = selection.assign(in_blocks(vectors), np.ones(300, bool), 3, seed=0)
    assert len(label) == len(distance) == 300
    assert len({(a, b) for a, b in zip(label, truth, strict=True)}) == 3


def test_a_missing_extra_is_named(blobs, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(UserError, match=r"is missing: pip install '\.\[calibrate\]'"):
        selection.assign(in_blocks(blobs[0]), np.ones(300, bool), 3, seed=0)


def test_texts_that_are_all_alike():
    vectors = np.tile(np.eye(4, dtype=np.float32)[:1], (20, 1))
    found, duplicates = selection.choose(in_blocks(vectors), np.ones(20), np.ones(20, bool), 5, 3, seed=0)
    assert len(found) == 1 and duplicates > 0


# Embedding


@pytest.fixture(scope="module")
def minilm(offline_embedder):
    import torch

    return embedder.Embedder(offline_embedder, torch.device("cpu"), trust_remote_code=False)


def alone(directory, text):
    """A text's vector by transformers alone: the mean over its tokens, at length one."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(directory, local_files_only=True).eval()
    with torch.no_grad():
        inputs = AutoTokenizer.from_pretrained(directory, local_files_only=True)(text, return_tensors="pt")
        return embedder.unit(model(**inputs).last_hidden_state[0].mean(0).numpy())


def test_texts_of_any_length(minilm, offline_embedder):
    word = "theory "
    texts = ["A short text about attention.", word * 600, "Another, on cheese."]
    found = minilm(texts)
    assert found.shape == (3, 384) and np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    for i in (0, 2):
        assert np.allclose(found[i], alone(offline_embedder, texts[i]), atol=1e-4)
    assert minilm.holds(texts[0]) and not minilm.holds(texts[1])
    # `theory` is one token: the parts are as many words as there is room for, and the rest.
    sizes = [minilm.room] * (600 // minilm.room) + [600 % minilm.room]
    parts = sum(size * alone(offline_embedder, word * size) for size in sizes)
    assert np.allclose(found[1], embedder.unit(parts), atol=1e-4)


def test_what_is_alike_is_near(minilm):
    tea, coffee, code = minilm(["A cup of hot tea.", "A mug of coffee.", "raise ValueError(f'{x!r} is negative')"])
    assert tea @ coffee > tea @ code + 0.2


def test_a_directory_that_is_no_embedder(tiny_models, tmp_path):
    import torch

    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"embedder .* cannot be read"):
        embedder.Embedder(tmp_path, torch.device("cpu"), trust_remote_code=False)
    with pytest.raises(UserError, match="does not exist"):
        embedder.directory(str(tmp_path / "absent"))
