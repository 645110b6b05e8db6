"""Report of `plan`: recommendation, tables, and errors."""

import json
import math

import pytest

from mlaforge.config import resolve
from mlaforge.families import read_spec
from mlaforge.families.spec import ModelSpec
from mlaforge.modeling.coded_layout_mla import CodedLayout
from mlaforge.planning.config import PlanConfig
from mlaforge.planning.costs import Gpu, weight_bytes
from mlaforge.planning.plan import plan_of
from mlaforge.planning.report import parse_context, run_plan
from mlaforge.runtime import UserError
from support.configs import GPT_OSS, GPT_OSS_120B, LLAMA, SMOLLM2


def test_report_of_gpt_oss() -> None:
    options = resolve(PlanConfig, layout="latent_rope", budget=0.5, layers="full", drafts=2, gpu="h200")
    report = run_plan(read_spec(GPT_OSS), options)
    assert report.requested is not None and report.requested.form is not None  # the form of that budget is the same
    text = report.render()
    assert "Requested (>): latent_rope 448+64" in text
    assert "64 query, 8 KV, head_dim 64" in text
    assert "24: 12 full, 12 sliding" in text
    assert "1024 elements per token" in text
    assert "yarn, theta 150000, cos and sin x 1.347, factor 32.0" in text
    assert "32, 4 a token" in text
    assert "75.00%" in text
    assert all(len(line) == len(line.rstrip()) for line in text.splitlines())
    answer = json.loads(json.dumps(report.as_dict()))
    layouts = ["gqa"] * 3 + ["latent"] * 3 + ["latent_rope"] * 2 + ["latent"] * 3 + ["gqa"] * 4 + ["latent"] * 4
    assert [row["layout"] for row in answer["rows"]] == layouts
    assert answer["rows"][2]["stored"] == "fp8" and answer["rows"][2]["typical_loss"] > 1
    assert sum(row["recommended"] for row in answer["rows"]) == 1
    requested = next(row for row in answer["rows"] if row["asked"])
    assert requested["intensity"] == pytest.approx(2 * 64 * (2 * 448 + 64) / (2 * 512))
    assert requested["parts"]["lm_head"]["bytes"] == 2 * 201088 * 2880
    assert requested["requests"] > answer["rows"][0]["requests"]


def test_recommendation_comes_first(cpu: Gpu) -> None:
    """Recommendation, reasons, tables, record."""
    report = run_plan(read_spec(SMOLLM2), PlanConfig(context="8k"), gpu=cpu)
    lines = report.render().splitlines()
    assert lines[0] == report.recommendation.sentence == report.as_dict()["recommendation"]
    action = "Convert to latent with coded rows, read sparsely (mlaforge convert --bits 4 --topk 1024)"
    assert lines[0].startswith(f"{action}: 4 requests of 8,192 ")
    assert lines[1].startswith("Why: ")
    assert lines.index("Forms") < lines.index("Physics") < lines.index("Parts of a step")
    assert [line.split()[0] for line in lines[-4:]] == ["EAGLE-3", "machine", "source", "workload"]
    assert sum(line.startswith("* ") for line in lines) == 2


@pytest.mark.parametrize(("config", "weights", "read"), [(GPT_OSS, 13.75, 3.70), (GPT_OSS_120B, 65.2, 4.97)])
def test_stated_memory_and_bandwidth(config: dict, weights: float, read: float, cpu: Gpu) -> None:
    """Total weights and those read per token, in GB: four experts of 4.25 bits, attention and head in bf16."""
    for memory in (24.0, 96.0, 128.0):
        report = run_plan(read_spec(config), PlanConfig(context="8k", batch=1, memory=memory, bandwidth=50.0), gpu=cpu)
        machine = report.rows[0].gpu
        assert (machine.memory_gib, machine.bandwidth_tbs, machine.flops) == (memory, 0.05, cpu.flops)
        assert f"{memory:g} GiB of memory and 50 GB/s as stated" in report.record()["source"]
        fits = weights * 1e9 < memory * 2**30
        assert (report.rows[0].requests > 0) is fits
        assert any("the weights alone take" in note for note in report.notes) is not fits
        one = report.weight_reads()[0]
        layers, E = config["num_hidden_layers"], 2880
        experts, attention = 4 * 3 * E * E * 4.25 / 8, 2 * E * 64 * (64 + 8 + 8 + 64)
        assert one["bytes"] == pytest.approx(layers * (experts + attention) + 2 * 201088 * E, rel=1e-6)
        assert one["bytes"] == pytest.approx(read * 1e9, rel=0.01)
        assert one["tokens_per_second"] == pytest.approx(0.68 * 50e9 / one["bytes"])
    assert weights * 1e9 == pytest.approx(weight_bytes(report.rows[0].plan), rel=0.01)


