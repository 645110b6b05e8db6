"""Windows, embeddings and selection, each against an independent reference."""

import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlaforge.calibration import embedder, selection, window_store
from mlaforge.calibration.selection import DUPLICATE_COSINE, HARD_FRACTION
from mlaforge.calibration.sources import Document
from mlaforge.calibration.window_store import MIN_WINDOW_FRACTION, passages, split_windows
from mlaforge.runtime import UserError

pytest.importorskip("sklearn", reason="the extra mlaforge[calibrate] is not installed")

# Windows


@given(st.text("ab .\n", max_size=3000), st.integers(8, 300))
def test_windows_concatenate_to_the_text(text, size):
    result = list(split_windows(text, size))
    assert "".join(result) == text
    assert all(len(window) <= size for window in result[:-1]) and len(result[-1]) <= size * (1 + MIN_WINDOW_FRACTION)
    assert all(len(window) >= size / 2 for window in result[:-1])


def test_windows_end_at_sentences_and_paragraphs():
    sentence = "A sentence of some length that ends here. "
    assert all(window.endswith(". ") for window in list(split_windows(sentence * 40, 300))[:-1])
    paragraphs = f"{sentence * 4}\n\n" * 20
    assert all(window.endswith("\n\n") for window in list(split_windows(paragraphs, 300))[:-1])


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=4), st.integers(50, 200), st.integers(2, 9))
def test_passages_divide_documents_evenly(lengths, size, longest):
    document = Document("d", tuple(("word " * length)[:length].strip() + "!" for length in lengths))
    result = list(passages("s", [document], size, longest))
    assert "".join(p.text for p in result).split() == " ".join(document.parts).split()
    counts = [len(p.windows) for p in result]
    assert max(counts) <= longest and max(counts) - min(counts) <= 1
    # No window crosses a boundary between parts.
    assert not any("!\n" in window[:-3] for p in result for window in p.windows)


def test_repetitive_text_has_low_density():
    prose = "The quick brown fox jumps over the lazy dog while seven wizards make toxic brew for an evil queen."
    assert (
        window_store.density("-" * 400)
        < window_store.density("a table | of | cells\n" * 20)
        < 0.3
        < window_store.density(prose)
    )


def test_spread_of_identical_and_orthogonal_vectors():
    units = np.eye(8, dtype=np.float32)
    assert window_store.spread(units[[0, 0, 0]]) == 0.0
    assert window_store.spread(units[:4]) == pytest.approx(1 - 4**-0.5)


# Selection


@pytest.fixture(scope="module")
def blobs():
    """300 unit vectors in three distant clusters with some duplicates, their scores and true clusters."""
    draw = np.random.default_rng(0)
    centres = embedder.normalize(draw.normal(size=(3, 16)))
    vectors = embedder.normalize(np.repeat(centres, 100, axis=0) + 0.12 * draw.normal(size=(300, 16)))
    vectors[10:20] = vectors[0]
    return vectors[(order := draw.permutation(300))].astype(np.float32), draw.random(300), order // 100


def in_blocks(vectors, size=70):
    return lambda: (vectors[i : i + size] for i in range(0, len(vectors), size))


def test_selects_typical_and_hard_texts_of_each_cluster(blobs):
    vectors, score, truth = blobs
    usable = np.ones(300, bool)
    usable[:30] = False
    result, duplicates = selection.choose(in_blocks(vectors), score, usable, 3, 6, seed=0)
    rows = [choice.row for choice in result]
    assert len(set(rows)) == len(rows) and min(rows) >= 30
    cosines = vectors[rows] @ vectors[rows].T - 2 * np.eye(len(rows))
    assert cosines.max() < DUPLICATE_COSINE
    for blob in range(3):
        cluster_choices = [choice for choice in result if truth[choice.row] == blob]
        assert len({choice.cluster for choice in cluster_choices}) == 1
        members = np.flatnonzero((truth == blob) & usable)
        upper = members[score[members] >= np.median(score[members])]
        assert {choice.row for choice in cluster_choices} <= set(upper)
        distance = {choice.row: choice.distance for choice in cluster_choices}
        typical, hard = ([c.row for c in cluster_choices if c.kind == kind] for kind in ("typical", "hard"))
        assert len(typical) == 6 and 1 <= len(hard) <= math.ceil(HARD_FRACTION * len(upper))
        # Skipped texts nearer than the typical ones are near-duplicates of them.
        centre = vectors[members].mean(0)
        order = sorted(upper, key=lambda row: np.linalg.norm(vectors[row] - centre))
        skipped = [r for r in order[: order.index(typical[-1])] if r not in typical]
        assert all((vectors[typical] @ vectors[r]).max() >= DUPLICATE_COSINE for r in skipped)
        assert max(distance[r] for r in typical) < min(distance[r] for r in hard)
        assert distance[typical[0]] == pytest.approx(np.linalg.norm(vectors[typical[0]] - centre), abs=0.05)
    assert duplicates > 0


