"""Recommendations: memory first, then loss, then time."""

import dataclasses
import re

import pytest
import torch

from mlaforge.families import read_spec
from mlaforge.planning.costs import GPUS, SHARES, Cost, Gpu
from mlaforge.planning.forms import FORMS, Form
from mlaforge.planning.recommendation import SMALL_LOSS, SPEED_TOLERANCE, Recommendation, recommend
from mlaforge.planning.roofline import Row, compare
from support.configs import GPT_OSS, LLAMA, SMOLLM2

SPEC = dataclasses.replace(
    read_spec(SMOLLM2),
    bits=16.0,
    layers=tuple(dataclasses.replace(layer, mlp_bits=16.0) for layer in read_spec(SMOLLM2).layers),
)


# Forms without a selection.
DENSE = tuple(form for form in FORMS if not form.sparse)


def recommend_for(gpu: Gpu, context: int, batch: int = 1, forms: tuple[Form, ...] = FORMS) -> Recommendation:
    return recommend(compare(SPEC, gpu, context, batch, 0, forms)[0])


def test_keeps_the_original_at_short_contexts(cpu: Gpu) -> None:
    """A step reads mainly weights, so no form is 5 % faster than the lossless one."""
    recommendation = recommend_for(cpu, 128)
    assert recommendation.best.label == "gqa"
    assert recommendation.sentence.startswith("Keep the original as it is: 1 request of 128 tokens takes")
    assert recommendation.sentence.endswith("at no loss.")


def test_recommends_an_8_bit_cache_at_long_contexts(cpu: Gpu) -> None:
    """4 bits are smaller but lose more than 1 % and unpack more slowly; latents are for scarce memory."""
    recommendation = recommend_for(cpu, 8192, 4, DENSE)
    assert recommendation.best.label == "gqa, int8"
    assert "--kv-cache-dtype int8" in recommendation.sentence and "typical loss of 0.0 %" in recommendation.sentence
    assert any(reason.startswith("Least memory within 2 %: latent") for reason in recommendation.reasons)


