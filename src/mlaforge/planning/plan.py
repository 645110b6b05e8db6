"""The plan: what each layer becomes, and how many numbers and bytes it then caches (costs.py has FLOPs and machines).

Ratios count K and V: the base of every fraction is 2 · n_kv_heads · head_dim numbers per token and layer.

Legend: d_r qk_rope_head_dim.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlaforge.config import nearest
from mlaforge.families.spec import LayerSpec, ModelSpec
from mlaforge.runtime import UserError

LATENT_LAYOUTS = ("latent", "latent_rope")
# A budget becomes a rank that is a multiple of this: what vector loads and tensor cores take without padding.
RANK_MULTIPLE = 8
DEFAULT_ROPE_DIM = 64
SMALLER_KEY = "use a smaller qk_rope_head_dim"
DEFAULT_BITS, DEFAULT_BUDGET = 4.0, 0.5
# Numbers of an index key, a byte each.
DEFAULT_INDEX = 32
# Bytes of a number in cached rows that are plain.
ITEMSIZES = {"fp32": 4, "bf16": 2, "fp8": 1}
# How the cache can store its rows: the engine's kv_cache_dtype, whose auto is one of these or `coded`.
STORED = (*ITEMSIZES, "int8", "int4")
# Tokens that int4 packs together; every other format packs each alone.
PACKED = 32
# Bits between the first and the last number of a coded layer, had all of them some (measured on SmolLM2).
BITS_FALL = 11.6
LARGEST_CODE = 11


@dataclass(frozen=True)
class LayerPlan:
    """What one layer becomes: `gqa` (it stays as it is), `latent` or `latent_rope`.

    `kv_lora_rank` is the latent's width r; `qk_rope_head_dim` the width d_r of the rotary key that all heads
    share, 0 but in `latent_rope`. `code` is how many of the latent's numbers have at least 1, 2, ... bits
    (modeling/coded_rows_mla.py), empty where rows are not coded. In a sparse layer a generated token reads `topk`
    tokens (0: all), and every token has an index key of `index` bytes, 0 where another layer's selection is read.
    """

    layout: str
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    code: tuple[int, ...] = ()
    topk: int = 0
    index: int = 0

    def cached(self, layer: LayerSpec) -> int:
        """Numbers in the cache per token: 2 · n_kv_heads · head_dim, r, or r + d_r."""
        return layer.cached if self.layout == "gqa" else self.kv_lora_rank + self.qk_rope_head_dim

    def cached_bytes(self, layer: LayerSpec, tokens: int, stored: str) -> int:
        """Bytes of so many tokens of a request in the cache: their rows and index keys."""
        return self.row_bytes(layer, tokens, stored) + tokens * self.index

    def row_bytes(self, layer: LayerSpec, tokens: int, stored: str) -> int:
        """Of rows alone, scales among them: ops/row_format.py, without torch. `stored` is of STORED, or coded where the
        layer has a code."""
        numbers = self.cached(layer)
        if stored == "int8":
            scales = 2 * layer.num_kv_heads if self.layout == "gqa" else 1 + (self.qk_rope_head_dim > 0)
            return tokens * (numbers + numbers % 2 + 2 * scales)
        if stored == "int4":
            # The newest tokens are packed when they are so many.
            packed, rest = divmod(tokens, PACKED)
            return packed * (16 * numbers + 2 * numbers + 128 * layer.num_kv_heads) + rest * 2 * numbers
        if stored == "coded":
            return tokens * self.coded_bytes
        return tokens * numbers * ITEMSIZES[stored]

    @property
    def coded_bytes(self) -> int:
        """Of a coded row."""
        planes, rotary = sum(self.code) // 8, self.qk_rope_head_dim
        return planes + ((planes + rotary) % 2 + rotary + 2 if rotary else 0)


@dataclass(frozen=True)
class Plan:
    """One LayerPlan per layer of `spec`. `stored` is of STORED, or coded: then layers without a code have `plain` rows,
    as the model computes in. Raises UserError where a layer cannot be."""

    spec: ModelSpec
    layers: tuple[LayerPlan, ...]
    stored: str = "bf16"
    plain: str = "bf16"

    def __post_init__(self) -> None:
        assert len(self.layers) == self.spec.num_layers and self.stored in (*STORED, "coded")
        if self.stored == "int4" and self.converted:
            raise UserError("kv_cache_dtype int4 is for grouped-query layers; converted ones can be int8")
        if any(layer.code for layer in self.layers) and self.stored not in ("coded", "bf16", "fp32"):
            raise UserError(f"kv_cache_dtype {self.stored} is not for coded rows: use auto, coded or bf16")

    @property
    def cached(self) -> tuple[int, ...]:
        """Cached numbers per token of every layer."""
        return tuple(chosen.cached(layer) for chosen, layer in zip(self.layers, self.spec.layers, strict=True))

    @property
    def cached_per_token(self) -> int:
        """Cached numbers of a token that every layer still holds."""
        return sum(self.cached)

    @property
    def converted(self) -> tuple[int, ...]:
        """Indices of the layers that do not stay GQA."""
        return tuple(i for i, chosen in enumerate(self.layers) if chosen.layout != "gqa")

    @property
    def converted_fraction(self) -> float:
        """What a token caches in the converted layers over what GQA caches there, numbers of 16 bits unless they are
        coded; 1.0 where none is."""
        stored, layers = "coded" if self.stored == "coded" else "bf16", self.spec.layers
        before = sum(2 * layers[i].cached for i in self.converted)
        return (
            sum(self.layers[i].cached_bytes(layers[i], 1, stored) for i in self.converted) / before if before else 1.0
        )

    @property
    def bits(self) -> float:
        """What rows of the converted layers (all where none is) store of each number that GQA caches there, in the
        mean."""
        layers = [(self.layers[i], self.spec.layers[i]) for i in self.converted or range(self.spec.num_layers)]
        stored = sum(chosen.row_bytes(layer, PACKED, self.stored_as(chosen)) for chosen, layer in layers) / PACKED
        return 8 * stored / sum(layer.cached for _, layer in layers)

    def model_fraction(self, context: int) -> float:
        """Cache of the whole model over its GQA cache at `context` tokens; windows count in both."""
        stored = self.stored_as(LayerPlan("gqa"))
        return self.cache_bytes(context) / unconverted(self.spec, stored).cache_bytes(context)

    def stored_as(self, chosen: LayerPlan) -> str:
        """How the rows of such a layer are stored."""
        return self.stored if self.stored != "coded" or chosen.code else self.plain

    def cache_bytes(self, context: int, batch: int = 1) -> int:
        """Bytes of the cache of `batch` requests of `context` tokens each.

        A layer with a sliding window holds at most `window` tokens, converted or not.
        """
        return batch * sum(
            chosen.cached_bytes(layer, tokens_held(layer, context), self.stored_as(chosen))
            for chosen, layer in zip(self.layers, self.spec.layers, strict=True)
        )


def plan_of(config: Mapping[str, Any], spec: ModelSpec) -> Plan:
    """What the layers of a model are, original or converted, from its config.json; `spec` is the original's."""
    layers, codes = [], config.get("mla_code_counts") or [[]] * spec.num_layers
    sparse = config.get("indexer_types") or ["dense"] * spec.num_layers
    reads = config.get("index_topk_per_layer") or [config.get("index_topk")] * spec.num_layers
    for index, kind in enumerate(config.get("mla_layer_types") or ["gqa"] * spec.num_layers):
        rope = config["qk_rope_head_dim"] if kind == "latent_rope" else 0
        rank = 0 if kind == "gqa" else config["mla_kv_lora_ranks"][index]
        topk = reads[index] if sparse[index] != "dense" else 0
        width = config["index_head_dim"] if sparse[index] == "full" else 0
        layers.append(LayerPlan(kind, rank, rope, tuple(codes[index]), topk, width))
    return Plan(spec, tuple(layers), "coded" if any(codes) else "bf16")