def test_several_tokens_share_experts(cpu: Gpu) -> None:
    report = run_plan(read_spec(GPT_OSS), PlanConfig(context="8k", batch=3, drafts=3), gpu=cpu)
    reads = {entry["tokens"]: entry for entry in report.weight_reads()}
    # The batch and the batch with drafts are included.
    assert list(reads) == [1, 2, 3, 4, 8, 12, 16, 64]
    for tokens, entry in reads.items():
        assert entry["experts"] == pytest.approx(32 * (1 - (1 - 4 / 32) ** tokens))
    assert reads[1]["experts"] == 4 and reads[2]["experts"] == 7.5
    one, eight = reads[1]["bytes"], reads[8]["bytes"]
    assert eight - one == pytest.approx(24 * (reads[8]["experts"] - 4) * 3 * 2880 * 2880 * 4.25 / 8)
    lines = report.render().splitlines()
    table = lines[lines.index("Weights of a step of several tokens") :]
    assert table[3].split()[:2] == ["1", "4.0"] and table[7].split()[:2] == ["8", "21.0"]
    assert json.loads(json.dumps(report.as_dict()))["several_tokens"] == report.weight_reads()
    # Without experts a single token reads all weights.
    dense = run_plan(read_spec(SMOLLM2), PlanConfig(), gpu=cpu)
    assert dense.weight_reads() == [] and "several tokens" not in dense.render()


def test_context_is_limited_to_the_model_s_maximum(cpu: Gpu) -> None:
    spec = read_spec(SMOLLM2)
    default = run_plan(spec, PlanConfig(), gpu=cpu)
    assert default.best.context == 8192 and default.notes == []
    beyond = run_plan(spec, PlanConfig(context="32k"), gpu=cpu)
    assert beyond.best.context == 8192
    assert beyond.notes == ["the model supports 8,192 positions: planned for these, not for 32,768"]
    assert "32,768" not in beyond.recommendation.sentence
    # The default is 32k for a model with a longer context.
    assert run_plan(read_spec(GPT_OSS), PlanConfig(gpu="h200")).best.context == 32768
    mixed = run_plan(read_spec(GPT_OSS | {"max_position_embeddings": 32768}), PlanConfig(gpu="h200", batch=10**4))
    choices = mixed.as_dict()["window_choices"]
    assert [set(row) for row in choices.values()] == [{8192, 32768}] * 3
    assert "128K" not in mixed.render()


def test_fp32_weights_run_in_bf16(cpu: Gpu) -> None:
    spec = read_spec(SMOLLM2)
    assert spec.bits == 32
    row = run_plan(spec, PlanConfig(), gpu=cpu).rows[0]
    parameters = 49152 * 576 + 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    assert row.plain.weight_bytes == 2 * parameters


def test_report_adds_the_requested_row(cpu: Gpu) -> None:
    spec = read_spec(LLAMA)
    report = run_plan(spec, PlanConfig(context="4k", kv_lora_rank=13), gpu=cpu)
    assert report.rows[-1] is report.requested
    assert report.rows[-1].label == "latent 13" and report.rows[-1].form is None
    text = report.render()
    assert "T queries" not in text
    assert "Note: the model supports 2,048 positions: planned for these, not for 4,096" in text
    assert report.as_dict()["rows"][-1]["typical_loss"] is None
    stored = run_plan(spec, PlanConfig(kv_cache_dtype="fp8"), gpu=cpu)
    assert stored.requested is not None and stored.requested.label == "gqa, fp8"
    combined = run_plan(spec, PlanConfig(kv_cache_dtype="int8", layout="latent", budget=0.5), gpu=cpu)
    assert combined.requested is not None and combined.requested.label == "latent 32, int8"
    with pytest.raises(UserError, match="kv_cache_dtype int8 is not for coded rows"):
        run_plan(spec, PlanConfig(kv_cache_dtype="int8", bits=4.0), gpu=cpu)


def test_converted_models_have_a_row(llama: ModelSpec, cpu: Gpu) -> None:
    """With the storage of its config.json, independent of kv_cache_dtype."""
    layers = range(llama.num_layers)
    codes = [[64, 32, 8 * (i + 1)] for i in layers]
    config = {"mla_layer_types": ["latent"] * len(layers), "mla_kv_lora_ranks": [64 for _ in layers]}
    converted = plan_of({**config, "mla_code_counts": codes}, llama)
    report = run_plan(llama, PlanConfig(kv_cache_dtype="int8"), converted, cpu)
    assert (
        report.requested is not None
        and report.requested.plan.layers == converted.layers
        and report.requested is report.rows[-1]
    )
    assert report.requested.plan.stored == "coded"
    row_bytes = [CodedLayout(code).row_bytes for code in codes]
    assert converted.cache_bytes(10) == 10 * sum(row_bytes)
    assert converted.bits == pytest.approx(8 * sum(row_bytes) / sum(layer.cached for layer in llama.layers))
    assert [layer["bytes"] for layer in report.layers()] == row_bytes
    assert "Layers of the requested configuration (>)" in report.render() and len(report.as_dict()["layers"]) == len(
        layers
    )
    with pytest.raises(UserError, match="already converted"):
        run_plan(llama, PlanConfig(bits=4.0), converted, cpu)


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
def test_rejects_invalid_options(options: dict, words: str, cpu: Gpu) -> None:
    with pytest.raises(UserError, match=words):
        run_plan(read_spec(LLAMA), PlanConfig(**options), gpu=cpu)


def test_parse_context() -> None:
    assert [parse_context(text) for text in ("4096", "32k", "128K", "1m")] == [4096, 32768, 131072, 1048576]
