"""The plan: the layout of each layer, and its cached elements and bytes (costs.py has FLOPs and machines).

Ratios count K and V: the base of every fraction is 2 · n_kv_heads · head_dim elements per token and layer.

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
from mlaforge.ops.row_formats import row_format, row_format_type, row_format_types
from mlaforge.ops.row_formats.format import RowFormat
from mlaforge.runtime import UserError

LATENT_LAYOUTS = ("latent", "latent_rope")
# Ranks from a budget are multiples of this, so that vector loads and tensor cores need no padding.
RANK_MULTIPLE = 8
DEFAULT_ROPE_DIM = 64
SMALLER_KEY = "use a smaller qk_rope_head_dim"
DEFAULT_BITS, DEFAULT_BUDGET = 4.0, 0.5
# Storage formats of uncoded rows: the engine's kv_cache_dtype, whose auto is one of these or `coded`.
STORED = tuple(
    name for type in row_format_types().values() if not type.coded for name in (*type.compute_names, *type.names)
)


@dataclass(frozen=True)
class LayerPlan:
    """Target of one layer. layout: `gqa` (unchanged), `latent` or `latent_rope`.

    kv_lora_rank: width r of the latent. qk_rope_head_dim: width d_r of the rotary key shared by all heads, 0 except in
    `latent_rope`. code: number of the latent's coordinates with at least 1, 2, ... bits (modeling/coded_rows_mla.py),
    empty for uncoded rows. topk: tokens that a generated token reads in a sparse layer, 0 for all. index: bytes of the
    index key per token, 0 if the layer uses another layer's selection.
    """

    layout: str
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    code: tuple[int, ...] = ()
    topk: int = 0
    index: int = 0

    def cached(self, layer: LayerSpec) -> int:
        """Cached elements per token: 2 · n_kv_heads · head_dim, r, or r + d_r."""
        return layer.cached if self.layout == "gqa" else self.kv_lora_rank + self.qk_rope_head_dim

    def cached_bytes(self, layer: LayerSpec, tokens: int, stored: str) -> int:
        """Cache bytes of `tokens` tokens of a request: rows and index keys."""
        return self.row_bytes(layer, tokens, stored) + tokens * self.index

    def row_bytes(self, layer: LayerSpec, tokens: int, stored: str) -> int:
        """Bytes of the rows of `tokens` tokens, including scales."""
        return self.rows(layer, stored).bytes(tokens)

    def rows(self, layer: LayerSpec, stored: str) -> RowFormat:
        """Format of the rows. stored: one of STORED, or `coded` if the layer has a code."""
        if self.layout == "gqa":
            groups = (layer.head_dim,) * (2 * layer.num_kv_heads)
            stored = "bf16" if row_format_type(stored).latent_rope_only else stored
        else:
            groups = (self.kv_lora_rank, *([self.qk_rope_head_dim] if self.qk_rope_head_dim else []))
        return row_format(stored, groups, counts=self.code)


@dataclass(frozen=True)
class Plan:
    """One LayerPlan per layer of `spec`. stored: one of STORED, or `coded`; layers without a code then have rows of the
    format `plain`, the model's compute dtype. Raise UserError for an unsupported combination."""

    spec: ModelSpec
    layers: tuple[LayerPlan, ...]
    stored: str = "bf16"
    plain: str = "bf16"

    def __post_init__(self) -> None:
        assert len(self.layers) == self.spec.num_layers
        format = row_format_type(self.stored)
        if format.grouped_query_only and self.converted:
            raise UserError(f"kv_cache_dtype {self.stored} is for grouped-query layers; converted ones can be int8")
        # Rows in a compute dtype are what coded rows decode to.
        plain = self.stored in ("bf16", *format.compute_names)
        if any(layer.code for layer in self.layers) and not (format.coded or plain):
            raise UserError(f"kv_cache_dtype {self.stored} is not for coded rows: use auto, coded or bf16")

    @property
    def cached(self) -> tuple[int, ...]:
        """Cached elements per token of every layer."""
        return tuple(chosen.cached(layer) for chosen, layer in zip(self.layers, self.spec.layers, strict=True))

    @property
    def cached_per_token(self) -> int:
        """Cached elements of a token that is inside the window of every layer."""
        return sum(self.cached)

    @property
    def converted(self) -> tuple[int, ...]:
        """Indices of the layers that do not stay GQA."""
        return tuple(i for i, chosen in enumerate(self.layers) if chosen.layout != "gqa")

    @property
    def converted_fraction(self) -> float:
        """Bytes per token of the converted layers over GQA's, at 16 bits per element unless coded; 1.0 if no layer is
        converted."""
        stored, layers = "coded" if self.stored == "coded" else "bf16", self.spec.layers
        gqa_bytes = sum(2 * layers[i].cached for i in self.converted)
        cached_bytes = sum(self.layers[i].cached_bytes(layers[i], 1, stored) for i in self.converted)
        return cached_bytes / gqa_bytes if gqa_bytes else 1.0

    @property
    def bits(self) -> float:
        """Mean stored bits of the converted layers (of all if none is) per element that GQA caches there."""
        layers = [(self.layers[i], self.spec.layers[i]) for i in self.converted or range(self.spec.num_layers)]
        stored = sum(chosen.rows(layer, self.stored_as(chosen)).bytes_per_token for chosen, layer in layers)
        return 8 * stored / sum(layer.cached for _, layer in layers)

    def model_fraction(self, context: int) -> float:
        """Cache bytes of the whole model over its GQA cache at `context` tokens; windows count in both."""
        stored = self.stored_as(LayerPlan("gqa"))
        return self.cache_bytes(context) / unconverted(self.spec, stored).cache_bytes(context)

    def stored_as(self, chosen: LayerPlan) -> str:
        """Storage format of the rows of such a layer."""
        return self.stored if self.stored != "coded" or chosen.code else self.plain

    def cache_bytes(self, context: int, batch: int = 1) -> int:
        """Bytes of the cache of `batch` requests of `context` tokens each.

        A layer with a sliding window holds at most `window` tokens, converted or not.
        """
        return batch * sum(
            chosen.cached_bytes(layer, tokens_cached(layer, context), self.stored_as(chosen))
            for chosen, layer in zip(self.layers, self.spec.layers, strict=True)
        )


