"""Packed rows: completeness, masking across documents, and the batches of steps."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlaforge.checkpoint import loading, source_model
from mlaforge.data import corpus, overlap, packing
from mlaforge.data.packing import NO_LABEL, Feed, Phase, Rows, pack
from mlaforge.modeling.latent_attention_mla import FUSED
from mlaforge.runtime import UserError
from mlaforge.training.forward import final_states, masks
from support.tiny_models import CASES


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(2, 20))
def test_rows_are_the_concatenated_documents(sizes, length):
    documents = [torch.arange(n) + 100 * i for i, n in enumerate(sizes)]
    rows = pack(documents, length)
    flat = torch.cat(documents)
    assert torch.equal(rows.ids.flatten(), flat[: len(flat) // length * length])
    # A token's position is one more than its predecessor's exactly if both are of one document and row.
    for ids, positions, labels in zip(rows.ids, rows.positions, rows.labels, strict=True):
        assert positions[0] == 0 and labels[-1] == NO_LABEL
        for t in range(1, length):
            same = ids[t] == ids[t - 1] + 1 and ids[t] % 100
            assert positions[t] == (positions[t - 1] + 1 if same else 0)
            assert labels[t - 1] == (ids[t] if same else NO_LABEL)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_documents_of_a_row_do_not_attend_to_each_other(converted, tiny_models, family, layout):
    draw = torch.Generator().manual_seed(0)
    documents = [torch.randint(0, 256, (n,), generator=draw) for n in (30, 7, 40, 19)]
    rows = pack(documents, 96)
    for directory in (tiny_models[family], converted(family, layout)):
        model = loading.load_model(directory, "float32")
        model.set_attn_implementation(FUSED)
        with torch.no_grad():
            alone = torch.cat([final_states(model, pack([d], len(d))) for d in documents])
            torch.testing.assert_close(final_states(model, rows), alone, rtol=1e-4, atol=1e-4)


def test_a_row_of_one_document_needs_no_mask(tiny_models):
    config = loading.load_model(tiny_models["llama"]).config
    assert masks(config, pack([torch.arange(8)], 8)) is None
    assert masks(config, pack([torch.arange(4), torch.arange(4)], 8)) is not None


def test_steps_read_every_row_once_an_epoch():
    rows = pack([torch.arange(70)], 10)
    feed = Feed((Phase(rows, 7), Phase(rows, 3)), 20, seed=1)
    assert feed.steps == 10 and feed.phase(6) == (0, 6) and feed.phase(7) == (1, 0)
    numbers = torch.cat([feed.batch(step).number for step in range(7)])
    assert sorted(numbers[:7].tolist()) == sorted(numbers[7:].tolist()) == list(range(7))
    assert numbers[:7].tolist() != numbers[7:].tolist()
    assert torch.equal(feed.batch(3).number, Feed((Phase(rows, 7),), 20, seed=1).batch(3).number)
    assert [feed.batch(s).number.tolist() for s in range(7)] != [
        Feed((Phase(rows, 7),), 20, seed=2).batch(s).number.tolist() for s in range(7)
    ]


@pytest.fixture(scope="module")
def tokenizer(tiny_models):
    return source_model.load_tokenizer(tiny_models["llama"])


def test_training_validation_and_calibration_share_no_passage(tokenizer, calibration_file):
    whole = packing.read(tokenizer, [str(calibration_file)], 128, 1000, [])
    assert packing.passages(whole.validation) and packing.passages(whole.train)
    assert not overlap.sharing(whole.validation, packing.passages(whole.train))
    tuned = corpus.windows(tokenizer, str(calibration_file), 10, 128, seed=3)
    fresh = packing.read(tokenizer, [str(calibration_file)], 128, 1000, overlap.passages(tuned))
    assert sum(map(len, fresh.train)) < sum(map(len, whole.train))
    assert not overlap.sharing([*fresh.train, *fresh.validation], overlap.passages(tuned))


def test_documents_of_several_texts(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in ("ab" * 40, "cd" * 50)))
    (tmp_path / "b.txt").write_text("ef" * 60)
    text = packing.read(tokenizer, [str(tmp_path / name) for name in ("a.jsonl", "b.txt")], 90, 0, [])
    assert [len(piece) for piece in text.train] == [80, 90, 10, 90, 30]
    assert text.validation == [] and text.describe()["tokens"] == {"train": 300, "validation": 0}


def test_too_little_text_is_refused(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("Too little.")
    with pytest.raises(UserError, match="too few for rows of 64"):
        packing.read(tokenizer, [str(tmp_path / "a.txt")], 64, 100, [])
    (tmp_path / "b.txt").write_text("again and again and again, all the same words " * 200)
    with pytest.raises(UserError, match="repeats itself"):
        packing.read(tokenizer, [str(tmp_path / "b.txt")], 64, 100, [])


def test_take_selects_rows_in_order():
    rows = pack([torch.arange(40)], 10).take(torch.tensor([2, 0]))
    assert isinstance(rows, Rows) and rows.number.tolist() == [2, 0] and rows.ids[:, 0].tolist() == [20, 0]
