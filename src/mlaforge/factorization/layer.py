"""A converted layer: its weights, config and attention module."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from mlaforge.checkpoint import loading
from mlaforge.checkpoint.converted_config import SUFFIX
from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.factorization.latent import Latent
from mlaforge.modeling import configuration_mla, modeling_mla
from mlaforge.modeling.coded_layout_mla import VERSION
from mlaforge.planning.plan import Plan


@dataclasses.dataclass
class LayerWeights:
    """The tensors of one converted attention module by LatentAttention's parameter names."""

    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, latent: Latent, attention: dict[str, Tensor]) -> LayerWeights:
        """Return the weights of a latent. attention: tensors of the layer's GQA module, at least those of
        `retained_modules`."""
        tensors: dict[str, Tensor | None] = {
            "kv_a_proj_with_mqa.weight": latent.kv_a,
            "kv_a_proj_with_mqa.bias": latent.b_kv_a,
            "kv_b_proj.weight": latent.kv_b,
            "kv_b_proj.bias": latent.b_kv_b,
            "rope_index": latent.rope_index,
        }
        if latent.w_q is not None:
            query = "q_proj" if latent.q_a is None else "q_b_proj"
            tensors |= {"q_a_proj.weight": latent.q_a, f"{query}.weight": latent.w_q, f"{query}.bias": latent.b_q}
        retained = retained_modules(latent)
        tensors |= {name: tensor for name, tensor in attention.items() if name.split(".")[0] in retained}
        return cls({name: tensor.detach().cpu() for name, tensor in tensors.items() if tensor is not None})


def retained_modules(latent: Latent) -> tuple[str, ...]:
    """Return the modules that a converted layer retains from GQA: o_proj, sinks and norms, and q_proj unless the latent
    has a query projection."""
    retained = ("o_proj", "sinks", "q_norm", "k_norm")
    return retained if latent.w_q is not None else (*retained, "q_proj")


def mla_classes(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json that name the classes of a converted model; `raw`: its original's
    config.json."""
    config_class, causal_lm = loading.model_class(raw)
    prefix = causal_lm.__name__.removesuffix("ForCausalLM")
    return {
        # The type of the class that computes the model, which some families share.
        "model_type": config_class.model_type + SUFFIX,
        "architectures": [f"{prefix}MlaForCausalLM"],
        "auto_map": {
            "AutoConfig": f"configuration_mla.{prefix}MlaConfig",
            "AutoModel": f"modeling_mla.{prefix}MlaModel",
            "AutoModelForCausalLM": f"modeling_mla.{prefix}MlaForCausalLM",
        },
    }


def mla_config(source: SourceModel, plan: Plan, q_lora_rank: int | None, o_bias: bool) -> dict[str, Any]:
    """Return config.json of the converted model: the source's with the changed type and the MLA fields."""
    raw, spec = source.config, source.spec
    layer = spec.layers[plan.converted[0]]
    chosen = [plan.layers[i] for i in plan.converted]
    return {
        **{k: v for k, v in raw.items() if k not in ("_name_or_path", "transformers_version")},
        **mla_classes(raw),
        "kv_lora_rank": max(part.kv_lora_rank for part in chosen),
        "qk_rope_head_dim": chosen[0].qk_rope_head_dim,
        "qk_nope_head_dim": layer.head_dim,
        "v_head_dim": layer.head_dim,
        "q_lora_rank": q_lora_rank,
        "softmax_scale": spec.softmax_scale,
        "mla_layer_types": [part.layout for part in plan.layers],
        "mla_kv_lora_ranks": [part.kv_lora_rank for part in plan.layers],
        "mla_code_counts": [list(part.code) for part in plan.layers] if any(part.code for part in chosen) else None,
        **({"mla_code_version": VERSION} if any(part.code for part in chosen) else {}),
        # A factored query has a bias even if the source has none: it makes the mean input exact.
        "mla_q_bias": layer.q_bias or q_lora_rank is not None,
        "mla_k_bias": layer.k_bias,
        "mla_o_bias": layer.o_bias or o_bias,
        "mla_sinks": layer.sinks,
        "mla_qk_norm": layer.qk_norm,
    }


def _fitted(module: nn.Module, weights: LayerWeights, where: str) -> dict[str, Tensor]:
    """Return the state dict of `module`, with zeros for a missing bias; a bias that `module` lacks must be zero."""
    fitted = {}
    for name, parameter in module.state_dict().items():
        tensor = weights.tensors.get(name)
        if tensor is None:
            assert name == "o_proj.bias", f"{where}{name} was not solved"
            tensor = torch.zeros(parameter.shape)
        assert tensor.shape == parameter.shape, f"{where}{name}: {list(tensor.shape)}, not {list(parameter.shape)}"
        fitted[name] = tensor
    for name, tensor in weights.tensors.items():
        assert name in fitted or not tensor.any(), f"{where}{name} would be lost"
    return fitted


def attention_module(stream: LayerStream, settings: dict[str, Any], index: int, weights: LayerWeights) -> Any:
    """Return a LatentAttention with these weights for layer `index` of the original's stream."""
    config_class = getattr(configuration_mla, settings["auto_map"]["AutoConfig"].split(".")[1])
    config = config_class(**{k: v for k, v in settings.items() if k not in ("model_type", "quantization_config")})
    config._attn_implementation = stream.config._attn_implementation
    table = modeling_mla.RotationTable(stream.decoder.rotary_emb, settings["qk_nope_head_dim"] // 2)
    module = modeling_mla.LatentAttention(config, index, table)
    module.load_state_dict(_fitted(module, weights, f"layer {index}: "))
    return module.to(device=stream.device, dtype=stream.dtype).eval().requires_grad_(False)
