"""GGUF files as Hugging Face models: config.json from the header, tensors dequantised under transformers' names.

Every header key that affects the computation, and every tensor, is mapped or refused by its name. Keys and tensor names
are those of llama.cpp (gguf-py/gguf/constants.py, convert_hf_to_gguf.py).
"""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlaforge import families
from mlaforge.runtime import UserError, install

# Header key below the architecture's name -> field of config.json.
SIZES = {
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}  # fmt: skip
# Optional keys; and keys with the one value that has no effect, of which other values are refused (NEUTRAL).
OPTIONAL = {"attention.head_count_kv", "attention.key_length", "rope.freq_base", "vocab_size"}
SCALING = {
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "rope.scale_linear", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}  # fmt: skip
NEUTRAL = {
    "expert_count": 0, "expert_used_count": 0, "attention.causal": True, "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0, "rope.scaling.yarn_ext_factor": 1.0, "attention.sliding_window": 0,
    "attention.max_alibi_bias": 0.0, "attention.clamp_kqv": 0.0, "logit_scale": 1.0, "residual_scale": 1.0,
    "embedding_scale": 1.0, "use_parallel_residual": False, "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0, "leading_dense_block_count": 0, "pooling_type": 0,
}  # fmt: skip
# Keys about the file, not about the model.
OTHER = ("general.", "tokenizer.", "quantize.", "split.", "GGUF.", "adapter.")
LAYER = {
    "attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight", "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight", "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias", "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias", "attn_output.bias": "self_attn.o_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight", "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight", "ffn_gate.bias": "mlp.gate_proj.bias", "ffn_up.bias": "mlp.up_proj.bias",
    "ffn_down.bias": "mlp.down_proj.bias",
}  # fmt: skip
WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}  # fmt: skip
# Divisors of the RoPE frequencies, which llama.cpp writes for RoPE of type llama3 (convert_hf_to_gguf.py).
FREQUENCY_FACTORS = "rope_freqs.weight"
LLAMA3: dict[str, float] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Errors that gguf raises for truncated or damaged files.
DAMAGED = (ValueError, LookupError, OSError, RuntimeError, TypeError, OverflowError, struct.error)


