"""What `plan` says of a model: its advice, its table, and the mistakes that it names."""

import json
import math

import pytest

from mlaforge.config import resolve
from mlaforge.families import read_spec
from mlaforge.families.spec import ModelSpec
from mlaforge.planning.config import PlanConfig
from mlaforge.planning.costs import Gpu
from mlaforge.planning.plan import plan_of
from mlaforge.planning.report import parse_context, run_plan
from mlaforge.runtime import UserError
from support.configs import GPT_OSS, LLAMA, SMOLLM2


def test_report_of_gpt_oss() -> None:
    options = resolve(PlanConfig, layout="latent_rope", budget=0.5, layers="full", drafts=2, gpu="h200")
    report = run_plan(read_spec(GPT_OSS), options)
    assert report.asked is not None and report.asked.form is not None  # the form of that budget is the same
    text = report.render()
    assert "Yours (>): latent_rope 448+64" in text
    assert "64 query, 8 KV, head_dim 64" in text
    assert "24: 12 full, 12 sliding" in text
    assert "1024 numbers per token" in text
    assert "yarn, theta 150000, cos and sin x 1.347, factor 32.0" in text
    assert "32, 4 a token" in text
    assert "75.00%" in text
    assert all(len(line) == len(line.rstrip()) for line in text.splitlines())
    answer = json.loads(json.dumps(report.as_dict()))
    assert [row["layout"] for row in answer["rows"]] == ["gqa"] * 2 + ["latent"] * 3 + ["latent_rope"] * 2 + [
        "gqa", "gqa", "latent"
    ]  # fmt: skip
    assert answer["rows"][1]["stored"] == "fp8" and answer["rows"][1]["typical_loss"] > 1
    assert sum(row["recommended"] for row in answer["rows"]) == 1
    asked = next(row for row in answer["rows"] if row["asked"])
    assert asked["intensity"] == pytest.approx(2 * 64 * (2 * 448 + 64) / (2 * 512))
    assert asked["parts"]["lm_head"]["bytes"] == 2 * 201088 * 2880
    assert asked["requests"] > answer["rows"][0]["requests"]


def test_the_recommendation_stands_first(cpu: Gpu) -> None:
    """One sentence with what to do, then why, then the tables, then what they were computed for."""
    report = run_plan(read_spec(SMOLLM2), PlanConfig(context="8k"), gpu=cpu)
    lines = report.render().splitlines()
    assert lines[0] == report.chosen.sentence == report.as_dict()["recommendation"]
    options = "mlaforge sparsify --topk 1024, --kv-cache-dtype int8"
    assert lines[0].startswith(f"Sparsify the original with an 8-bit cache ({options}): 4 requests of 8,192 ")
    assert lines[1].startswith("Why: ")
    assert lines.index("Forms") < lines.index("Physics") < lines.index("Parts of a step")
    assert [line.split()[0] for line in lines[-4:]] == ["EAGLE-3", "machine", "source", "workload"]
    assert sum(line.startswith("* ") for line in lines) == 2


def test_no_plan_is_for_more_than_the_model_was_made_for(cpu: Gpu) -> None:
    spec = read_spec(SMOLLM2)
    unsaid = run_plan(spec, PlanConfig(), gpu=cpu)
    assert unsaid.best.context == 8192 and unsaid.notes == []
    beyond = run_plan(spec, PlanConfig(context="32k"), gpu=cpu)
    assert beyond.best.context == 8192
    assert beyond.notes == ["the model was made for 8,192 positions: planned for those, not for 32,768"]
    assert "32,768" not in beyond.chosen.sentence
    # Of a model that was made for more, 32k.
    assert run_plan(read_spec(GPT_OSS), PlanConfig(gpu="h200")).best.context == 32768
    mixed = run_plan(read_spec(GPT_OSS | {"max_position_embeddings": 32768}), PlanConfig(gpu="h200", batch=10**4))
    choices = mixed.as_dict()["window_choices"]
    assert [set(row) for row in choices.values()] == [{8192, 32768}] * 3
    assert "128K" not in mixed.render()


