"""FLOPs and bytes of a plan, and datasheets of the target machines.

FLOPs count a multiply-add as two. Biases, norms, routers, softmax and rotation are negligible and not counted.

Legend: H query heads, G KV heads, d head_dim, r kv_lora_rank, d_r qk_rope_head_dim, T query tokens of one request in
one step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mlaforge.families.spec import LayerSpec, ModelSpec, MoeSpec
from mlaforge.planning.plan import LayerPlan, Plan, tokens_cached

# Share of the tokens selected by a sparse step that the previous step did not select: measured on SmolLM2, 74 of 512 at
# 8,000 tokens and 27 of 256 at 2,000.
NEW_TOKEN_SHARE = 1 / 7


@dataclass(frozen=True)
class Cost:
    """FLOPs computed and bytes read."""

    flops: float
    bytes: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes


def attention_op(
    layer: LayerSpec, chosen: LayerPlan, context: int, batch: int = 1, queries: int = 1, stored: str = "bf16",
    caches_keys: bool = False,
) -> Cost:  # fmt: skip
    """Attention over the cache in one layer and one step, T = `queries` per request, without its projections.

    FLOPs per cached token: gqa T·4·H·d. latent_rope, absorbed: T·(2·H·(r + d_r) + 2·H·r). latent: keys are
    decompressed once, 2·r·G·d, then T·(2·H·d + 2·H·r) for scores and absorbed values. The cache is read once
    per step for any T. A sparse layer reads `topk` tokens; caches_keys: without decompressing again those that the
    previous step read.
    """
    H, G, d = layer.num_heads, layer.num_kv_heads, layer.head_dim
    r, d_r = chosen.kv_lora_rank, chosen.qk_rope_head_dim
    cached = tokens_cached(layer, context)
    read = min(cached, chosen.topk or cached)
    per_token: float
    if chosen.layout == "gqa":
        per_token = queries * 4 * H * d
    elif chosen.layout == "latent":
        decompressed = NEW_TOKEN_SHARE if caches_keys and read < cached else 1.0
        per_token = decompressed * 2 * r * G * d + queries * 2 * H * (d + r)
    else:
        assert chosen.layout == "latent_rope"
        per_token = queries * 2 * H * (2 * r + d_r)
    return Cost(batch * read * per_token, batch * chosen.row_bytes(layer, read, stored))


def index_op(layer: LayerSpec, chosen: LayerPlan, context: int, batch: int = 1) -> Cost:
    """Selection in one sparse layer by one query token of each request: `index` bytes and 2·H·index FLOPs for every
    cached token."""
    cached = tokens_cached(layer, context)
    if not chosen.topk or chosen.topk >= cached:
        return Cost(0.0, 0.0)
    return Cost(batch * cached * 2.0 * layer.num_heads * chosen.index, batch * cached * chosen.index)


def projection_params(spec: ModelSpec, layer: LayerSpec, chosen: LayerPlan) -> int:
    """Parameters of a layer's attention: q_proj, o_proj, and kv_a_proj_with_mqa, kv_b_proj if converted."""
    if chosen.layout == "gqa":
        return spec.layer_params(layer)
    H, G, d = layer.num_heads, layer.num_kv_heads, layer.head_dim
    r, d_r = chosen.kv_lora_rank, chosen.qk_rope_head_dim
    return spec.hidden_size * (H * (d + d_r) + (r + d_r) + H * d) + G * 2 * d * r


def projections(spec: ModelSpec, layer: LayerSpec, chosen: LayerPlan, tokens: int) -> Cost:
    """Attention projections of one layer for `tokens` new tokens, including absorption.

    Absorbed, kv_b_proj is applied per query head: out @ W_uv, and in latent_rope q_nope @ W_uk, are 2·H·d·r FLOPs
    each. In `latent` its key half is part of `attention_op`; its bytes are counted here once.
    """
    params = projection_params(spec, layer, chosen)
    flops = 2.0 * params
    if chosen.layout != "gqa":
        up = layer.num_kv_heads * 2 * layer.head_dim * chosen.kv_lora_rank
        absorbed = 2 * layer.num_heads * layer.head_dim * chosen.kv_lora_rank
        flops += (2 if chosen.layout == "latent_rope" else 1) * absorbed - 2 * up
    return Cost(tokens * flops, params * spec.bits / 8)


def experts_touched(moe: MoeSpec, tokens: int) -> float:
    """Expected number of distinct experts that `tokens` tokens read under independent, uniform routing."""
    return moe.num_experts * (1.0 - (1.0 - moe.top_k / moe.num_experts) ** tokens)


def mlp(layer: LayerSpec, tokens: int) -> Cost:
    """The MLP of one layer, or the experts that `tokens` tokens read."""
    active, read = (layer.moe.top_k, experts_touched(layer.moe, tokens)) if layer.moe else (1, 1.0)
    return Cost(2.0 * layer.mlp_params * active * tokens, read * layer.mlp_params * layer.mlp_bits / 8)


def lm_head(spec: ModelSpec, tokens: int) -> Cost:
    """Logits for every token."""
    params = spec.vocab_size * spec.hidden_size
    return Cost(2.0 * params * tokens, params * spec.bits / 8)