class GgufModel:
    """An open GGUF file. `config`: its config.json; `names`: transformers' name of a tensor -> its name in the file."""

    def __init__(self, path: Path):
        """Read the header. Raises UserError for a damaged file, for one of several parts, and for an unsupported
        architecture, key or tensor."""
        try:
            import gguf
        except ImportError as error:
            raise UserError(f"reading .gguf files needs gguf: {install('gguf')}") from error
        self.path = path
        try:
            reader = gguf.GGUFReader(path)
            self.keys = {name: field.contents() for name, field in reader.fields.items()}
            self.stored = {tensor.name: tensor for tensor in reader.tensors}
        except DAMAGED as error:
            raise UserError(f"{path} cannot be read as GGUF: {' '.join(str(error).split())[:200]}") from error
        parts = self.keys.get("split.count", 1)
        if parts > 1:
            raise UserError(
                f"{path} is part {self.keys.get('split.no', 0) + 1} of {parts}; join them first "
                "(gguf-split --merge FIRST_PART OUT)"
            )
        self.architecture = str(self.keys.get("general.architecture"))
        readable = {family.gguf: family for family in families.families().values() if family.gguf}
        if self.architecture not in readable:
            raise UserError(
                f"{path} has the architecture {self.architecture!r}; of GGUF files {', '.join(readable)} are read; "
                "give the model's safetensors directory"
            )
        self.family = readable[self.architecture]
        self.names = {self._name(name): name for name in self.stored if name != FREQUENCY_FACTORS}
        self.config = self._config()
        self._check_shapes()

    def _error(self, message: str) -> UserError:
        return UserError(f"{self.path}: {message}")

    def _name(self, name: str) -> str:
        """Return transformers' name of a tensor."""
        layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if layer and layer[2] in LAYER:
            return f"model.layers.{layer[1]}.{LAYER[layer[2]]}"
        if name not in WHOLE:
            raise self._error(f"the tensor {name!r} is not read; give the model's safetensors directory")
        return WHOLE[name]

    def _config(self) -> dict[str, Any]:
        """Return config.json. Every header key that affects the computation is in it, or refused."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        prefix = f"{self.architecture}."
        keys = {name.removeprefix(prefix): value for name, value in self.keys.items() if name.startswith(prefix)}
        others = [name for name in self.keys if not name.startswith((prefix, *OTHER))]
        if others:
            raise self._error(f"the header key {others[0]!r} is not known")
        for key in SIZES:
            if key not in keys:
                raise self._error(f"the header has no {prefix + key!r}")
        heads = keys["attention.head_count"]
        if not isinstance(heads, int) or heads < 1:
            raise self._error(f"the header's {prefix}attention.head_count = {heads!r} is not a number of heads")
        head_dim = keys.get("attention.key_length", keys["embedding_length"] // heads)
        fixed = {"attention.value_length": head_dim, "rope.dimension_count": head_dim}
        for key, value in keys.items():
            neutral = fixed[key] if key in fixed else NEUTRAL.get(key)
            if key in SIZES or key in OPTIONAL or key in SCALING or (neutral is not None and value == neutral):
                continue
            hint = f"; {neutral!r} is" if neutral is not None else ""
            raise self._error(f"the header's {prefix + key} = {value!r} is not supported{hint}")
        embedding = self.stored.get("token_embd.weight")
        if embedding is None:
            raise self._error("there is no tensor 'token_embd.weight'")
        return {
            "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.family.model_type]],
            "model_type": self.family.model_type,
            **{field: keys[key] for key, field in SIZES.items()},
            "num_key_value_heads": keys.get("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "vocab_size": int(embedding.shape[-1]),
            "rope_parameters": self._rope(keys, head_dim),
            "tie_word_embeddings": "output.weight" not in self.stored,
            # Flags that only some families have.
            **({"attention_bias": True} if "blk.0.attn_output.bias" in self.stored else {}),
            **({"mlp_bias": True} if "blk.0.ffn_up.bias" in self.stored else {}),
            **{
                field: self.keys[f"tokenizer.ggml.{field}"]
                for field in ("bos_token_id", "eos_token_id")
                if f"tokenizer.ggml.{field}" in self.keys
            },
            "dtype": "float32",
        }

    def _rope(self, keys: dict[str, Any], head_dim: int) -> dict[str, Any]:
        """Return `rope_parameters` of config.json."""
        theta = float(keys.get("rope.freq_base", 10000.0))
        kind, factor = keys.get("rope.scaling.type", "none"), float(keys.get("rope.scaling.factor", 1.0))
        if "rope.scale_linear" in keys:
            kind, factor = "linear", float(keys["rope.scale_linear"])
        if FREQUENCY_FACTORS in self.stored:
            if kind != "none":
                raise self._error(f"it has both {FREQUENCY_FACTORS} and RoPE scaling of type {kind!r}")
            return self._llama3(theta, head_dim)
        if kind == "none" or (kind == "linear" and factor == 1.0):
            return {"rope_type": "default", "rope_theta": theta}
        if kind == "linear":
            return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
        if kind != "yarn":
            raise self._error(f"RoPE scaling of type {kind!r} is not supported; none, linear and yarn are")
        if "rope.scaling.original_context_length" not in keys:
            raise self._error("RoPE scaling of type yarn has no rope.scaling.original_context_length")
        return {
            "rope_type": "yarn", "rope_theta": theta, "factor": factor,
            "original_max_position_embeddings": keys["rope.scaling.original_context_length"],
            "beta_fast": float(keys.get("rope.scaling.yarn_beta_fast", 32.0)),
            "beta_slow": float(keys.get("rope.scaling.yarn_beta_slow", 1.0)),
        }  # fmt: skip

    def _llama3(self, theta: float, head_dim: int) -> dict[str, Any]:
        """Return RoPE parameters of type llama3 that reproduce the stored divisors; the factor is the largest of
        them."""
        divisors = self.values(FREQUENCY_FACTORS).double()
        factor = float(divisors.max())
        low, high, original = (float(LLAMA3[name]) for name in LLAMA3)
        frequencies = torch.pow(theta, -torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        wave = 2 * math.pi / frequencies
        smooth = ((original / wave - low) / (high - low)).clamp(0, 1)
        expected = 1 / (smooth + (1 - smooth) / factor)
        if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-3):
            raise self._error(f"{FREQUENCY_FACTORS} is not that of RoPE of type llama3 with {LLAMA3}")
        return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **LLAMA3}

    def values(self, name: str) -> Tensor:
        """Return a stored tensor in fp32. Raises UserError for a type that gguf cannot dequantise."""
        import gguf

        stored = self.stored[name]
        try:
            values = gguf.dequantize(stored.data, stored.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise self._error(f"{name!r} is stored as {stored.tensor_type.name}, which gguf does not read") from error
        return torch.from_numpy(np.array(values, np.float32)).reshape(self._shape(name))

    def _shape(self, name: str) -> tuple[int, ...]:
        # GGUF lists the fastest dimension first.
        return tuple(int(size) for size in reversed(self.stored[name].shape))

    def _check_shapes(self) -> None:
        """Raises UserError for the first tensor that is missing, unexpected or of a wrong shape."""
        shapes = {name: self._shape(stored) for name, stored in self.names.items()}
        expected = self._expected()
        for name, shape in expected.items():
            if name not in shapes:
                raise self._error(
                    f"the file lacks the tensor {name!r} of a {self.architecture} model: it is incomplete"
                )
            if shapes[name] != shape:
                raise self._error(f"{name!r} has shape {list(shapes[name])}, the header calls for {list(shape)}")
        for name in shapes.keys() - expected.keys():
            raise self._error(f"the file has {self.names[name]!r}, which a {self.architecture} model does not have")

    def _expected(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the tensors that the config requires."""
        config = self.config
        C, I, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]  # noqa: E741
        D = config["head_dim"]
        q, kv = config["num_attention_heads"] * D, config["num_key_value_heads"] * D
        layer = {
            "input_layernorm.weight": (C,), "post_attention_layernorm.weight": (C,),
            "self_attn.q_proj.weight": (q, C), "self_attn.k_proj.weight": (kv, C), "self_attn.v_proj.weight": (kv, C),
            "self_attn.o_proj.weight": (C, q), "mlp.gate_proj.weight": (I, C), "mlp.up_proj.weight": (I, C),
            "mlp.down_proj.weight": (C, I),
        }  # fmt: skip
        spec = families.read_spec(config).layers[0]
        biases = {"q": (spec.q_bias, q), "k": (spec.k_bias, kv), "v": (spec.v_bias, kv), "o": (spec.o_bias, C)}
        layer |= {f"self_attn.{name}_proj.bias": (size,) for name, (biased, size) in biases.items() if biased}
        if config.get("mlp_bias"):
            layer |= {"mlp.gate_proj.bias": (I,), "mlp.up_proj.bias": (I,), "mlp.down_proj.bias": (C,)}
        if spec.qk_norm:
            layer |= {"self_attn.q_norm.weight": (D,), "self_attn.k_norm.weight": (D,)}
        model = {"model.embed_tokens.weight": (V, C), "model.norm.weight": (C,)}
        if not config["tie_word_embeddings"]:
            model["lm_head.weight"] = (V, C)
        layers = range(config["num_hidden_layers"])
        return model | {f"model.layers.{i}.{name}": shape for i in layers for name, shape in layer.items()}

    def tensor(self, name: str) -> Tensor:
        """Return a tensor by transformers' name, fp32, in transformers' order of rows: RoPE rotates row i of a head
        with row i + head_dim / 2."""
        values = self.values(self.names[name])
        kind = re.search(r"self_attn\.(q|k)_proj\.", name)
        if not (self.family.gguf_pairs and kind):
            return values
        heads = self.config["num_attention_heads" if kind[1] == "q" else "num_key_value_heads"]
        return values.view(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape).contiguous()
