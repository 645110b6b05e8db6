"""Plans against manual arithmetic: every expected number is derived in place."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlaforge.families import read_spec
from mlaforge.families.spec import ModelSpec
from mlaforge.modeling.coded_layout_mla import ALIGNMENT, GROUP, CodedLayout
from mlaforge.planning.code_plan import coded_plan
from mlaforge.planning.config import PlanConfig
from mlaforge.planning.plan import (
    LATENT_LAYOUTS,
    BudgetTooSmall,
    LayerPlan,
    Plan,
    make_plan,
    rank_limit,
    unconverted,
)
from mlaforge.planning.report import run_plan
from mlaforge.runtime import UserError
from support.configs import LLAMA, SMOLLM2


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


def test_windows_bound_converted_and_original_caches(gpt_oss: ModelSpec) -> None:
    # 12 full layers of 32768 tokens and 12 of 128; 1024 elements of two bytes; 4 requests.
    gqa = 4 * 2 * 1024 * (12 * 32768 + 12 * 128)
    assert unconverted(gpt_oss).cache_bytes(32768, 4) == gqa
    assert make_plan(gpt_oss, 0.5).cache_bytes(32768, 4) == gqa // 2
    full = make_plan(gpt_oss, 0.5, layers="full")
    assert full.converted == tuple(range(1, 24, 2))
    assert full.converted_fraction == 0.5
    cached = 12 * 128 * 1024 + 12 * 32768 * 512
    assert full.model_fraction(32768) == pytest.approx(cached / (12 * 128 * 1024 + 12 * 32768 * 1024))
    # Below the window's 128 tokens every layer caches the same.
    assert dataclasses.replace(full, stored="fp32").cache_bytes(100) == 4 * 100 * (12 * 1024 + 12 * 512)
    assert full.cached_per_token == 12 * 1024 + 12 * 512


def test_full_budget_removes_nothing(gpt_oss: ModelSpec, llama: ModelSpec) -> None:
    assert make_plan(gpt_oss, 1.0).layers[0] == LayerPlan("latent", 1024)
    assert make_plan(gpt_oss, 1.0, "latent_rope").layers[0] == LayerPlan("latent_rope", 512, 512)
    # [W_k; W_v] has 64 rows here but only 48 columns.
    assert make_plan(llama, 1.0).layers[0] == LayerPlan("latent", 48)
    assert make_plan(llama, 1.0, "latent_rope").layers[0] == LayerPlan("latent_rope", 32, 32)
    # A full budget is not rounded down either: one KV head of 20.
    odd = read_spec(LLAMA | {"num_key_value_heads": 1, "head_dim": 20})
    assert make_plan(odd, 1.0).layers[0] == LayerPlan("latent", 40)
    assert make_plan(odd, 1.0, "latent_rope").layers[0] == LayerPlan("latent_rope", 20, 20)


def test_ranks_round_down_to_eights(gpt_oss: ModelSpec, llama: ModelSpec) -> None:
    assert make_plan(gpt_oss, 0.3).layers[0].kv_lora_rank == 304  # 307.2
    assert make_plan(gpt_oss, 0.3, "latent_rope").layers[0] == LayerPlan("latent_rope", 240, 64)  # 243.2
    # 2·5·40 = 400 elements: 0.58 of them are 232, 231.99999999999997 in floating point.
    wide = read_spec(LLAMA | {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 40, "hidden_size": 400})
    assert make_plan(wide, 0.58).layers[0].kv_lora_rank == 232
    # 0.9 · 64 = 57.6 would be 56: more than the 48 that the hidden size supports.
    assert make_plan(llama, 0.9).layers[0].kv_lora_rank == 48


def test_explicit_ranks(gpt_oss: ModelSpec, llama: ModelSpec) -> None:
    assert make_plan(gpt_oss, kv_lora_rank=500).layers[0] == LayerPlan("latent", 500)
    rope = make_plan(gpt_oss, 1.0, "latent_rope", kv_lora_rank=512)
    assert rope.layers[0] == LayerPlan("latent_rope", 512, 64)
    rope = make_plan(gpt_oss, 0.5, "latent_rope", qk_rope_head_dim=32)
    assert rope.layers[0] == LayerPlan("latent_rope", 480, 32)
    # 64 rotary dimensions exceed half of the budget, 0.75 · 64 elements, so half of the budget is rotary.
    assert make_plan(llama, 0.75, "latent_rope").layers[0] == LayerPlan("latent_rope", 24, 24)
    assert rank_limit(gpt_oss, gpt_oss.layers[0], "latent") == 1024
    assert rank_limit(llama, llama.layers[0], "latent_rope") == 48
    assert rank_limit(llama, llama.layers[0], "gqa") == 0


def test_layer_selection(gpt_oss: ModelSpec) -> None:
    assert make_plan(gpt_oss, layers="0, 2,5-9 ").converted == (0, 2, 5, 6, 7, 8, 9)
    assert make_plan(gpt_oss, layers="23").converted == (23,)
    assert len(make_plan(gpt_oss).converted) == 24
    assert unconverted(gpt_oss).converted == ()
    assert unconverted(gpt_oss).converted_fraction == 1.0


def test_ranks_may_differ_by_layer(gpt_oss: ModelSpec) -> None:
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
def test_rejects_invalid_options(gpt_oss: ModelSpec, options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        make_plan(gpt_oss, **options)
    assert "\n" not in str(caught.value)


def test_full_needs_a_full_layer() -> None:
    windowed = read_spec(LLAMA | {"model_type": "mistral", "sliding_window": 16})
    with pytest.raises(UserError, match="'full' selects none"):
        make_plan(windowed, layers="full")


def test_key_norms_exclude_latent_rope(llama: ModelSpec) -> None:
    normed = dataclasses.replace(llama.layers[2], qk_norm=True)
    spec = dataclasses.replace(llama, layers=(*llama.layers[:2], normed, llama.layers[3]))
    with pytest.raises(UserError, match=r"layer 2 .* key norm sits between projection and rotation"):
        make_plan(spec, 0.75, "latent_rope")
    assert make_plan(spec, 0.75, "latent_rope", layers="0,1,3").layers[2].layout == "gqa"
    assert make_plan(spec).converted == (0, 1, 2, 3)


def test_plan_of_a_model_with_key_norms_offers_latent_only() -> None:
    qwen3 = {k: v for k, v in LLAMA.items() if k != "head_dim"} | {"model_type": "qwen3", "hidden_size": 512}
    spec = read_spec(qwen3 | {"attention_bias": True, "use_sliding_window": True, "max_window_layers": 3})
    # transformers' default head size, not hidden / heads; and its default window, on the last layer.
    assert [(layer.head_dim, layer.window) for layer in spec.layers] == [(128, None)] * 3 + [(128, 4096)]
    assert all(layer.qk_norm and layer.q_bias and layer.o_bias for layer in spec.layers)
    assert read_spec(qwen3 | {"sliding_window": 64}).layers[3].window is None
    report = run_plan(spec, PlanConfig(gpu="h200"))
    plain = ["gqa", "gqa, int8", "gqa, fp8", "latent 384", "latent 256", "latent 192"]
    coded = ["latent 416, 4 bits", "latent 352, 3 bits", "latent 288, 2 bits"]
    dense = plain + coded
    sparse = [
        "gqa, 4096 read", "gqa, 2048 read", "gqa, 1024 read", "gqa, int8, 4096 read", "latent 256, 4096 read",
        "latent 416, 4 bits, 4096 read", "latent 416, 4 bits, 1024 read", "latent 416, 4 bits, 2048 read",
    ]  # fmt: skip
    assert [row.label for row in report.rows] == dense + sparse
    # Reported once, not for every budget.
    assert [note for note in report.notes if "key norm" in note] == report.notes[:1]
    assert report.render().count("key norm sits between projection and rotation") == 1
    with pytest.raises(UserError, match="key norm"):
        run_plan(spec, PlanConfig(layout="latent_rope"))


def test_mimo_is_read_as_qwen2() -> None:
    mimo = LLAMA | {"model_type": "mimo", "num_nextn_predict_layers": 1}
    same = read_spec(LLAMA | {"model_type": "qwen2"})
    assert read_spec(mimo) == dataclasses.replace(same, model_type="mimo")
    assert same.layers[0].v_bias and not same.layers[0].o_bias


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("mixtral", "'mixtral' is not supported: transformers merges its experts' tensors"),
        ("mimo_v2_flash", "'mimo_v2_flash' is not supported: its keys and values have different head sizes"),
        ("qwen33", r"'qwen33' is not supported; .* did you mean 'qwen3'\?"),
        ("t5", "'t5' is not supported; "),
    ],
)
def test_unsupported_families_list_the_supported_ones_and_the_guide(model_type: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        read_spec(LLAMA | {"model_type": model_type})
    message = str(caught.value)
    assert "supported are gpt_oss, llama, mimo, ministral, mistral, qwen2, qwen3;" in message
    assert "docs/adding-a-family.md" in message
    assert "\n" not in message


# Random models: any mix of windows, hidden sizes narrower or wider than the cache.
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


def try_plan(spec: ModelSpec, budget: float, layout: str) -> Plan | None:
    try:
        return make_plan(spec, budget, layout)
    except UserError:
        return None


@given(models, budgets, layouts)
def test_cache_stays_in_the_budget(spec: ModelSpec, budget: float, layout: str) -> None:
    plan = try_plan(spec, budget, layout)
    elements = 2 * spec.layers[0].num_kv_heads * spec.layers[0].head_dim
    if plan is None:
        # Rejected only if fewer than 8 elements remain after at most 64 rotary ones.
        rope = min(64, elements // 2) if layout == "latent_rope" else 0
        assert budget * elements < 8 + rope
        return
    for chosen, cached in zip(plan.layers, plan.cached, strict=True):
        assert cached <= budget * elements + 1e-6
        assert 0 < chosen.kv_lora_rank <= min(elements, spec.hidden_size)
        assert chosen.qk_rope_head_dim % 2 == 0
        assert chosen.qk_rope_head_dim <= elements // 2
    assert plan.cache_bytes(50) <= budget * unconverted(spec).cache_bytes(50) + 1e-3


@given(models, budgets, layouts)
def test_suggested_minimum_budget_suffices(spec: ModelSpec, budget: float, layout: str) -> None:
    try:
        make_plan(spec, budget, layout)
    except BudgetTooSmall as error:
        assert error.minimum > budget
        if error.minimum <= 1:
            make_plan(spec, error.minimum, layout)


@given(models, budgets, budgets, layouts)
def test_a_larger_budget_never_caches_less(spec: ModelSpec, one: float, two: float, layout: str) -> None:
    small, large = (try_plan(spec, budget, layout) for budget in sorted((one, two)))
    if small is not None:
        assert large is not None
        assert small.cache_bytes(100) <= large.cache_bytes(100)


@pytest.mark.parametrize("bits", [2.0, 3.0, 4.0, 6.5])
@pytest.mark.parametrize("layout", LATENT_LAYOUTS)
def test_coded_rows_match_their_bits(bits: float, layout: str) -> None:
    """Rows of whole words without padding within planes, at most as long as requested."""
    plan = coded_plan(read_spec(SMOLLM2), bits, layout, "all")
    assert bits / 16 - ALIGNMENT / (2 * 384) < plan.converted_fraction <= bits / 16
    assert plan.model_fraction(4096) == pytest.approx(plan.converted_fraction)
    for chosen in plan.layers:
        assert chosen.kv_lora_rank == chosen.code[0] and list(chosen.code) == sorted(chosen.code, reverse=True)
        assert all(count % GROUP == 0 for count in chosen.code)
        assert CodedLayout(chosen.code, chosen.qk_rope_head_dim).padding <= (2 if layout == "latent_rope" else 0)


def test_unconverted_layers_of_a_coded_plan_use_the_compute_dtype(llama: ModelSpec) -> None:
    plan = coded_plan(llama, 4, "latent", "0")
    elements = sum(layer.cached for layer in llama.layers[1:])
    coded = plan.layers[0].cached_bytes(llama.layers[0], 10, "coded")
    for plain, itemsize in (("bf16", 2), ("fp32", 4)):
        variant = dataclasses.replace(plan, plain=plain)
        assert variant.cache_bytes(10) == coded + 10 * itemsize * elements
        assert variant.model_fraction(10) == variant.cache_bytes(10) / unconverted(llama, plain).cache_bytes(10)


@pytest.mark.parametrize(("layout", "bits", "minimum"), [("latent", 1.9, 2.0), ("latent_rope", 3.5, 4.0)])
def test_rejects_too_few_bits(layout: str, bits: float, minimum: float, llama: ModelSpec) -> None:
    """The suggested minimum is in bits and suffices."""
    with pytest.raises(
        UserError, match=rf"^bits = {bits} of layer 0's .* the shortest row has .*; use at least {minimum:g}$"
    ):
        coded_plan(llama, bits, layout, "all")
    coded_plan(llama, minimum, layout, "all")
