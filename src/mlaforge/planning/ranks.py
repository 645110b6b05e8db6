"""What one of several GPUs holds, computes and exchanges of a model: tensor and context parallelism, as vLLM has them.

Tensor parallelism N divides query heads, the KV heads that they read (N at most their number: beyond it they are
replicated), the width of MLPs and experts, and the vocabulary. A latent and an index key have no heads: every rank
holds them. Context parallelism M, a divisor of N, forms groups of M ranks that attend with the heads of all of them,
token i on rank i mod M: rows of every kind are divided by M, but for those of a sliding window, which stay as they are.

Legend: H query heads, G KV heads, d head_dim, r kv_lora_rank, d_r qk_rope_head_dim, N and M as above.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from mlaforge.families.spec import LayerSpec, ModelSpec
from mlaforge.planning.costs import Cost, lm_head, mlp, projections, weight_bytes
from mlaforge.planning.plan import LayerPlan, Plan, tokens_cached
from mlaforge.runtime import UserError

# Bytes of an exchanged activation: bf16.
ACTIVATION_BYTES = 2


@dataclass(frozen=True)
class Ranks:
    """The GPUs of one replica: `tensor` of them (N), in groups of `context` (M) that divide the tokens."""

    tensor: int = 1
    context: int = 1

    @property
    def label(self) -> str:
        return f"TP {self.tensor}" + (f", CP {self.context}" if self.context > 1 else "")

    def refusal(self, spec: ModelSpec) -> str:
        """Why a model cannot be divided like this; empty if it can."""
        N, M = self.tensor, self.context
        if N % M:
            return f"context_parallel {M} must divide tensor_parallel {N}: M of the N GPUs divide the tokens"
        if M > 1 and all(layer.window for layer in spec.layers):
            return f"context_parallel {M} divides no tokens, because every layer has a sliding window"
        for layer in spec.layers:
            H, G = layer.num_heads, layer.num_kv_heads
            if H % N or any(G % groups and groups % G for groups in (N, N // M)):
                return f"{H} query and {G} KV heads cannot be divided among {self.label}"
        return ""

    def check(self, spec: ModelSpec) -> None:
        """Raise UserError for a division that the model does not allow."""
        if reason := self.refusal(spec):
            raise UserError(f"{reason}; of 8 GPUs: {'; '.join(ranks.label for ranks in divisions(spec, 8))}")

    def tokens(self, count: int, layer: LayerSpec | None = None) -> int:
        """Tokens of a request that the fullest rank holds, in a layer without a window if none is given."""
        return count if layer is not None and layer.window else -(-count // self.context)

    def cache_bytes(self, plan: Plan, context: int, batch: int = 1) -> int:
        """Bytes of a rank's cache of `batch` requests of `context` tokens."""
        share = self.share(plan)
        return batch * sum(
            chosen.cached_bytes(layer, tokens_cached(layer, self.tokens(context, layer)), share.stored_as(chosen))
            for chosen, layer in zip(share.layers, share.spec.layers, strict=True)
        )

    def share(self, plan: Plan) -> Plan:
        """What a rank caches, and attends over with `tokens` of a context."""
        if self == ONE_GPU:
            return plan
        layers = tuple(self._cached(layer) for layer in plan.spec.layers)
        chosen = tuple(dataclasses.replace(layer, topk=self.tokens(layer.topk)) for layer in plan.layers)
        return dataclasses.replace(plan, spec=dataclasses.replace(plan.spec, layers=layers), layers=chosen)

    def projections(self, spec: ModelSpec, layer: LayerSpec, chosen: LayerPlan, tokens: int) -> Cost:
        """Attention projections of a rank's heads. In a group every rank has the keys of all its heads: projected where
        they are cached, decompressed in the layout `latent`."""
        rank_heads = self._heads(layer, self.tensor)
        cost = projections(spec, rank_heads, chosen, tokens)
        others = self._cached(layer).num_kv_heads - rank_heads.num_kv_heads
        if chosen.layout == "gqa":
            params = others * 2 * spec.hidden_size * layer.head_dim
            return cost + Cost(2.0 * params * tokens, params * spec.bits / 8)
        params = others * layer.head_dim * chosen.kv_lora_rank if chosen.layout == "latent" else 0
        return cost + Cost(0.0, params * spec.bits / 8)

    def mlp(self, layer: LayerSpec, tokens: int) -> Cost:
        return self._part(mlp(layer, tokens))

    def lm_head(self, spec: ModelSpec, tokens: int) -> Cost:
        return self._part(lm_head(spec, tokens))

    def weight_bytes(self, plan: Plan) -> float:
        """Bytes of a rank's weights."""
        layers = list(zip(plan.spec.layers, plan.layers, strict=True))
        attention = sum(projections(plan.spec, layer, chosen, 1).bytes for layer, chosen in layers)
        divided = (weight_bytes(plan) - attention) / self.tensor
        return divided + sum(self.projections(plan.spec, layer, chosen, 1).bytes for layer, chosen in layers)

    def exchanged_bytes(self, plan: Plan, tokens: int) -> float:
        """Bytes that a rank sends in a step of `tokens` query tokens: hidden states are summed over N ranks after the
        embedding, attention and MLP of a layer, logits are gathered, and in a group queries are gathered and outputs
        summed. Selections are not counted."""
        spec, N, M = plan.spec, self.tensor, self.context
        numbers = 2 * (N - 1) / N * spec.hidden_size * (1 + 2 * spec.num_layers) + (N - 1) / N * spec.vocab_size
        for layer, chosen in zip(spec.layers, plan.layers, strict=True):
            queries = values = layer.head_dim
            if chosen.layout != "gqa":
                values = chosen.kv_lora_rank
            if chosen.layout == "latent_rope":
                queries = chosen.kv_lora_rank + chosen.qk_rope_head_dim
            if not layer.window:
                numbers += (M - 1) * layer.num_heads / N * (queries + values)
        return tokens * numbers * ACTIVATION_BYTES

    def _part(self, cost: Cost) -> Cost:
        return Cost(cost.flops / self.tensor, cost.bytes / self.tensor)

    def _cached(self, layer: LayerSpec) -> LayerSpec:
        """The heads that a rank attends with and caches."""
        return self._heads(layer, self.tensor if layer.window else self.tensor // self.context)

    def _heads(self, layer: LayerSpec, parts: int) -> LayerSpec:
        """The heads of one of so many parts."""
        heads, kv_heads = layer.num_heads // parts, layer.num_kv_heads // min(parts, layer.num_kv_heads)
        return dataclasses.replace(layer, num_heads=heads, num_kv_heads=kv_heads)


ONE_GPU = Ranks()


def divisions(spec: ModelSpec, gpus: int) -> Iterator[Ranks]:
    """Yield every way to divide a model among a part of so many GPUs, all parts alike."""
    for tensor in range(1, gpus + 1):
        for context in range(1, tensor + 1):
            ranks = Ranks(tensor, context)
            if gpus % tensor == 0 and tensor % context == 0 and not ranks.refusal(spec):
                yield ranks
