"""Configuration of a model converted to multi-head latent attention (MLA).

`<Family>MlaConfig` is the family's transformers config plus the fields below, created on demand from the class name:
`LlamaMlaConfig` extends `LlamaConfig`. Copied into checkpoints; requires only transformers.
"""

import transformers

SUFFIX = "MlaConfig"

# Fields of every <Family>MlaConfig besides the family's own: (type, default). Names from DeepSeek keep their meaning.
# "gqa" layers keep the family's attention and have rank 0.
FIELDS = {
    # Latent rank: one value if all converted layers agree, else the maximum.
    "kv_lora_rank": (int, 0),
    # Rotary key dimensions, shared by all heads; 0 in the `latent` layout.
    "qk_rope_head_dim": (int, 0),
    # Query and key dimensions per head that are scored through the latent.
    "qk_nope_head_dim": (int, 0),
    "v_head_dim": (int, 0),
    # Rank of a factored query projection; None for a single q_proj.
    "q_lora_rank": (int | None, None),
    # Factor of the logits before the softmax. Stored, never derived.
    "softmax_scale": (float | None, None),
    # Per layer: "gqa", "latent" or "latent_rope", and the latent rank.
    "mla_layer_types": (list[str] | None, None),
    "mla_kv_lora_ranks": (list[int] | None, None),
    # Per layer with coded rows: how many coordinates of the latent have at least 1, 2, ... bits (coded_rows_mla.py);
    # empty for other layers.
    "mla_code_counts": (list[list[int]] | None, None),
    # Version of coded rows (coded_layout_mla.py).
    "mla_code_version": (int, 1),
    # Which converted projections have a bias, and whether the softmax has a learned sink per head.
    "mla_q_bias": (bool, False),
    "mla_k_bias": (bool, False),
    "mla_o_bias": (bool, False),
    "mla_sinks": (bool, False),
    # Whether queries and keys are RMS-normed per head before RoPE, as in the source (layout `latent` only).
    "mla_qk_norm": (bool, False),
    # Sparse attention (token_index_mla.py): the kind of index, None for dense attention; tokens per query, and per
    # layer if layers differ; elements of an index key; tokens that are always read: the first `sink`, the last
    # `window`, and every `stride`-th.
    "index_kind": (str | None, None),
    "index_topk": (int | None, None),
    "index_topk_per_layer": (list[int] | None, None),
    "index_head_dim": (int, 0),
    "index_sink": (int, 0),
    "index_window": (int, 0),
    "index_stride": (int, 0),
    # Per layer: "full" has an index, "shared" reuses the selection of the last "full" layer, "dense" reads all tokens.
    "indexer_types": (list[str] | None, None),
}

_classes: dict[str, type] = {}


def __getattr__(name: str) -> type:
    """Return `<Family>MlaConfig`, a subclass of transformers' `<Family>Config`, created on first use (PEP 562)."""
    if not name.endswith(SUFFIX) or name == SUFFIX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _classes:
        base = getattr(transformers, name.removesuffix(SUFFIX) + "Config")
        _classes[name] = type(
            name,
            (base,),
            {
                "__module__": __name__,
                "__doc__": f"{base.__name__} plus the fields of multi-head latent attention.",
                "__annotations__": {field: kind for field, (kind, _) in FIELDS.items()},
                **{field: default for field, (_, default) in FIELDS.items()},
                "model_type": f"{base.model_type}_mla",
                # The family's plans name q/k/v projections that converted layers do not have.
                "base_model_tp_plan": None,
            },
        )
    return _classes[name]