def plain(itemsize: int) -> str:
    """How plain rows of a dtype with so many bytes are called."""
    return next(name for name, size in ITEMSIZES.items() if size == itemsize)


def tokens_held(layer: LayerSpec, context: int) -> int:
    """Tokens of a request that a layer keeps."""
    return context if layer.window is None else min(context, layer.window)


def unconverted(spec: ModelSpec, stored: str = "bf16") -> Plan:
    """The plan that changes nothing."""
    return Plan(spec, (LayerPlan("gqa"),) * spec.num_layers, stored)


def sparse(plan: Plan, topk: int) -> Plan:
    """The same, and a generated token reads `topk` tokens in every layer without a window. Raises UserError where there
    is none."""
    if all(layer.window is not None for layer in plan.spec.layers):
        raise UserError("all layers slide: there is nothing to make sparse")
    layers = (
        dataclasses.replace(chosen, topk=topk, index=DEFAULT_INDEX) if layer.window is None else chosen
        for chosen, layer in zip(plan.layers, plan.spec.layers, strict=True)
    )
    return dataclasses.replace(plan, layers=tuple(layers))


def rank_limit(spec: ModelSpec, layer: LayerSpec, layout: str) -> int:
    """The largest useful kv_lora_rank: the rank of [W_k; W_v], min(2 · n_kv_heads · head_dim, hidden_size).

    0 for `gqa`, which has no latent.
    """
    return 0 if layout == "gqa" else min(layer.cached, spec.hidden_size)