def weight_bytes(plan: Plan) -> float:
    """Bytes of all weights: both embeddings (one if they are tied), projections, every expert."""
    spec = plan.spec
    total = spec.vocab_size * spec.hidden_size * (1 if spec.tie_word_embeddings else 2) * spec.bits / 8
    for layer, chosen in zip(spec.layers, plan.layers, strict=True):
        total += projection_params(spec, layer, chosen) * spec.bits / 8
        total += layer.mlp_params * (layer.moe.num_experts if layer.moe else 1) * layer.mlp_bits / 8
    return total


@dataclass(frozen=True)
class Gpu:
    """A machine. `bf16_tflops` is the dense datasheet figure with fp32 accumulation, never the sparse one.

    bandwidth_tbs: TB/s (1e12 bytes). memory_gib: as the driver reports it. achievable: share of the datasheet's FLOP/s
    that a good matrix product reaches; read: the same of its bandwidth. row_bandwidths: maximum bytes per second at
    which attention reads cached rows, by storage format or layout. coded_products: speed of attention's products over
    coded rows, relative to bf16. caches_keys: keys that a sparse step decompresses are cached for the next one. fp8:
    kernels convert float8_e4m3fn. link_gbs: GB/s (1e9 bytes) at which it sends to the other GPUs of its host. shares:
    share of the roof that kernels reach, by storage format or layout, `index` of a selection, `weights`, and `experts`
    with packed weights.
    """

    name: str
    bf16_tflops: float
    bandwidth_tbs: float
    memory_gib: float
    source: str
    achievable: float = 0.8
    read: float = 1.0
    row_bandwidths: Mapping[str, float] = field(default_factory=dict)
    coded_products: float = 1.0
    caches_keys: bool = False
    fp8: bool = True
    link_gbs: float = 0.0
    shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def flops(self) -> float:
        """Achievable FLOP/s."""
        return self.achievable * self.bf16_tflops * 1e12

    @property
    def bandwidth(self) -> float:
        """Bytes/s."""
        return self.read * self.bandwidth_tbs * 1e12

    @property
    def link(self) -> float:
        """Bytes/s to other GPUs."""
        return self.link_gbs * 1e9

    @property
    def ridge(self) -> float:
        """FLOP per byte at which the limit changes from bandwidth to compute."""
        return self.flops / self.bandwidth

    def with_overrides(self, memory: float | None, bandwidth: float | None) -> Gpu:
        """A copy with another memory size (GiB) or bandwidth (1e9 bytes per second), where given. The speed of products
        and the shares that steps reach are unchanged."""
        overrides = [f"{memory:g} GiB of memory"] if memory else []
        overrides += [f"{bandwidth:g} GB/s"] if bandwidth else []
        source = f"{self.source}; {' and '.join(overrides)} as stated" if overrides else self.source
        speed = bandwidth / 1e3 if bandwidth else self.bandwidth_tbs
        return replace(self, memory_gib=memory or self.memory_gib, bandwidth_tbs=speed, source=source)

    def seconds(self, cost: Cost, rows: str = "") -> float:
        """Roofline: bytes at full bandwidth or FLOPs at the achievable rate, whichever takes longer. rows: key of
        `row_bandwidths` if the bytes are cached rows, and of `shares`."""
        return max(self._read_seconds(cost, rows), self._product_seconds(cost, rows)) / self.shares.get(rows, 1.0)

    def bound(self, cost: Cost, rows: str = "") -> str:
        """Limiting resource: `bandwidth` or `compute`."""
        return "compute" if self._product_seconds(cost, rows) > self._read_seconds(cost, rows) else "bandwidth"

    def _product_seconds(self, cost: Cost, rows: str) -> float:
        return cost.flops / (self.flops * (self.coded_products if rows == "coded" else 1.0))

    def _read_seconds(self, cost: Cost, rows: str) -> float:
        return cost.bytes / min(self.bandwidth, self.row_bandwidths.get(rows, math.inf))


# Predicted shares of an H100's roof at 64 sequences of 32,768 tokens (docs/reference/kernel-times.md; a test compares
# them), none measured. Assumed for other GPUs, and of weights: a copy's share of the bandwidth.
SHARES = {
    "bf16": 0.90, "fp8": 0.90, "int8": 0.90, "latent": 0.57, "latent_rope": 0.73, "coded": 0.65, "index": 0.22,
    "experts": 0.71, "weights": 0.90,
}  # fmt: skip
# Datasheets only; this CPU is measured (machines.py).
GPUS = {
    gpu.name: replace(gpu, shares=SHARES)
    for gpu in (
        Gpu("h200", 989.0, 4.8, 140.4, "NVIDIA H200 SXM datasheet, 141 GB; sparse figure 1979 halved", link_gbs=450),
        Gpu("h100", 989.0, 3.35, 79.6, "NVIDIA H100 SXM datasheet, 80 GB; sparse figure 1979 halved", link_gbs=450),
        Gpu("b200", 2250.0, 8.0, 179.0, "NVIDIA HGX B200 datasheet, 180 of 192 GB; sparse 4500 halved", link_gbs=900),
        Gpu("l40s", 362.0, 0.864, 45.0, "NVIDIA L40S datasheet, 48 GB with ECC; sparse figure 733 halved", link_gbs=32),
        Gpu("a100", 312.0, 2.039, 80.0, "NVIDIA A100 SXM datasheet, 80 GB", fp8=False, link_gbs=300),
        Gpu("rtx5090", 209.5, 1.792, 31.8, "NVIDIA RTX Blackwell whitepaper, 32 GB; fp32 accumulation", link_gbs=64),
    )
}