def test_recommends_a_selection_that_is_faster_at_a_small_loss(cpu: Gpu) -> None:
    recommendation = recommend_for(cpu, 8192, 4)
    assert recommendation.best.label.endswith("4 bits, 1024 read")
    assert "mlaforge convert --bits 4 --topk 1024" in recommendation.sentence
    (sentence,) = [reason for reason in recommendation.reasons if reason.startswith("A selection of")]
    first = int(re.search(r"faster from ([\d,]+) tokens", sentence)[1].replace(",", ""))
    dense, read = FORMS[0], Form("bf16", 0.0, selection_ratio=8)
    for context, faster in ((first, True), (first // 2, False)):
        rows, _ = compare(SPEC, cpu, context, 4, 0, (dense, read))
        assert (len(rows) == 2 and rows[1].verify.total * SPEED_TOLERANCE < rows[0].verify.total) == faster
    assert not any("read" in row.label for row in compare(SPEC, cpu, 512, 1, 0)[0])


def test_selections_need_a_full_layer_and_respect_the_model_s_context(cpu: Gpu) -> None:
    sliding = read_spec(LLAMA | {"model_type": "mistral", "sliding_window": 16})
    rows, _ = compare(sliding, cpu, 1024, 1, 0)
    assert rows and not any(row.form.sparse for row in rows)
    short = dataclasses.replace(read_spec(GPT_OSS), max_position_embeddings=2048)
    recommendation = recommend(compare(short, GPUS["h200"], 2048, 1, 0)[0])
    assert "A selection of tokens makes the original no faster at any context up to 2,048." in recommendation.reasons


def test_excludes_forms_that_do_not_fit(cpu: Gpu) -> None:
    """With 2 GiB, only forms whose cache holds the batch are candidates."""
    small = dataclasses.replace(cpu, memory_gib=2.0)
    rows, _ = compare(SPEC, small, 8192, 10, 0, DENSE)
    fits = {row.label: row.fits for row in rows}
    assert not fits["gqa"] and fits["gqa, int8"]
    assert recommend(rows).best.label == "gqa, int8"
    assert "which does not fit" in recommend(rows).sentence
    rows, _ = compare(SPEC, small, 8192, 24, 0, DENSE)
    assert not next(row for row in rows if row.label == "gqa, int8").fits
    recommendation = recommend(rows)
    assert recommendation.best.form == Form("int4", 0.0118, devices=("cpu",))
    assert "--kv-cache-dtype int4" in recommendation.sentence
    assert any(reason.startswith("Does not fit: gqa") for reason in recommendation.reasons)


def test_recommends_the_smallest_rows_or_none_if_memory_is_scarce(cpu: Gpu) -> None:
    """Without an index; 3 bits lose more than 2 %."""
    small = dataclasses.replace(cpu, memory_gib=2.0)
    recommendation = recommend_for(small, 8192, 38)
    assert recommendation.best.label.endswith("4 bits") and recommendation.best.form.loss <= SMALL_LOSS
    assert recommendation.sentence.startswith("Convert")
    nothing = recommend_for(small, 8192, 1000)
    # A conversion that does not fit, or loses more than 2 %, is not recommended.
    assert nothing.sentence.startswith("Nothing fits: ") and "onver" not in nothing.sentence
    near = [row for row in compare(SPEC, small, 8192, 1000, 0)[0] if row.form and row.form.loss <= SMALL_LOSS]
    max_requests = max(row.requests for row in near)
    assert nothing.best.requests == max_requests and f"--batch {max_requests}" in nothing.reasons[0]
    bad = recommend_for(small, 8192, 45, (FORMS[0], Form("bf16", 0.4, "latent", budget=0.1)))
    assert bad.sentence.startswith("Nothing fits: ")


def test_takes_the_smallest_loss_among_equally_fast_forms(cpu: Gpu) -> None:
    forms = (FORMS[0], Form("int8", 0.005), Form("bf16", 0.001, "latent", budget=0.75))
    rows, _ = compare(SPEC, dataclasses.replace(cpu, bf16_tflops=1e6), 2048, 1, 0, forms)
    best = recommend(rows).best
    fastest = min(rows, key=lambda row: row.plain.total)
    assert best.plain.total <= SPEED_TOLERANCE * fastest.plain.total
    assert all(
        best.form.loss <= row.form.loss for row in rows if row.plain.total <= SPEED_TOLERANCE * fastest.plain.total
    )


def test_requested_configurations_are_never_recommended(cpu: Gpu) -> None:
    rows, _ = compare(SPEC, cpu, 8192, 4, 0)
    tiny = Form("bf16", 0.0, "latent", budget=0.125).plan(SPEC, "all", 8192)
    assert recommend([*rows, Row(tiny, GPUS["b200"], 8192, 4, 0)]).best.plan != tiny


@pytest.mark.parametrize(("gpu", "absent"), [("cpu", "fp8"), ("gpu", "int4")])
def test_machines_are_offered_formats_that_the_engine_reads(gpu: str, absent: str, cpu: Gpu) -> None:
    rows, _ = compare(SPEC, cpu if gpu == "cpu" else GPUS["h200"], 8192, 1, 0)
    stored = {row.plan.stored for row in rows}
    assert absent not in stored and "coded" in stored


def test_gpus_without_fp8_conversion_are_not_offered_fp8() -> None:
    for name, gpu in GPUS.items():
        stored = {row.plan.stored for row in compare(SPEC, gpu, 8192, 1, 0)[0]}
        assert ("fp8" in stored) == (name != "a100"), name


def test_forms_for_a_gpu() -> None:
    """The original where weights are most of what a step reads, and coded rows that are read sparsely where it does not
    fit, with the number of tokens that are read."""
    spec, h100 = read_spec(GPT_OSS), GPUS["h100"]
    rows, notes = compare(spec, h100, 8192, 1, 0, FORMS, "auto")
    assert recommend(rows).best.label == "gqa" and not notes
    crowded, _ = compare(spec, h100, 131072, 64, 0, FORMS, "auto")
    best = recommend(crowded).best
    assert not crowded[0].fits and best.label.endswith("4 bits, 1024 read")
    # Twice the tokens per second of the original with fp8 rows and as many requests as fit.
    fp8 = next(row for row in crowded if row.plan.stored == "fp8")
    full = dataclasses.replace(fp8, batch=fp8.requests)
    assert best.batch / best.plain.total > 2 * full.batch / full.plain.total


def test_shares_are_those_of_the_model_of_time() -> None:
    """SHARES are predicted for 64 sequences of 32,768 tokens on an H100."""
    from mlaforge.bench import kernels
    from mlaforge.gpu_verification import predictions
    from mlaforge.gpu_verification.predictions import HOPPER, INDEX_WIDTH, ROOF, TOPK

    S, P, predicted = 64, 32768, {}
    for name, (layout, dtype) in {"bf16": predictions.FORMS["GQA"], "fp8": predictions.FORMS["GQA, fp8 rows"],
                                  "latent_rope": predictions.FORMS["latent_rope 512+64"]}.items():  # fmt: skip
        times = predictions.attention_times(kernels.LAYOUTS[layout], S, P, 1, torch.bfloat16, dtype, HOPPER)
        roof = ROOF.seconds(kernels.cost(kernels.LAYOUTS[layout], S, P, 1, dtype.itemsize))
        predicted[name] = roof / sum(time.total for time in times)
    plain, coded = (predictions.LATENT_FORMS[name] for name in ("latent 832", "latent 832, coded"))
    times = predictions.latent_times(dataclasses.replace(plain, S=S, P=P), HOPPER)
    predicted["latent"] = predictions.latent_roof(plain, S, P, False) / sum(time.total for time in times.values())
    rows, selection = predictions.sparse_time(coded, S, P, HOPPER)
    predicted["coded"] = predictions.latent_roof(coded, S, TOPK, False) / rows
    index = Cost(2.0 * S * P * coded.heads * INDEX_WIDTH, float(S * P * INDEX_WIDTH))
    predicted["index"] = ROOF.seconds(index) / selection
    sizes = predictions.MODELS["20B"][1]
    experts = {part: predictions.experts_time(sizes, part, S, torch.bfloat16, HOPPER) for part in predictions.PARTS}
    roof = sum(ROOF.seconds(predictions.experts_cost(sizes, part, S, 2)) for part in experts)
    predicted["experts"] = roof / sum(time.total for time in experts.values())
    assert {name: SHARES[name] for name in predicted} == pytest.approx(predicted, rel=0.05)


def test_unsupported_layout_is_noted_once(cpu: Gpu) -> None:
    spec = read_spec(LLAMA | {"model_type": "qwen3"})
    rows, notes = compare(spec, cpu, 1024, 1, 0)
    assert {row.chosen.layout for row in rows} == {"gqa", "latent"}
    assert len(notes) == 1 and notes[0].startswith("latent_rope is left out: layer 0 cannot become latent_rope")
