"""Configuration of a model whose attention was converted to multi-head latent attention (MLA).

`<Family>MlaConfig` is the family's own transformers config plus the fields below, made on demand from the class
name: `LlamaMlaConfig` extends `LlamaConfig`. This file is copied into checkpoints; it needs only transformers.
"""

import transformers

SUFFIX = "MlaConfig"

# Fields that every <Family>MlaConfig has beside its family's own; (type, default). The DeepSeek names mean what
# they mean there. "gqa" layers keep the family's attention and have rank 0.
FIELDS = {
    # Latent rank of a token: one number where all converted layers agree, else their maximum.
    "kv_lora_rank": (int, 0),
    # Rotary key dimensions of a token shared by all heads; 0 in the `latent` layout.
    "qk_rope_head_dim": (int, 0),
    # Query and key dimensions per head that are scored through the latent.
    "qk_nope_head_dim": (int, 0),
    "v_head_dim": (int, 0),
    # Rank of a factored query projection; None keeps one q_proj.
    "q_lora_rank": (int | None, None),
    # Multiplies the logits before the softmax. Stored, never derived.
    "softmax_scale": (float | None, None),
    # Per layer: "gqa", "latent" or "latent_rope", and the latent rank.
    "mla_layer_types": (list[str] | None, None),
    "mla_kv_lora_ranks": (list[int] | None, None),
    # Per layer, where rows are coded: how many numbers of the latent have at least 1, 2, ... bits (coded_rows_mla.py);
    # empty where they are not.
    "mla_code_counts": (list[list[int]] | None, None),
    # Which converted projections carry a bias, and whether the softmax has a learned sink per head.
    "mla_q_bias": (bool, False),
    "mla_k_bias": (bool, False),
    "mla_o_bias": (bool, False),
    "mla_sinks": (bool, False),
    # Whether queries and keys are RMS-normed per head before RoPE, as in the source (layout `latent` only).
    "mla_qk_norm": (bool, False),
    # Sparse attention (token_index_mla.py): the kind of the index, None where all attention is dense; tokens that a
    # query reads, and per layer where layers differ; numbers of an index key; which tokens are read in any case: the
    # first, the newest, and the first of every so many.
    "index_kind": (str | None, None),
    "index_topk": (int | None, None),
    "index_topk_per_layer": (list[int] | None, None),
    "index_head_dim": (int, 0),
    "index_sink": (int, 0),
    "index_window": (int, 0),
    "index_stride": (int, 0),
    # Per layer: "full" has an index, "shared" reads what the last layer before it that has one chose, "dense" all.
    "indexer_types": (list[str] | None, None),
}

_classes: dict[str, type] = {}


def __getattr__(name: str) -> type:
    """`<Family>MlaConfig`, subclass of transformers' `<Family>Config` (PEP 562: made once, on first use)."""
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