def test_selection_is_deterministic_for_any_block_size(blobs):
    vectors, score, _ = blobs
    usable = np.ones(300, bool)
    # Any one of bitwise identical texts may be selected.
    same = np.unique(vectors, axis=0, return_inverse=True)[1].ravel()

    def without_distances(chosen):
        choices, duplicates = chosen
        return [(same[c.row], c.cluster, c.kind) for c in choices], duplicates

    first = selection.choose(in_blocks(vectors), score, usable, 5, 4, seed=1)
    assert selection.choose(in_blocks(vectors), score, usable, 5, 4, seed=1) == first
    whole = selection.choose(in_blocks(vectors, 300), score, usable, 5, 4, seed=1)
    assert without_distances(whole) == without_distances(first)
    # The summation order of a product may depend on the number of rows.
    assert [c.distance for c in whole[0]] == pytest.approx([c.distance for c in first[0]], abs=1e-5)
    assert selection.choose(in_blocks(vectors), score, usable, 5, 4, seed=2) != first


def test_every_prefix_contains_all_clusters_and_kinds(blobs):
    vectors, score, _ = blobs
    result, _ = selection.choose(in_blocks(vectors), score, np.ones(300, bool), 3, 9, seed=0)
    third = result[: len(result) // 3]
    assert {choice.cluster for choice in third} == {0, 1, 2}
    assert {choice.kind for choice in third} == {"typical", "hard"}


def test_assigns_texts_outside_the_kmeans_sample(blobs, monkeypatch):
    vectors, _, truth = blobs
    monkeypatch.setattr(selection, "KMEANS_SAMPLE", 60)
    label, distance = selection.assign(in_blocks(vectors), np.ones(300, bool), 3, seed=0)
    assert len(label) == len(distance) == 300
    assert len({(a, b) for a, b in zip(label, truth, strict=True)}) == 3


def test_a_missing_extra_is_a_user_error(blobs, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(UserError, match=r"is missing: pip install '\.\[calibrate\]'"):
        selection.assign(in_blocks(blobs[0]), np.ones(300, bool), 3, seed=0)


def test_selects_one_of_identical_texts():
    vectors = np.tile(np.eye(4, dtype=np.float32)[:1], (20, 1))
    result, duplicates = selection.choose(in_blocks(vectors), np.ones(20), np.ones(20, bool), 5, 3, seed=0)
    assert len(result) == 1 and duplicates > 0


# Embedding


@pytest.fixture(scope="module")
def minilm(offline_embedder):
    import torch

    return embedder.Embedder(offline_embedder, torch.device("cpu"), trust_remote_code=False)


def embed_with_transformers(directory, text):
    """Reference: the normalised mean over the tokens' hidden states, with transformers."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(directory, local_files_only=True).eval()
    with torch.no_grad():
        inputs = AutoTokenizer.from_pretrained(directory, local_files_only=True)(text, return_tensors="pt")
        return embedder.normalize(model(**inputs).last_hidden_state[0].mean(0).numpy())


def test_long_texts_are_embedded_by_parts(minilm, offline_embedder):
    word = "theory "
    texts = ["A short text about attention.", word * 600, "Another, on cheese."]
    result = minilm(texts)
    assert result.shape == (3, 384) and np.allclose(np.linalg.norm(result, axis=1), 1, atol=1e-5)
    for i in (0, 2):
        assert np.allclose(result[i], embed_with_transformers(offline_embedder, texts[i]), atol=1e-4)
    assert minilm.fits(texts[0]) and not minilm.fits(texts[1])
    # `theory` is one token: full parts of max_text_tokens words, and the remainder.
    sizes = [minilm.max_text_tokens] * (600 // minilm.max_text_tokens) + [600 % minilm.max_text_tokens]
    parts = sum(size * embed_with_transformers(offline_embedder, word * size) for size in sizes)
    assert np.allclose(result[1], embedder.normalize(parts), atol=1e-4)


def test_similar_texts_have_similar_embeddings(minilm):
    tea, coffee, code = minilm(["A cup of hot tea.", "A mug of coffee.", "raise ValueError(f'{x!r} is negative')"])
    assert tea @ coffee > tea @ code + 0.2


def test_rejects_directories_without_an_embedder(tiny_models, tmp_path):
    import torch

    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"embedder .* cannot be read"):
        embedder.Embedder(tmp_path, torch.device("cpu"), trust_remote_code=False)
    with pytest.raises(UserError, match="does not exist"):
        embedder.directory(str(tmp_path / "absent"))