def plan_of(config: Mapping[str, Any], spec: ModelSpec) -> Plan:
    """Plan of an original or converted model from its config.json. spec: that of the original."""
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


def tokens_cached(layer: LayerSpec, context: int) -> int:
    """Tokens of a request that a layer caches."""
    return context if layer.window is None else min(context, layer.window)


def unconverted(spec: ModelSpec, stored: str = "bf16") -> Plan:
    """Plan without any converted layer."""
    return Plan(spec, (LayerPlan("gqa"),) * spec.num_layers, stored)


def rank_limit(spec: ModelSpec, layer: LayerSpec, layout: str) -> int:
    """Largest useful kv_lora_rank: the rank of [W_k; W_v], min(2 · n_kv_heads · head_dim, hidden_size); 0 for `gqa`."""
    return 0 if layout == "gqa" else min(layer.cached, spec.hidden_size)


class BudgetTooSmall(UserError):
    """A budget leaves no room for the latent. reason: the rest of the sentence; minimum: the smallest sufficient
    budget, above 1 if there is none."""

    def __init__(self, budget: float, reason: str, minimum: float):
        advice = f"use a budget of at least {minimum}" if minimum <= 1 else SMALLER_KEY
        super().__init__(f"budget {budget} {reason}; {advice}")
        self.reason, self.minimum = reason, minimum