class BudgetTooSmall(UserError):
    """`why` it is, and the `least` that is not, above 1 where none is."""

    def __init__(self, budget: float, why: str, least: float):
        advice = f"use a budget of at least {least}" if least <= 1 else SMALLER_KEY
        super().__init__(f"budget {budget} {why}; {advice}")
        self.why, self.least = why, least


def left_open(layout: str, bits: float | None, budget: float | None, ranked: bool) -> tuple[float | None, float | None]:
    """Bits of coded rows or the budget of plain ones, one of them None, where a user says neither: `latent` is coded
    unless its ranks are said otherwise (`ranked`)."""
    if bits is None and budget is None:
        return (DEFAULT_BITS, None) if layout == "latent" and not ranked else (None, DEFAULT_BUDGET)
    return bits, budget


def make_plan(
    spec: ModelSpec,
    budget: float = DEFAULT_BUDGET,
    layout: str = "latent",
    layers: str = "all",
    kv_lora_rank: int | None = None,
    qk_rope_head_dim: int | None = None,
    stored: str = "bf16",
) -> Plan:
    """The same ranks for every layer that `layers` names; the others stay GQA.

    `budget` in (0, 1] is the fraction of those layers' GQA cache (K and V) that the plan may use; ranks are
    rounded down to a multiple of 8, and at 1.0 nothing is removed. `kv_lora_rank` takes the budget's place.
    `layers` is `all`, `full` (those without a sliding window), `auto` (full where a model has both kinds, else all)
    or a list such as `0,2,5-9`.
    Raises UserError for ranks that a layer cannot hold; the range of `budget` and `layout` is the options' to check.
    """
    assert 0.0 < budget <= 1.0 and layout in LATENT_LAYOUTS, (budget, layout)
    if layout == "latent" and qk_rope_head_dim:
        raise UserError(
            f"qk_rope_head_dim {qk_rope_head_dim} does not fit layout latent, which caches no rotary key; "
            "leave it out or use layout latent_rope"
        )
    chosen = select_layers(spec, layers)
    return Plan(
        spec,
        tuple(
            _layer_plan(spec, index, budget, layout, kv_lora_rank, qk_rope_head_dim)
            if index in chosen
            else LayerPlan("gqa")
            for index in range(spec.num_layers)
        ),
        stored,
    )