def test_weights_that_are_stored_in_fp32_run_in_bf16(cpu: Gpu) -> None:
    spec = read_spec(SMOLLM2)
    assert spec.bits == 32
    row = run_plan(spec, PlanConfig(), gpu=cpu).rows[0]
    numbers = 49152 * 576 + 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    assert row.plain.weight_bytes == 2 * numbers


def test_report_adds_a_row_of_your_own(cpu: Gpu) -> None:
    spec = read_spec(LLAMA)
    report = run_plan(spec, PlanConfig(context="4k", kv_lora_rank=13), gpu=cpu)
    assert report.rows[-1] is report.asked
    assert report.rows[-1].label == "latent 13" and report.rows[-1].form is None
    text = report.render()
    assert "T queries" not in text
    assert "Note: the model was made for 2,048 positions: planned for those, not for 4,096" in text
    assert report.as_dict()["rows"][-1]["typical_loss"] is None
    stored = run_plan(spec, PlanConfig(kv_cache_dtype="fp8"), gpu=cpu)
    assert stored.asked is not None and stored.asked.label == "gqa, fp8"
    both = run_plan(spec, PlanConfig(kv_cache_dtype="int8", layout="latent", budget=0.5), gpu=cpu)
    assert both.asked is not None and both.asked.label == "latent 32, int8"
    with pytest.raises(UserError, match="kv_cache_dtype int8 is not for coded rows"):
        run_plan(spec, PlanConfig(kv_cache_dtype="int8", bits=4.0), gpu=cpu)


def test_what_was_made_is_its_own_row(llama: ModelSpec, cpu: Gpu) -> None:
    """The bytes and numbers of its config.json, whatever the others are stored in."""
    layers = range(llama.num_layers)
    codes = [[24, 16, 8 * (i + 1)] for i in layers]
    config = {"mla_layer_types": ["latent"] * len(layers), "mla_kv_lora_ranks": [24 for _ in layers]}
    made = plan_of({**config, "mla_code_counts": codes}, llama)
    report = run_plan(llama, PlanConfig(kv_cache_dtype="int8"), made, cpu)
    assert report.asked is not None and report.asked.plan.layers == made.layers and report.asked is report.rows[-1]
    assert report.asked.plan.stored == "coded"
    assert made.cache_bytes(10) == 10 * sum(map(sum, codes)) // 8
    assert made.bits == pytest.approx(sum(map(sum, codes)) / sum(layer.cached for layer in llama.layers))
    assert [layer["bytes"] for layer in report.layers()] == [sum(code) / 8 for code in codes]
    assert "Layers of yours (>)" in report.render() and len(report.as_dict()["layers"]) == len(layers)
    with pytest.raises(UserError, match="converted already"):
        run_plan(llama, PlanConfig(bits=4.0), made, cpu)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": "32kb"}, "context '32kb'"),
        ({"context": "0"}, "context '0'"),
        ({"batch": 0}, "batch = 0 must be at least 1"),
        ({"drafts": -1}, "drafts = -1 must be at least 0"),
        ({"budget": 0.0}, "budget = 0.0 must be above 0 and at most 1"),
        ({"budget": 1.5}, "budget = 1.5 must be above 0 and at most 1"),
        ({"budget": math.nan}, "budget = nan must be above 0"),
        ({"layout": "latentrope"}, "layout = 'latentrope' must be one of .* did you mean 'latent_rope'"),
        ({"layout": "gqa"}, "layout = 'gqa' must be one of latent, latent_rope"),
        ({"gpu": "h20"}, "gpu = 'h20' .* did you mean 'h200'"),
        ({"layers": "99"}, "layer 99 does not exist"),
        ({"budget": 0.5, "kv_lora_rank": 8}, "budget 0.5, kv_lora_rank 8: give one"),
        ({"kv_lora_rank": 49}, "kv_lora_rank 49 must be 1 to 48"),
    ],
)
def test_report_names_mistakes(options: dict, words: str, cpu: Gpu) -> None:
    with pytest.raises(UserError, match=words):
        run_plan(read_spec(LLAMA), PlanConfig(**options), gpu=cpu)


def test_context() -> None:
    assert [parse_context(text) for text in ("4096", "32k", "128K", "1m")] == [4096, 32768, 131072, 1048576]
