"""Models with multi-head latent attention: transformers' models with another `self_attn`.

`<Family>MlaModel` and `<Family>MlaForCausalLM` are created on demand from the class name (`LlamaMlaForCausalLM` extends
`LlamaForCausalLM`), so no model file is copied and no family is named here. This file is copied into checkpoints, where
`AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)` finds it.
"""

from typing import Any

import transformers

# The remote-code loader copies only the siblings that this entry file imports itself.
from . import configuration_mla as _configuration
from .attention_mla import attend
from .coded_layout_mla import CodedLayout
from .coded_rows_mla import CodedRows
from .configuration_mla import FIELDS
from .latent_attention_mla import LatentAttention
from .rope_mla import RotationTable
from .sparse_attention_mla import SparseAttention
from .token_index_mla import Sparsity

__all__ = [
    "FIELDS", "CodedLayout", "CodedRows", "LatentAttention", "SparseAttention", "Sparsity", "attend",
    "use_latent_attention",
]  # fmt: skip

_classes: dict[str, type] = {}


def use_latent_attention(model: Any) -> None:
    """Replace `self_attn` of every converted or sparse layer of a decoder (`model.layers`, `model.rotary_emb`) in
    place. Sets `model.sparsity`, the state that sparse layers share; None for dense attention."""
    config: Any = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    table = RotationTable(model.rotary_emb, head_dim // 2)
    sparsity = Sparsity(config) if config.index_kind else None
    model.sparsity = sparsity
    for index, layer in enumerate(model.layers):
        if config.mla_layer_types[index] != "gqa":
            layer.self_attn = LatentAttention(config, index, table, sparsity)
        elif sparsity is not None and config.indexer_types[index] != "dense":
            layer.self_attn = SparseAttention(layer.self_attn, config, index, sparsity)


def _make(name: str, family: str, kind: str) -> type:
    config_class = getattr(_configuration, f"{family}MlaConfig")
    base = getattr(transformers, family + kind)
    shared = {
        "__module__": __name__,
        "config_class": config_class,
        "config": None,
        # Flash and flex attention require equal key and value dimensions.
        "_supports_flash_attn": False,
        "_supports_flex_attn": False,
    }

    if kind == "Model":

        def __init__(self: Any, config: Any) -> None:
            base.__init__(self, config)
            use_latent_attention(self)
            self.post_init()
    else:
        model_class = __getattr__(f"{family}MlaModel")

        def __init__(self: Any, config: Any) -> None:
            base.__init__(self, config)
            self.model = model_class(config)
            self.post_init()

    return type(name, (base,), {**shared, "__init__": __init__, "__doc__": f"{base.__name__} with latent attention."})


def __getattr__(name: str) -> type:
    """Return `<Family>MlaForCausalLM` or `<Family>MlaModel`, created on first use (PEP 562)."""
    for kind in ("ForCausalLM", "Model"):
        family = name.removesuffix(f"Mla{kind}")
        if family and family != name and not name.startswith("_"):
            if name not in _classes:
                _classes[name] = _make(name, family, kind)
            return _classes[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