def foreseen_code(numbers: int, bits: int) -> tuple[int, ...]:
    """LayerPlan.code as it will be like: `bits` in all for at most so many numbers. How many of them are left, and the
    bits of each, is a guess that calibration will replace."""
    blocks = numbers // 8
    widths = [0] * blocks
    for _ in range(bits // 8):
        open_ones = [i for i in range(blocks) if widths[i] < LARGEST_CODE]
        if open_ones:
            widths[min(open_ones, key=lambda i: widths[i] + BITS_FALL * i / blocks)] += 1
    return tuple(8 * sum(width > bit for width in widths) for bit in range(max(widths)))


def coded_shape(
    spec: ModelSpec, bits: float, layout: str, layers: str = "all", qk_rope_head_dim: int | None = None
) -> Plan:
    """The plan at the budget whose rotary key suits rows of so many bits: its numbers have 8 each. Ranks follow from
    the bits. Raises UserError for too few of them."""
    try:
        return make_plan(spec, min(bits / 8, 0.99), layout, layers, None, qk_rope_head_dim)
    except BudgetTooSmall as error:
        least = math.ceil(800 * error.least) / 100
        advice = f"use at least {least:g}" if least <= 8 else SMALLER_KEY
        raise UserError(f"bits = {bits:g}, as a budget {bits / 8:g} {error.why}; {advice}") from None


def coded_plan(spec: ModelSpec, bits: float, layout: str, layers: str, qk_rope_head_dim: int | None = None) -> Plan:
    """As make_plan, with rows of `bits` a number in the mean, of what GQA caches."""
    plan = coded_shape(spec, bits, layout, layers, qk_rope_head_dim)
    chosen = list(plan.layers)
    for i in plan.converted:
        rotary, layer = chosen[i].qk_rope_head_dim, spec.layers[i]
        left = int(bits * layer.cached) - (8 * rotary + 24 if rotary else 0)
        code = foreseen_code(rank_limit(spec, layer, layout), left)
        chosen[i] = LayerPlan(layout, code[0], rotary, code)
    return Plan(spec, tuple(chosen), "coded")


def select_layers(spec: ModelSpec, layers: str) -> set[int]:
    """Layer indices of `auto`, `all`, `full` or a list such as `0,2,5-9`; never empty. Raises UserError."""
    text, last = layers.strip(), spec.num_layers - 1
    full = {i for i, layer in enumerate(spec.layers) if layer.window is None}
    if text == "all" or (text == "auto" and not full):
        return set(range(spec.num_layers))
    if text in ("full", "auto"):
        if not full:
            raise UserError("layers 'full' selects none: all layers slide; use 'all' or a list such as '0,2,5-9'")
        return full
    if not text:
        raise UserError(f"layers {layers!r} selects none; use 'all', 'full' or a list such as '0,2,5-9'")
    chosen: set[int] = set()
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", item, re.ASCII)
        if not match:
            raise UserError(
                f"layers {layers!r}: {item.strip()!r} is not a layer or a range; use 'all', 'full' or a list "
                f"such as '0,2,5-9'{nearest(text, ('all', 'full'))}"
            )
        first = int(match[1])
        end = first if match[2] is None else int(match[2])
        if end < first:
            raise UserError(f"layers {layers!r}: range {item.strip()!r} runs backwards; write {end}-{first}")
        if end > last:
            raise UserError(f"layers {layers!r}: layer {end} does not exist; the model has layers 0-{last}")
        chosen.update(range(first, end + 1))
    return chosen


def _layer_plan(
    spec: ModelSpec,
    index: int,
    budget: float,
    layout: str,
    kv_lora_rank: int | None,
    qk_rope_head_dim: int | None,
) -> LayerPlan:
    layer = spec.layers[index]
    limit = rank_limit(spec, layer, layout)
    if layout == "latent_rope" and layer.qk_norm:
        raise UserError(
            f"layer {index} cannot become latent_rope: its key norm sits between projection and rotation and spans "
            "the whole head, so no rotary key can be split off and keys cannot be absorbed; use layout latent"
        )
    if kv_lora_rank is not None and not 1 <= kv_lora_rank <= limit:
        raise UserError(
            f"kv_lora_rank {kv_lora_rank} must be 1 to {limit} for layer {index}: min(2 · "
            f"{layer.num_kv_heads} KV heads · {layer.head_dim}, hidden size {spec.hidden_size})"
        )
    lossless = budget == 1.0 and kv_lora_rank is None
    if layout == "latent":
        rope = 0
        rank = limit if lossless else kv_lora_rank
    else:
        # At most half of a small budget turns; the latent has the keys' rest and the values to carry.
        half = DEFAULT_ROPE_DIM if kv_lora_rank is not None else max(2, int(budget * layer.cached + 1e-9) // 2)
        default = layer.cached // 2 if lossless else min(DEFAULT_ROPE_DIM, half)
        rope = _rope_dim(layer, index, default, qk_rope_head_dim)
        # With every key in the rotary part, the latent carries the values alone.
        rank = min(layer.cached // 2, limit) if lossless and qk_rope_head_dim is None else kv_lora_rank
    if rank is None:
        # The small term: a product such as 0.7 · 640 falls just short of the integer it means.
        room = int(budget * layer.cached + 1e-9) - rope
        if room < RANK_MULTIPLE:
            # Half of a larger budget may turn too: 6 numbers of 14.
            needed = RANK_MULTIPLE + (RANK_MULTIPLE - 2 if rope and qk_rope_head_dim is None else rope)
            taken = f" less {rope} of the rotary key (qk_rope_head_dim)" if rope else ""
            why = (
                f"of layer {index}'s {layer.cached} cached numbers{taken} leaves {max(room, 0)} for the latent, at "
                f"least {RANK_MULTIPLE} are needed"
            )
            raise BudgetTooSmall(budget, why, math.ceil(needed / layer.cached * 1e4) / 1e4)
        rank = min(room // RANK_MULTIPLE * RANK_MULTIPLE, limit)
    return LayerPlan(layout, rank, rope)


def _rope_dim(layer: LayerSpec, index: int, default: int, qk_rope_head_dim: int | None) -> int:
    """d_r, at most what the layer's keys have: n_kv_heads · head_dim dimensions, in pairs."""
    most = layer.cached // 2
    if qk_rope_head_dim is None:
        return min(default, most) // 2 * 2
    if qk_rope_head_dim % 2 or not 2 <= qk_rope_head_dim <= most:
        raise UserError(
            f"qk_rope_head_dim {qk_rope_head_dim} must be even, positive and at most {most} for layer {index} "
            f"({layer.num_kv_heads} KV heads · {layer.head_dim})"
        )
    return qk_rope_head_dim


CONTEXTS = (8192, 32768, 131072)


def window_choices(plan: Plan) -> dict[str, dict[int, int]]:
    """Cache bytes of one request at those of CONTEXTS that the model was made for (its longest where none is) for GQA,
    for `full` and for `all` layers converted as `plan` converts its first one; empty for a model whose layers do not
    differ in their window."""
    spec, chosen = plan.spec, plan.layers[plan.converted[0]]
    windows = [layer.window is not None for layer in spec.layers]
    if len(set(windows)) == 1:
        return {}
    gqa = LayerPlan("gqa")
    layers = {
        "gqa": (gqa,) * spec.num_layers,
        "full": tuple(gqa if window else chosen for window in windows),
        "all": (chosen,) * spec.num_layers,
    }
    plans = {name: Plan(spec, each, plan.stored) for name, each in layers.items()}
    most = spec.max_position_embeddings
    contexts = [tokens for tokens in CONTEXTS if tokens <= most] or [most]
    return {name: {tokens: each.cache_bytes(tokens) for tokens in contexts} for name, each in plans.items()}
