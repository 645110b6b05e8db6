"""Model classes by name: `<Family>MlaForCausalLM` is vLLM's `<Family>ForCausalLM` with attention replaced.

vLLM's classes provide embedding, norms, MLP, experts, head, their weights, tensor parallelism and the hidden states
that draft heads read (`aux_hidden_states`). No family is named here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from vllm import ModelRegistry
from vllm.model_executor.layers.attention import Attention as StockAttention
from vllm.platforms import current_platform

from mlaforge import families
from mlaforge.runtime import UserError
from mlaforge.vllm_plugin import SUFFIX
from mlaforge.vllm_plugin.attention import OP, Attentions
from mlaforge.vllm_plugin.experts import unpacked

_classes: dict[str, type] = {}


def refuse(vllm_config: Any) -> None:
    """Raise UserError, with the reason, for configurations that cannot be served."""
    config, parallel = vllm_config.model_config.hf_config, vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise UserError("converted models do not support pipeline parallelism: all layers share one cache")
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise UserError(
            "converted models do not support --prefill-context-parallel-size: use --decode-context-parallel-size"
        )
    if (transfer := vllm_config.kv_transfer_config) is not None:
        raise UserError(
            f"KV connector {transfer.kv_connector} is not supported: it would read a row, which holds the bytes of all "
            "layers, as keys and values; leave out --kv-transfer-config and --kv-offloading-size"
        )
    model_dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    if (kind := vllm_config.cache_config.cache_dtype) not in ("auto", model_dtype):
        raise UserError(
            f"--kv-cache-dtype {kind} is not supported: rows are cached as the model was converted; use auto"
        )
    size, heads = parallel.tensor_parallel_size, config.num_attention_heads
    kv_heads, groups = config.num_key_value_heads, size // parallel.decode_context_parallel_size
    if heads % size or any(kv_heads % parts and parts % kv_heads for parts in (size, groups)):
        raise UserError(f"{heads} query and {kv_heads} KV heads are not divisible among {size} tensor parallel ranks")
    family = families.family_of({"model_type": config.model_type.removesuffix("_mla")})
    for name, value in family.fixed.items():
        configured = getattr(config, name, None)
        if configured is not None and not math.isclose(configured, value, rel_tol=1e-6):
            raise UserError(f"{name} = {configured}: vLLM always uses {value} for this family")


@contextmanager
def _without_windows(config: Any) -> Iterator[None]:
    """Hide sliding windows while vLLM builds its layers: its classes reject some patterns, and their attention is
    replaced anyway."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        config.layer_types = ["full_attention"] * len(kinds)
    try:
        yield
    finally:
        if kinds is not None:
            config.layer_types = kinds


def _replace(model: Any, attentions: Attentions, context: dict[str, Any]) -> None:
    """Replace the attention of every decoder layer, and remove the original layers' caches from vLLM's context."""
    for index, layer in enumerate(model.layers):
        [name] = [n for n, part in layer.named_children() if any(isinstance(m, StockAttention) for m in part.modules())]
        for part in getattr(layer, name).modules():
            if isinstance(part, StockAttention):
                del context[part.layer_name]
        setattr(layer, name, attentions.layer(index))


def _make(name: str) -> type:
    stock = f"{name.removesuffix(SUFFIX)}ForCausalLM"
    if stock not in ModelRegistry.models:
        raise UserError(
            f"this version of vLLM lacks {stock}, the base class of the converted model: use `mlaforge serve`"
        )
    original = ModelRegistry.models[stock].load_model_cls()

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        refuse(vllm_config)
        if vllm_config.parallel_config.decode_context_parallel_size > 1 and current_platform.is_cpu():
            from mlaforge.vllm_plugin.cpu_shards import register

            register()
        with _without_windows(vllm_config.model_config.hf_config):
            original.__init__(self, vllm_config=vllm_config, prefix=prefix)
        compilation = vllm_config.compilation_config
        # None if vLLM itself handles the checkpoint's quantization.
        self.unpacks = vllm_config.model_config.dtype if vllm_config.quant_config is None else None
        self.attentions = Attentions(vllm_config, prefix=f"{prefix}.model" if prefix else "model")
        _replace(self.model, self.attentions, compilation.static_forward_context)
        # Split CUDA graphs at this attention op, if vLLM splits at attention.
        if compilation.splitting_ops and f"vllm::{OP}" not in compilation.splitting_ops:
            compilation.splitting_ops.append(f"vllm::{OP}")

    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        weights = _others(self, weights)
        loaded: set[str] = original.load_weights(self, unpacked(weights, self.unpacks) if self.unpacks else weights)
        self.attentions.finish()
        return loaded

    doc = f"vLLM's {original.__name__} with latent attention."
    # LoRA needs vLLM's own projections, and pipeline parallelism more than one cache.
    flags = {"supports_lora": False, "supports_pp": False}
    body = {"__module__": __name__, "__doc__": doc, "__init__": __init__, "load_weights": load_weights, **flags}
    return type(name, (original,), body)


def _others(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights except attention's. Adds lm_head.weight if the checkpoint ties it and vLLM's class does not."""
    embedding, has_head = None, False
    for name, tensor in weights:
        if model.attentions.take(name, tensor):
            continue
        embedding = tensor if name == "model.embed_tokens.weight" else embedding
        has_head = has_head or name == "lm_head.weight"
        yield name, tensor
    tied = any(parameter is model.lm_head.weight for parameter in model.model.parameters())
    if embedding is not None and not has_head and not tied:
        yield "lm_head.weight", embedding


def __getattr__(name: str) -> type:
    """Return `<Family>MlaForCausalLM`, created on first use (PEP 562)."""
    if not name.endswith(SUFFIX) or name == SUFFIX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _classes:
        _classes[name] = _make(name)
    return _classes[name]
