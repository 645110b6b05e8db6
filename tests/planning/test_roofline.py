"""FLOPs, bytes and time of a step against manual arithmetic: every expected number is derived in place."""

import pytest

from mlaforge.families import read_spec
from mlaforge.families.spec import ModelSpec
from mlaforge.planning.costs import GPUS, Cost, Gpu, attention_op, index_op, projections, weight_bytes
from mlaforge.planning.plan import LayerPlan, unconverted
from mlaforge.planning.roofline import Row, decode_step
from support.configs import GPT_OSS, GPT_OSS_120B

H200 = GPUS["h200"]


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
    # A sliding layer caches at most its 128 tokens.
    assert attention_op(gpt_oss.layers[0], LayerPlan("gqa"), context=32768).bytes == 128 * 2 * 1024


def test_h200_ridge() -> None:
    # 0.8 · 989e12 / 4.8e12
    assert H200.ridge == pytest.approx(164.8, abs=0.1)


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
    # Absorbed: 64 heads · 64 · 384 on the query side and as many on the output side, instead of kv_b_proj.
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
def test_drafts_read_more_experts(config: dict, billions: float, experts: int, layers: int, ratio: float) -> None:
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
    gpu = Gpu("cpu", 0.12, 0.03, 23.5, "made up", achievable=1.0, row_bandwidths={"int8": 15e9})
    step = decode_step(unconverted(llama), gpu, context=100, batch=2, queries=1)
    # fp32 weights, bf16 cache. One token does 2 FLOP per 4 bytes of weight: bandwidth-bound (ridge 8.6).
    attention = 2 * 100 * 64 * 2  # bytes; GQA does 4·4·16 = 256 FLOP per 128 bytes
    weights = 4 * (4 * (48 * 64 * 2 + 48 * 64) + 4 * 3 * 48 * 100 + 1000 * 48)
    assert step.costs["attention"].bytes == 4 * attention
    assert step.weight_bytes == weights == weight_bytes(unconverted(llama))  # tied: the LM head is all there is
    assert step.total == pytest.approx((4 * attention + weights) / 30e9)
    assert step.limit == "weight bandwidth"
    assert step.limits["cache bandwidth"] == pytest.approx(4 * attention / 30e9)
    # int8 rows of 16 elements and 4 scales of two bytes, read at 15 GB/s at most.
    packed = decode_step(unconverted(llama, "int8"), gpu, context=100, batch=2, queries=1)
    assert packed.seconds["attention"] == pytest.approx(4 * 2 * 100 * (64 + 8) / 15e9)
    assert packed.costs["attention"].bytes == 4 * 2 * 100 * (64 + 8)
    # Many query tokens make weights compute-bound.
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


def test_sparse_layers_read_a_selection_and_all_index_keys(gpt_oss):
    layer = gpt_oss.layers[1]
    H, G, d = layer.num_heads, layer.num_kv_heads, layer.head_dim
    sparse = LayerPlan("gqa", topk=1024, index=32)
    cost = attention_op(layer, sparse, 8192, 3, 2) + index_op(layer, sparse, 8192, 3)
    assert cost.bytes == 3 * (1024 * 2 * 2 * G * d + 8192 * 32)
    assert cost.flops == 3 * (1024 * 2 * 4 * H * d + 8192 * 2 * H * 32)
    # Contexts up to topk are read in full.
    assert attention_op(layer, sparse, 1000) == attention_op(layer, LayerPlan("gqa"), 1000)
    latent = LayerPlan("latent", 448, topk=1024, index=32)
    assert index_op(layer, sparse, 1000) == index_op(layer, LayerPlan("gqa"), 8192) == Cost(0.0, 0.0)
    cached, fresh = (attention_op(layer, latent, 8192, caches_keys=caches) for caches in (True, False))
    assert fresh.flops - cached.flops == pytest.approx(1024 * 6 / 7 * 2 * 448 * G * d)
    assert fresh.bytes == cached.bytes
