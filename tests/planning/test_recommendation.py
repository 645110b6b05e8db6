"""What `plan` recommends: memory first, then loss, then time."""

import dataclasses
import re

import pytest

from mlaforge.families import read_spec
from mlaforge.planning.costs import GPUS, Gpu
from mlaforge.planning.forms import FORMS, Form
from mlaforge.planning.recommendation import ALIKE, LITTLE, Recommendation, recommend
from mlaforge.planning.roofline import Row, compare
from support.configs import GPT_OSS, LLAMA, SMOLLM2

SPEC = dataclasses.replace(
    read_spec(SMOLLM2),
    bits=16.0,
    layers=tuple(dataclasses.replace(layer, mlp_bits=16.0) for layer in read_spec(SMOLLM2).layers),
)


# Those that read all.
DENSE = tuple(form for form in FORMS if not form.one_of)


def advised(gpu: Gpu, context: int, batch: int = 1, forms: tuple[Form, ...] = FORMS) -> Recommendation:
    return recommend(compare(SPEC, gpu, context, batch, 0, forms)[0])


def test_short_contexts_need_nothing(cpu: Gpu) -> None:
    """Weights are all that a step reads: no form is faster by a twentieth, so the one without loss stays."""
    found = advised(cpu, 128)
    assert found.best.label == "gqa"
    assert found.sentence.startswith("Keep the original as it is: 1 request of 128 tokens takes")
    assert found.sentence.endswith("at no loss.")


def test_long_contexts_want_an_8_bit_cache(cpu: Gpu) -> None:
    """4 bits are smaller, but lose more than 1 % and are unpacked more slowly; latents are for where memory ends."""
    found = advised(cpu, 8192, 4, DENSE)
    assert found.best.label == "gqa, int8"
    assert "--kv-cache-dtype int8" in found.sentence and "typical loss of 0.2 %" in found.sentence
    assert any(reason.startswith("Least memory within 1 %: latent") for reason in found.reasons)


