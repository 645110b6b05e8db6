"""Typical losses equal the measurements in benchmarks/kv_cache.json, conversion.json and sparsity.json."""

import math
import statistics
from pathlib import Path

import pytest

from mlaforge.bench.results import read_table
from mlaforge.planning.forms import FORMS, SELECTED_FROM, Form

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KINDS = ("wiki", "code", "maths")


def measured_loss(form: Form) -> float:
    """Mean loss of the form over kinds of text, nats per token."""
    if form.budget is None:
        stored = form.stored if form.bits is None else f"{form.bits:g} bits"
        fields, table = {"layout": form.layout, "stored": stored}, ("kv_cache.json", "kv cache")
    else:
        fields = {"layout": form.layout, "budget": form.budget, "calibration": "wiki"}
        table = ("conversion.json", "conversion")
    rows = read_table(BENCHMARKS / table[0], table[1])["rows"]
    (row,) = [row for row in rows if fields.items() <= row.items()]
    return statistics.fmean(math.log(row["ratio"][kind]) for kind in KINDS) + selection(form)


def selection(form: Form) -> float:
    """Additional loss of the form's selection over the dense model of its kind, nats per token."""
    if not form.sparse:
        return 0.0
    kind = "original" if form.layout == "gqa" else "coded 25 %" if form.bits else "latent 50 %"
    # 2,048 tokens were measured on a conversion of another calibration.
    table = "selections, 2,048 read" if form.reads == 2048 else "selections"
    rows = read_table(BENCHMARKS / "sparsity.json", table)["rows"]
    fields = {"form": kind, "selector": "pairs", "topk": form.topk(SELECTED_FROM), "documents": 8}
    (row,) = [row for row in rows if fields.items() <= row.items()]
    return math.log(row["all"])


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.advice(SELECTED_FROM))
def test_typical_losses_are_the_measured_ones(form: Form) -> None:
    assert form.loss == pytest.approx(measured_loss(form), abs=1e-4)


def test_advice_names_the_options() -> None:
    advice = [form.advice(32768) for form in FORMS]
    assert advice[:2] == ["Keep the original as it is", "Keep the original with an 8-bit cache (--kv-cache-dtype int8)"]
    assert "Keep the original with a 4-bit cache (--kv-cache-dtype int4)" in advice
    assert "Convert to latent with coded rows (mlaforge convert --bits 4 --dense)" in advice
    assert "Convert to latent_rope with coded rows (mlaforge convert --bits 4 --layout latent_rope --dense)" in advice
    assert "Convert to latent with plain rows (mlaforge convert --layout latent --budget 0.75 --dense)" in advice
    assert "Sparsify the original (mlaforge sparsify --topk 4096)" in advice
    assert "Sparsify the original with an 8-bit cache (mlaforge sparsify --topk 4096, --kv-cache-dtype int8)" in advice
    assert "Convert to latent with coded rows, read sparsely (mlaforge convert --bits 4 --topk 4096)" in advice
    assert len(set(advice)) == len(advice)


def test_selection_grows_with_contexts_beyond_the_measured_one() -> None:
    form = Form("bf16", 0.0, selection_ratio=8)
    assert [form.topk(context) for context in (512, 8192, 32768)] == [1024, 1024, 4096]
    assert Form("bf16", 0.0).topk(32768) == 0
    assert [Form("bf16", 0.0, reads=1024).topk(context) for context in (512, 32768)] == [1024, 1024]