def resolve_bits_or_budget(
    layout: str, bits: float | None, budget: float | None, ranked: bool
) -> tuple[float | None, float | None]:
    """Return (bits of coded rows, budget of plain rows) with the default if both are None: `latent` is coded unless its
    ranks are given (`ranked`)."""
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
    """Plan with equal ranks for every layer selected by `layers`; the others stay GQA.

    budget: in (0, 1], fraction of those layers' GQA cache (K and V) that the plan may use; ranks are rounded down to a
    multiple of 8, and 1.0 removes nothing. kv_lora_rank: replaces the budget. layers: `all`, `full` (those without a
    sliding window), `auto` (full if the model has both kinds, else all) or a list such as `0,2,5-9`.
    Raise UserError for ranks that a layer does not support; the options check the range of `budget` and `layout`.
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


def select_layers(spec: ModelSpec, layers: str) -> set[int]:
    """Layer indices of `auto`, `all`, `full` or a list such as `0,2,5-9`; never empty. Raise UserError otherwise."""
    text, last = layers.strip(), spec.num_layers - 1
    full = {i for i, layer in enumerate(spec.layers) if layer.window is None}
    if text == "all" or (text == "auto" and not full):
        return set(range(spec.num_layers))
    if text in ("full", "auto"):
        if not full:
            raise UserError(
                "layers 'full' selects none: all layers have a sliding window; use 'all' or a list such as '0,2,5-9'"
            )
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
        # At most half of a small budget is rotary, as the latent carries the other key dimensions and the values.
        half = DEFAULT_ROPE_DIM if kv_lora_rank is not None else max(2, int(budget * layer.cached + 1e-9) // 2)
        default = layer.cached // 2 if lossless else min(DEFAULT_ROPE_DIM, half)
        rope = _rope_dim(layer, index, default, qk_rope_head_dim)
        # With every key dimension in the rotary part, the latent carries the values only.
        rank = min(layer.cached // 2, limit) if lossless and qk_rope_head_dim is None else kv_lora_rank
    if rank is None:
        # 1e-9: a product such as 0.7 · 640 is slightly below the intended integer.
        room = int(budget * layer.cached + 1e-9) - rope
        if room < RANK_MULTIPLE:
            # Half of a larger budget may be rotary too: 6 elements of 14.
            required = RANK_MULTIPLE + (RANK_MULTIPLE - 2 if rope and qk_rope_head_dim is None else rope)
            rotary = f" less {rope} of the rotary key (qk_rope_head_dim)" if rope else ""
            reason = (
                f"of layer {index}'s {layer.cached} cached elements{rotary} leaves {max(room, 0)} for the latent, at "
                f"least {RANK_MULTIPLE} are needed"
            )
            raise BudgetTooSmall(budget, reason, math.ceil(required / layer.cached * 1e4) / 1e4)
        rank = min(room // RANK_MULTIPLE * RANK_MULTIPLE, limit)
    return LayerPlan(layout, rank, rope)


def _rope_dim(layer: LayerSpec, index: int, default: int, qk_rope_head_dim: int | None) -> int:
    """d_r: an even number of at most n_kv_heads · head_dim dimensions."""
    limit = layer.cached // 2
    if qk_rope_head_dim is None:
        return min(default, limit) // 2 * 2
    if qk_rope_head_dim % 2 or not 2 <= qk_rope_head_dim <= limit:
        raise UserError(
            f"qk_rope_head_dim {qk_rope_head_dim} must be even, positive and at most {limit} for layer {index} "
            f"({layer.num_kv_heads} KV heads · {layer.head_dim})"
        )
    return qk_rope_head_dim


CONTEXTS = (8192, 32768, 131072)


def window_choices(plan: Plan) -> dict[str, dict[int, int]]:
    """Cache bytes of one request by converted layers (`gqa`: none, `full`, `all`) and context: those of CONTEXTS that
    the model supports, else its maximum. Layers are converted like the first converted one of `plan`. Empty for a model
    whose layers all have a window or all have none."""
    spec, chosen = plan.spec, plan.layers[plan.converted[0]]
    windows = [layer.window is not None for layer in spec.layers]
    if len(set(windows)) == 1:
        return {}
    gqa, windowed = LayerPlan("gqa"), dataclasses.replace(chosen, topk=0, index=0)
    layers = {
        "gqa": (gqa,) * spec.num_layers,
        "full": tuple(gqa if window else chosen for window in windows),
        "all": tuple(windowed if window else chosen for window in windows),
    }
    plans = {name: Plan(spec, choice, plan.stored) for name, choice in layers.items()}
    max_context = spec.max_position_embeddings
    contexts = [tokens for tokens in CONTEXTS if tokens <= max_context] or [max_context]
    return {name: {tokens: choice.cache_bytes(tokens) for tokens in contexts} for name, choice in plans.items()}
