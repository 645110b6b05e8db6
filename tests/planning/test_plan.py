"""Plans and rooflines against arithmetic done by hand: every expected number is worked out in place."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlaforge.config import resolve
from mlaforge.families import read_spec
from mlaforge.families.spec import ModelSpec
from mlaforge.planning.config import PlanConfig
from mlaforge.planning.costs import GPUS
from mlaforge.planning.plan import LATENT_LAYOUTS, LayerPlan, Plan, coded_plan, make_plan, rank_limit, unconverted
from mlaforge.planning.report import parse_context, run_plan
from mlaforge.planning.roofline import Row, attention_op, compare, decode_step, projections, recommend, weight_bytes
from mlaforge.runtime import UserError

GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 32,
    "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128, "tie_word_embeddings": False,
    "dtype": "bfloat16", "rope_theta": 150000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
GPT_OSS_120B = GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}
# 4 query and 2 KV heads of 16: 2·2·16 = 64 cached numbers.
LLAMA = {
    "model_type": "llama", "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 100, "vocab_size": 1000,
    "tie_word_embeddings": True, "dtype": "float32",
}  # fmt: skip
H200 = GPUS["h200"]


@pytest.fixture
def gpt_oss() -> ModelSpec:
    return read_spec(GPT_OSS)


@pytest.fixture
def llama() -> ModelSpec:
    return read_spec(LLAMA)


# Cached numbers


def test_ratio_counts_keys_and_values(gpt_oss: ModelSpec) -> None:
    full = gpt_oss.layers[1]
    assert full.window is None
    assert full.cached == 2 * 8 * 64 == 1024
    plan = make_plan(gpt_oss, budget=0.4375)
    assert plan.layers[1] == LayerPlan("latent", 448, 0)
    assert plan.converted_fraction == 448 / 1024 == 0.4375
    rope = make_plan(gpt_oss, budget=0.4375, layout="latent_rope")
    assert rope.layers[1] == LayerPlan("latent_rope", 384, 64)
    assert rope.cached[1] == 448


def test_windows_bound_the_cache_in_both(gpt_oss: ModelSpec) -> None:
    # 12 full layers of 32768 tokens and 12 of 128; 1024 numbers of two bytes; 4 requests.
    gqa = 4 * 2 * 1024 * (12 * 32768 + 12 * 128)
    assert unconverted(gpt_oss).cache_bytes(32768, 4) == gqa
    assert make_plan(gpt_oss, 0.5).cache_bytes(32768, 4) == gqa // 2
    full = make_plan(gpt_oss, 0.5, layers="full")
    assert full.converted == tuple(range(1, 24, 2))
    assert full.converted_fraction == 0.5
    kept = 12 * 128 * 1024 + 12 * 32768 * 512
    assert full.model_fraction(32768) == pytest.approx(kept / (12 * 128 * 1024 + 12 * 32768 * 1024))
    # Below the window's 128 tokens every layer holds the same.
    assert dataclasses.replace(full, stored="fp32").cache_bytes(100) == 4 * 100 * (12 * 1024 + 12 * 512)
    assert full.cached_per_token == 12 * 1024 + 12 * 512


def test_full_budget_removes_nothing(gpt_oss: ModelSpec, llama: ModelSpec) -> None:
    assert make_plan(gpt_oss, 1.0).layers[0] == LayerPlan("latent", 1024)
    assert make_plan(gpt_oss, 1.0, "latent_rope").layers[0] == LayerPlan("latent_rope", 512, 512)
    # [W_k; W_v] has 64 rows here but only 48 columns.
    assert make_plan(llama, 1.0).layers[0] == LayerPlan("latent", 48)
    assert make_plan(llama, 1.0, "latent_rope").layers[0] == LayerPlan("latent_rope", 32, 32)
    # Nor is anything rounded away: one KV head of 20.
    odd = read_spec(LLAMA | {"num_key_value_heads": 1, "head_dim": 20})
    assert make_plan(odd, 1.0).layers[0] == LayerPlan("latent", 40)
    assert make_plan(odd, 1.0, "latent_rope").layers[0] == LayerPlan("latent_rope", 20, 20)


def test_ranks_round_down_to_eights(gpt_oss: ModelSpec, llama: ModelSpec) -> None:
    assert make_plan(gpt_oss, 0.3).layers[0].kv_lora_rank == 304  # 307.2
    assert make_plan(gpt_oss, 0.3, "latent_rope").layers[0] == LayerPlan("latent_rope", 240, 64)  # 243.2
    # 2·5·40 = 400 numbers: 0.58 of them are 232, though floating point says 231.99999999999997.
    wide = read_spec(LLAMA | {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 40, "hidden_size": 400})
    assert make_plan(wide, 0.58).layers[0].kv_lora_rank == 232
    # 0.9 · 64 = 57.6 would be 56: more than the 48 that the hidden size supports.
    assert make_plan(llama, 0.9).layers[0].kv_lora_rank == 48


def test_given_ranks(gpt_oss: ModelSpec, llama: ModelSpec) -> None:
    assert make_plan(gpt_oss, kv_lora_rank=500).layers[0] == LayerPlan("latent", 500)
    rope = make_plan(gpt_oss, 1.0, "latent_rope", kv_lora_rank=512)
    assert rope.layers[0] == LayerPlan("latent_rope", 512, 64)
    rope = make_plan(gpt_oss, 0.5, "latent_rope", qk_rope_head_dim=32)
    assert rope.layers[0] == LayerPlan("latent_rope", 480, 32)
    # Where 64 rotary dimensions are more than half of the budget, 0.75 · 64 numbers, half of it turns.
    assert make_plan(llama, 0.75, "latent_rope").layers[0] == LayerPlan("latent_rope", 24, 24)
    assert rank_limit(gpt_oss, gpt_oss.layers[0], "latent") == 1024
    assert rank_limit(llama, llama.layers[0], "latent_rope") == 48
    assert rank_limit(llama, llama.layers[0], "gqa") == 0


def test_layers(gpt_oss: ModelSpec) -> None:
    assert make_plan(gpt_oss, layers="0, 2,5-9 ").converted == (0, 2, 5, 6, 7, 8, 9)
    assert make_plan(gpt_oss, layers="23").converted == (23,)
    assert len(make_plan(gpt_oss).converted) == 24
    assert unconverted(gpt_oss).converted == ()
    assert unconverted(gpt_oss).converted_fraction == 1.0


def test_ranks_may_be_replaced_layer_by_layer(gpt_oss: ModelSpec) -> None:
    plan = make_plan(gpt_oss, 0.5, layers="1,3")
    narrow = dataclasses.replace(plan.layers[3], kv_lora_rank=256)
    plan = dataclasses.replace(plan, layers=(*plan.layers[:3], narrow, *plan.layers[4:]))
    assert plan.converted_fraction == (512 + 256) / 2048


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": 0.005}, r"budget 0.005 .* leaves 5 for the latent, at least 8 .* at least 0.0079"),
        (
            {"budget": 0.06, "layout": "latent_rope", "qk_rope_head_dim": 64},
            r"less 64 of the rotary key .* budget of at least 0.0704",
        ),
        ({"kv_lora_rank": 1025}, "kv_lora_rank 1025 must be 1 to 1024 for layer 0"),
        ({"kv_lora_rank": 0}, "kv_lora_rank 0 must be 1 to 1024"),
        ({"kv_lora_rank": 384, "qk_rope_head_dim": 64}, "qk_rope_head_dim 64 .* use layout latent_rope"),
        ({"layout": "latent_rope", "qk_rope_head_dim": 63}, "qk_rope_head_dim 63 must be even"),
        ({"layout": "latent_rope", "qk_rope_head_dim": 0}, "qk_rope_head_dim 0 .* positive"),
        ({"layout": "latent_rope", "qk_rope_head_dim": 514}, "qk_rope_head_dim 514 .* at most 512"),
        ({"layers": ""}, "layers '' selects none"),
        ({"layers": "ful"}, "'ful' is not a layer .* did you mean 'full'"),
        ({"layers": "0,,2"}, "'' is not a layer"),
        ({"layers": "-1"}, "'-1' is not a layer"),
        ({"layers": "3-1"}, "'3-1' runs backwards; write 1-3"),
        ({"layers": "0-24"}, "layer 24 does not exist; the model has layers 0-23"),
    ],
)
def test_mistakes_are_named(gpt_oss: ModelSpec, options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        make_plan(gpt_oss, **options)
    assert "\n" not in str(caught.value)


def test_full_needs_a_full_layer() -> None:
    windowed = read_spec(LLAMA | {"model_type": "mistral", "sliding_window": 16})
    with pytest.raises(UserError, match="'full' selects none"):
        make_plan(windowed, layers="full")


def test_key_norms_forbid_absorbing(llama: ModelSpec) -> None:
    normed = dataclasses.replace(llama.layers[2], qk_norm=True)
    spec = dataclasses.replace(llama, layers=(*llama.layers[:2], normed, llama.layers[3]))
    with pytest.raises(UserError, match=r"layer 2 .* key norm sits between projection and rotation"):
        make_plan(spec, 0.75, "latent_rope")
    assert make_plan(spec, 0.75, "latent_rope", layers="0,1,3").layers[2].layout == "gqa"
    assert make_plan(spec).converted == (0, 1, 2, 3)


def test_norms_on_keys_leave_one_layout() -> None:
    qwen3 = {k: v for k, v in LLAMA.items() if k != "head_dim"} | {"model_type": "qwen3", "hidden_size": 512}
    spec = read_spec(qwen3 | {"attention_bias": True, "use_sliding_window": True, "max_window_layers": 3})
    # transformers' default head size, not hidden / heads; and its default window, on the last layer.
    assert [(layer.head_dim, layer.window) for layer in spec.layers] == [(128, None)] * 3 + [(128, 4096)]
    assert all(layer.qk_norm and layer.q_bias and layer.o_bias for layer in spec.layers)
    assert read_spec(qwen3 | {"sliding_window": 64}).layers[3].window is None
    report = run_plan(qwen3, PlanConfig(drafts=0))
    assert [row.label for row in report.rows] == ["gqa", "latent 384", "latent 256", "latent 224", "latent 128"]
    assert report.best.chosen.layout == "latent"
    # Said once, not for every budget.
    assert [note for note in report.notes if "key norm" in note] == report.notes[:1]
    assert report.render().count("key norm sits between projection and rotation") == 1
    with pytest.raises(UserError, match="key norm"):
        run_plan(qwen3, PlanConfig(layout="latent_rope"))


def test_a_family_that_another_ones_classes_compute() -> None:
    mimo = LLAMA | {"model_type": "mimo", "num_nextn_predict_layers": 1}
    same = read_spec(LLAMA | {"model_type": "qwen2"})
    assert read_spec(mimo) == dataclasses.replace(same, model_type="mimo")
    assert same.layers[0].v_bias and not same.layers[0].o_bias


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("mixtral", "'mixtral' is not supported: transformers merges its experts' tensors"),
        ("mimo_v2_flash", "'mimo_v2_flash' is not supported: its heads are of another size in keys than in values"),
        ("qwen33", r"'qwen33' is not supported; .* did you mean 'qwen3'\?"),
        ("t5", "'t5' is not supported; "),
    ],
)
def test_unsupported_families_are_told_which_are_and_what_one_needs(model_type: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        read_spec(LLAMA | {"model_type": model_type})
    said = str(caught.value)
    assert "supported are gpt_oss, llama, mimo, mistral, qwen2, qwen3;" in said
    assert "docs/adding-a-family.md" in said
    assert "\n" not in said


# Drawn models: any mix of widths, hidden sizes from narrower to wider than the cache.
models = st.builds(
    lambda kv, group, half, hidden, windows: read_spec(
        LLAMA
        | {
            "model_type": "qwen2",
            "num_attention_heads": kv * group,
            "num_key_value_heads": kv,
            "head_dim": 2 * half,
            "hidden_size": hidden,
            "num_hidden_layers": len(windows),
            "sliding_window": 7,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention" if w else "full_attention" for w in windows],
        }
    ),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(2, 32),
    st.integers(16, 600),
    st.lists(st.booleans(), min_size=1, max_size=4),
)
budgets = st.floats(0.01, 1.0)
layouts = st.sampled_from(["latent", "latent_rope"])


def planned(spec: ModelSpec, budget: float, layout: str) -> Plan | None:
    try:
        return make_plan(spec, budget, layout)
    except UserError:
        return None


@given(models, budgets, layouts)
def test_cache_stays_in_the_budget(spec: ModelSpec, budget: float, layout: str) -> None:
    plan = planned(spec, budget, layout)
    numbers = 2 * spec.layers[0].num_kv_heads * spec.layers[0].head_dim
    if plan is None:
        # Refused only where fewer than 8 numbers are left after at most 64 rotary ones.
        rope = min(64, numbers // 2) if layout == "latent_rope" else 0
        assert budget * numbers < 8 + rope
        return
    for chosen, cached in zip(plan.layers, plan.cached, strict=True):
        assert cached <= budget * numbers + 1e-6
        assert 0 < chosen.kv_lora_rank <= min(numbers, spec.hidden_size)
        assert chosen.qk_rope_head_dim % 2 == 0
        assert chosen.qk_rope_head_dim <= numbers // 2
    assert plan.cache_bytes(50) <= budget * unconverted(spec).cache_bytes(50) + 1e-3


@given(models, budgets, budgets, layouts)
def test_a_larger_budget_never_caches_less(spec: ModelSpec, one: float, two: float, layout: str) -> None:
    small, large = (planned(spec, budget, layout) for budget in sorted((one, two)))
    if small is not None:
        assert large is not None
        assert small.cache_bytes(100) <= large.cache_bytes(100)


# FLOPs and bytes


@pytest.mark.parametrize("bits", [2.0, 3.0, 4.0, 6.5])
@pytest.mark.parametrize("layout", LATENT_LAYOUTS)
def test_coded_rows_have_the_bytes_of_their_bits(bits: float, layout: str, llama: ModelSpec) -> None:
    plan = coded_plan(llama, bits, layout, "all")
    assert 0.7 * bits / 16 < plan.converted_fraction <= bits / 16
    assert plan.model_fraction(4096) == pytest.approx(plan.converted_fraction)
    for chosen in plan.layers:
        assert chosen.kv_lora_rank == chosen.code[0] and list(chosen.code) == sorted(chosen.code, reverse=True)


def test_absorbed_attention_does_119_flop_per_byte(gpt_oss: ModelSpec) -> None:
    one = attention_op(gpt_oss.layers[1], LayerPlan("latent_rope", 384, 64), context=1)
    # 64 heads score 448 dimensions and add up 384: 2·64·448 + 2·64·384.
    assert one.flops == 106496
    assert one.bytes == 2 * 448 == 896
    assert one.intensity == pytest.approx(118.86, abs=0.01)


def test_attention_of_the_other_layouts(gpt_oss: ModelSpec) -> None:
    gqa = attention_op(gpt_oss.layers[1], LayerPlan("gqa"), context=10, batch=3, queries=2)
    assert gqa.flops == 3 * 10 * 2 * (2 * 64 * 64 + 2 * 64 * 64)
    assert gqa.bytes == 3 * 10 * 2 * 1024
    # Decompressing the 512 key dimensions from 448 costs the same for 1 query token as for 2.
    latent = [attention_op(gpt_oss.layers[1], LayerPlan("latent", 448), 10, 3, T) for T in (1, 2)]
    assert latent[0].flops == 3 * 10 * (2 * 448 * 512 + 2 * 64 * 64 + 2 * 64 * 448)
    assert latent[1].flops - latent[0].flops == 3 * 10 * (2 * 64 * 64 + 2 * 64 * 448)
    assert latent[0].bytes == latent[1].bytes == 3 * 10 * 2 * 448
    # A sliding layer holds its 128 tokens and no more.
    assert attention_op(gpt_oss.layers[0], LayerPlan("gqa"), context=32768).bytes == 128 * 2 * 1024


def test_h200_ridge() -> None:
    # 0.8 · 989e12 / 4.8e12
    assert H200.ridge == pytest.approx(164.8, abs=0.1)
    assert GPUS["cpu"].ridge == pytest.approx(120 / 30)


def test_four_query_tokens_make_wide_absorbed_attention_slower_than_gqa(gpt_oss: ModelSpec) -> None:
    def nanoseconds(chosen: LayerPlan, queries: int) -> float:
        return H200.seconds(attention_op(gpt_oss.layers[1], chosen, 1, 1, queries)) * 1e9

    # Per cached token: GQA reads 2048 bytes at 4.8 TB/s.
    gqa = nanoseconds(LayerPlan("gqa"), 4)
    assert gqa == pytest.approx(2048 / 4800)
    # 4 · 106496 FLOP at 791.2 TFLOP/s: 0.54 ns against 0.43 ns; at one query token 896 bytes, 0.19 ns.
    wide = LayerPlan("latent_rope", 384, 64)
    assert nanoseconds(wide, 4) == pytest.approx(4 * 106496 / 791200)
    assert nanoseconds(wide, 4) > gqa
    assert nanoseconds(wide, 1) == pytest.approx(896 / 4800)
    # r = 192: 4 · (2·64·256 + 2·64·192) = 229376 FLOP, 0.29 ns.
    narrow = nanoseconds(LayerPlan("latent_rope", 192, 64), 4)
    assert narrow == pytest.approx(229376 / 791200)
    assert narrow < gqa


def test_projections_of_a_converted_layer(gpt_oss: ModelSpec) -> None:
    layer = gpt_oss.layers[1]
    q, kv_a, kv_b, o = 2880 * 64 * 128, 2880 * 448, 1024 * 384, 64 * 64 * 2880
    rope = projections(gpt_oss, layer, LayerPlan("latent_rope", 384, 64), tokens=3)
    assert rope.bytes == 2 * (q + kv_a + kv_b + o)
    # Absorbed: 64 heads · 64 · 384 on the query's side and as many on the output's, in place of kv_b_proj.
    assert rope.flops == 3 * 2 * (q + kv_a + o + 2 * 64 * 64 * 384)
    latent = projections(gpt_oss, layer, LayerPlan("latent", 384), tokens=1)
    assert latent.bytes == 2 * (2880 * 64 * 64 + 2880 * 384 + kv_b + o)
    assert latent.flops == 2 * (2880 * 64 * 64 + 2880 * 384 + o + 64 * 64 * 384)
    gqa = projections(gpt_oss, layer, LayerPlan("gqa"), tokens=1)
    assert gqa.flops == gqa.bytes == 2 * (2 * 2880 * 4096 + 2 * 2880 * 512)


@pytest.mark.parametrize(
    ("config", "billions", "experts", "layers", "ratio"),
    [(GPT_OSS, 20.9, 32, 24, 1.79), (GPT_OSS_120B, 116.8, 128, 36, 2.08)],
    ids=["20b", "120b"],
)
def test_verifying_reads_more_experts(config: dict, billions: float, experts: int, layers: int, ratio: float) -> None:
    spec = read_spec(config)
    assert spec.num_params == pytest.approx(billions * 1e9, rel=0.005)
    plan = unconverted(spec)
    one, four = (decode_step(plan, H200, 1024, 1, queries).weight_bytes for queries in (1, 4))
    # MiB-free arithmetic: bf16 attention and LM head, 4.25 bits in each of the experts that are read.
    rest = 2 * (layers * 2 * 2880 * (4096 + 512) + 201088 * 2880)
    expert = layers * 3 * 2880 * 2880 * 4.25 / 8
    assert one == pytest.approx(rest + 4 * expert)
    assert four == pytest.approx(rest + experts * (1 - (1 - 4 / experts) ** 4) * expert)
    assert four / one == pytest.approx(ratio, rel=0.02)
    # All weights: a second embedding and every expert; about what the checkpoints weigh (12.8 and 60.8 GiB).
    assert weight_bytes(plan) == pytest.approx(rest + 2 * 201088 * 2880 + experts * expert)


def test_step_is_the_sum_of_its_parts(llama: ModelSpec) -> None:
    gpu = GPUS["cpu"]
    step = decode_step(unconverted(llama), gpu, context=100, batch=2, queries=1)
    # fp32 weights, bf16 cache. One token does 2 FLOP per 4 bytes of weight: bandwidth-bound (ridge 8.6).
    attention = 2 * 100 * 64 * 2  # bytes; GQA does 4·4·16 = 256 FLOP per 128 bytes
    weights = 4 * (4 * (48 * 64 * 2 + 48 * 64) + 4 * 3 * 48 * 100 + 1000 * 48)
    assert step.costs["attention"].bytes == 4 * attention
    assert step.weight_bytes == weights == weight_bytes(unconverted(llama))  # tied: the LM head is all there is
    assert step.total == pytest.approx((4 * attention + weights) / 30e9)
    assert step.limit == "weight bandwidth"
    assert step.limits["cache bandwidth"] == pytest.approx(4 * attention / 30e9)
    # Many query tokens turn weights into compute.
    assert decode_step(unconverted(llama), gpu, 1, 1000).limit == "weight compute"


def test_requests_fill_the_memory_beside_the_weights() -> None:
    spec = read_spec(GPT_OSS_120B)
    for gpu, fits in (("h200", True), ("rtx5090", False)):
        row = Row(unconverted(spec), GPUS[gpu], context=32768, batch=1, drafts=3)
        free = GPUS[gpu].memory_gib * 2**30 - weight_bytes(row.plan)
        per_request = 2 * 1024 * 18 * (32768 + 128)
        assert row.requests == (free // per_request if fits else 0)
        assert (row.requests > 0) is fits
    assert row.perfect_speedup == pytest.approx(4 / row.verify_ratio)


# What `plan` says


def test_advice_follows_the_limit() -> None:
    spec = read_spec(GPT_OSS)

    def advice(context: int, batch: int, drafts: int) -> tuple[str, str]:
        rows, left_out = compare(spec, H200, context, batch, drafts, (0.75, 0.5, 0.25))
        assert not left_out
        assert [row.label for row in rows[:3]] == ["gqa", "latent 768", "latent 512"]
        best, reason = recommend(rows)
        return best.label, reason

    # Weights are nearly everything at 256 tokens: fidelity is free.
    label, reason = advice(256, 1, 0)
    assert label == "latent 512"
    assert "weight bandwidth" in reason
    # One query token on a long context: 120 FLOP per byte stay under the ridge.
    label, reason = advice(131072, 16, 0)
    assert label == "latent_rope 448+64"
    assert "cache-bandwidth-bound" in reason
    # Four: 480 FLOP per byte do not.
    label, reason = advice(131072, 16, 3)
    assert label == "latent_rope 448+64"
    assert "compute-bound" in reason
    assert "saves memory, not attention time" in reason
    assert "up to 2 query token(s)" in reason  # 2 · 122880 / 791.2e12 = 0.31 ns, below GQA's 0.43
    assert "latent_rope 192+64 would keep up" in reason


def test_report_of_gpt_oss() -> None:
    options = resolve(PlanConfig, layout="latent_rope", kv_lora_rank=384, layers="full", drafts=2)
    report = run_plan(GPT_OSS, options)
    assert report.asked is report.rows[-2]  # the row of budget 0.4375 is the same
    text = report.render()
    assert "Yours (>): latent_rope 384+64" in text
    assert "64 query, 8 KV, head_dim 64" in text
    assert "24: 12 full, 12 sliding" in text
    assert "1024 numbers per token" in text
    assert "yarn, theta 150000, cos and sin x 1.347, factor 32.0" in text
    assert "32, 4 a token" in text
    assert "43.75%" in text
    assert all(len(line) == len(line.rstrip()) for line in text.splitlines())
    answer = json.loads(json.dumps(report.as_dict()))
    assert [row["layout"] for row in answer["rows"]] == ["gqa", *["latent"] * 4, *["latent_rope"] * 4]
    assert sum(row["recommended"] for row in answer["rows"]) == 1
    asked = next(row for row in answer["rows"] if row["asked"])
    assert asked["intensity"] == pytest.approx(118.86, abs=0.01)
    assert asked["parts"]["lm_head"]["bytes"] == 2 * 201088 * 2880
    assert asked["requests"] > answer["rows"][0]["requests"]


def test_report_adds_a_row_of_your_own() -> None:
    report = run_plan(LLAMA, PlanConfig(context="4k", gpu="cpu", kv_lora_rank=13, drafts=0))
    assert report.rows[-1] is report.asked
    assert report.rows[-1].label == "latent 13"
    text = report.render()
    assert "T queries" not in text
    assert "Note: context 4096 is beyond the model's 2048 positions" in text


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
def test_report_names_mistakes(options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        run_plan(LLAMA, PlanConfig(**options))


def test_context() -> None:
    assert [parse_context(text) for text in ("4096", "32k", "128K", "1m")] == [4096, 32768, 131072, 1048576]