def test_a_selection_is_taken_where_it_is_faster_and_loses_little(cpu: Gpu) -> None:
    found = advised(cpu, 8192, 4)
    assert found.best.label == "gqa, int8, 1024 read"
    assert "mlaforge sparsify --topk 1024, --kv-cache-dtype int8" in found.sentence
    (said,) = [reason for reason in found.reasons if reason.startswith("A selection of")]
    first = int(re.search(r"faster from ([\d,]+) tokens", said)[1].replace(",", ""))
    dense, read = FORMS[0], Form("bf16", 0.0, one_of=8)
    for context, faster in ((first, True), (first // 2, False)):
        rows, _ = compare(SPEC, cpu, context, 4, 0, (dense, read))
        assert (len(rows) == 2 and rows[1].verify.total * ALIKE < rows[0].verify.total) == faster
    assert not any("read" in row.label for row in compare(SPEC, cpu, 512, 1, 0)[0])


def test_a_selection_is_weighed_where_a_layer_reads_all_and_as_far_as_the_model_goes(cpu: Gpu) -> None:
    sliding = read_spec(LLAMA | {"model_type": "mistral", "sliding_window": 16})
    rows, _ = compare(sliding, cpu, 1024, 1, 0)
    assert rows and not any(row.form.one_of for row in rows)
    short = dataclasses.replace(read_spec(GPT_OSS), max_position_embeddings=2048)
    found = recommend(compare(short, GPUS["h200"], 2048, 1, 0)[0])
    assert "A selection of tokens makes the original no faster at any context up to 2,048." in found.reasons


def test_what_does_not_fit_is_out(cpu: Gpu) -> None:
    """Memory comes first: with 2 GiB, the widest cache that holds the batch decides."""
    small = dataclasses.replace(cpu, memory_gib=2.0)
    rows, _ = compare(SPEC, small, 8192, 10, 0, DENSE)
    fits = {row.label: row.fits for row in rows}
    assert not fits["gqa"] and fits["gqa, int8"]
    assert recommend(rows).best.label == "gqa, int8"
    assert "which does not fit" in recommend(rows).sentence
    rows, _ = compare(SPEC, small, 8192, 24, 0, DENSE)
    assert not next(row for row in rows if row.label == "gqa, int8").fits
    found = recommend(rows)
    assert found.best.form == Form("coded", 0.0045, "latent", bits=4.0, on=("cpu",))
    assert "mlaforge convert --bits 4" in found.sentence
    assert any(reason.startswith("Does not fit: gqa") for reason in found.reasons)


def test_where_nothing_that_fits_loses_little_the_least_loss_is_said(cpu: Gpu) -> None:
    small = dataclasses.replace(cpu, memory_gib=2.0)
    found = advised(small, 8192, 45)
    assert found.best.label.endswith("3 bits") and found.best.form.loss > LITTLE
    assert "nothing that fits typically loses at most 1 %" in found.reasons[0]
    nothing = advised(small, 8192, 1000)
    # No conversion is recommended that does not fit, or loses more than healing wins back.
    assert nothing.sentence.startswith("Nothing fits: ") and "onver" not in nothing.sentence
    near = [row for row in compare(SPEC, small, 8192, 1000, 0)[0] if row.form and row.form.loss <= LITTLE]
    most = max(row.requests for row in near)
    assert nothing.best.requests == most and f"--batch {most}" in nothing.reasons[0]
    bad = advised(small, 8192, 45, (FORMS[0], Form("bf16", 0.4, "latent", budget=0.1)))
    assert bad.sentence.startswith("Nothing fits: ")


def test_of_forms_that_are_alike_the_one_that_loses_least(cpu: Gpu) -> None:
    forms = (FORMS[0], Form("int8", 0.005, on=("cpu",)), Form("bf16", 0.001, "latent", budget=0.75))
    rows, _ = compare(SPEC, dataclasses.replace(cpu, bf16_tflops=1e6), 2048, 1, 0, forms)
    best = recommend(rows).best
    fastest = min(rows, key=lambda row: row.plain.total)
    assert best.plain.total <= ALIKE * fastest.plain.total
    assert all(best.form.loss <= row.form.loss for row in rows if row.plain.total <= ALIKE * fastest.plain.total)


def test_a_configuration_of_ones_own_is_never_recommended(cpu: Gpu) -> None:
    rows, _ = compare(SPEC, cpu, 8192, 4, 0)
    tiny = Form("bf16", 0.0, "latent", budget=0.125).plan(SPEC, "all", 8192)
    assert recommend([*rows, Row(tiny, GPUS["b200"], 8192, 4, 0)]).best.plan != tiny


@pytest.mark.parametrize(("gpu", "absent"), [("cpu", "fp8"), ("gpu", "int8")])
def test_a_machine_is_offered_what_its_engine_reads(gpu: str, absent: str, cpu: Gpu) -> None:
    rows, _ = compare(SPEC, cpu if gpu == "cpu" else GPUS["h200"], 8192, 1, 0)
    stored = {row.plan.stored for row in rows}
    assert absent not in stored and ("coded" in stored) == (gpu == "cpu")


def test_a_gpu_that_cannot_convert_fp8_is_not_offered_it() -> None:
    for name, gpu in GPUS.items():
        stored = {row.plan.stored for row in compare(SPEC, gpu, 8192, 1, 0)[0]}
        assert ("fp8" in stored) == (name != "a100"), name


def test_on_a_gpu_the_original_stays_while_it_fits() -> None:
    spec, h200 = read_spec(GPT_OSS), GPUS["h200"]
    rows, left_out = compare(spec, h200, 32768, 4, 0, DENSE, "auto")
    assert recommend(rows).best.label == "gqa" and not left_out
    crowded, _ = compare(spec, h200, 131072, 50, 0, DENSE, "auto")
    assert not crowded[0].fits and recommend(crowded).best.label == "latent 768"


def test_a_layout_that_fits_nowhere_is_named_once(cpu: Gpu) -> None:
    spec = read_spec(LLAMA | {"model_type": "qwen3"})
    rows, left_out = compare(spec, cpu, 1024, 1, 0)
    assert {row.chosen.layout for row in rows} == {"gqa", "latent"}
    assert len(left_out) == 1 and left_out[0].startswith("latent_rope is left out: layer 0 cannot become latent_rope")
