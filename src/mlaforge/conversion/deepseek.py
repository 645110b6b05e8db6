"""`export deepseek`: a converted checkpoint as a stock DeepseekV3ForCausalLM that computes the same function.

docs/export.md has every step. Legend: H query heads, G KV heads, D head_dim (of the unrotated query and key, and
of the value), R latent rank, E rotary key dimensions, C hidden size.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlaforge.artifact import Manifest, finished, writing
from mlaforge.checkpoint import loading
from mlaforge.checkpoint.converted_config import is_sparse
from mlaforge.checkpoint.reader import Reader
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.checkpoint.writer import rewriting
from mlaforge.conversion.config import ExportConfig
from mlaforge.data import overlap
from mlaforge.families.spec import ModelSpec
from mlaforge.ops.row_formats.plain import Plain, dtype_name
from mlaforge.runtime import UserError, log, progress, resolve_dtype, timed

# Epsilon of the norms on latents: a constant in transformers and in DeepSeek's code, rms_norm_eps in vLLM.
LATENT_EPS = 1e-6
# Error bound of those norms, relative to the latent: below the rounding of fp32.
NORM_ERROR = 2.0**-26
# Relative difference up to which two frequencies are considered equal: formulas round differently.
SAME_FREQUENCY = 1e-6
LAYER = "model.layers.{layer}."
ATTENTION = LAYER + "self_attn."
EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def run(src: Path, out: Path, config: ExportConfig, overwrite: bool = False) -> Manifest:
    """Export SRC, a directory written by `convert`, to the new directory `out` in DeepSeek-V3's format.

    Raises UserError for features that the format lacks; `out` is either complete or untouched.
    """
    source = SourceModel.open(src)
    raw, spec = source.config, source.spec
    if not source.converted:
        raise UserError(
            f"{src} is not a converted model (model type {raw.get('model_type')!r}): run `mlaforge convert MODEL OUT "
            "--deepseek-style` first, then export that OUT"
        )
    refuse(raw, spec)
    assert source.family.attention == ATTENTION, f"{source.family.model_type} names its tensors otherwise"
    dtype = resolve_dtype(config.dtype, source.dtype)
    if dtype == torch.float16:
        raise UserError("float16 cannot represent the small values of this export; pass --dtype bfloat16 or float32")
    rank = config.kv_lora_rank or raw["kv_lora_rank"]
    if rank < raw["kv_lora_rank"]:
        raise UserError(f"kv_lora_rank = {rank} is below the model's {raw['kv_lora_rank']}; only zeros can be added")
    manifest = Manifest(
        "export_deepseek",
        config=dataclasses.asdict(config),
        inputs={"model": {**source.record, "model_type": raw["model_type"]}},
    )
    if done := finished(out, manifest, overwrite, (src,)):
        log(f"{out} is finished already")
        return done
    with Reader(source.path) as reader:
        reader.check(*loading.expected_tensors(raw))
        export = Export(reader, raw, spec, rank, dtype)
        if raw["mla_code_counts"]:
            width = rank + raw["qk_rope_head_dim"]
            log(f"rows are no longer coded: {width} plain elements per token and layer; DeepSeek-V3 has no coded rows")
        for reason in export.vllm_deviations():
            log(f"not for vLLM: {reason} (docs/export.md)")
        with writing(out, manifest) as partial:
            with timed(manifest.seconds, "write"), rewriting(source.path, partial, export.settings) as writer:
                for name, tensor in export.tensors():
                    assert tuple(tensor.shape) == export.shapes.pop(name), f"{name}: {list(tensor.shape)}"
                    writer.add(name, tensor)
                assert not export.shapes, f"{sorted(export.shapes)[0]} was not written"
            if (passages := source.path / overlap.PASSAGES).is_file():
                shutil.copyfile(passages, partial / overlap.PASSAGES)
            row = Plain(spec.num_layers * (rank + raw["qk_rope_head_dim"]), dtype_name(dtype))
            manifest.metrics = {
                "model": {key: export.settings[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "attention_bias")},
                "cache": {"per_token": row.width, "bytes_per_token": row.bytes(1)},
            }
    return manifest


def refuse(raw: dict[str, Any], spec: ModelSpec) -> None:
    """Raises UserError for the first feature in config.json that DeepSeek-V3's format lacks."""
    layouts = raw["mla_layer_types"]
    if raw.get("mla_sinks") or any(layer.sinks for layer in spec.layers):
        raise UserError("the softmax has learned sinks and DeepSeek-V3's has none: this model cannot be exported")
    if any(layer.moe for layer in spec.layers):
        raise UserError("the model is a mixture of experts with another router than DeepSeek-V3's; dense MLPs only")
    if any(layer.qk_norm for layer in spec.layers):
        raise UserError("queries and keys have norms per head and DeepSeek-V3's do not: it cannot be exported")
    for i, layer in enumerate(spec.layers):
        if layer.window is not None:
            raise UserError(
                f"layer {i} has a sliding window of {layer.window} tokens and DeepSeek-V3 has none: this model cannot "
                "be exported"
            )
    if is_sparse(raw):
        raise UserError(
            "the model is sparse and DeepSeek-V3 has no index: convert the original with `mlaforge convert MODEL OUT "
            "--deepseek-style`"
        )
    if "gqa" in layouts:
        raise UserError(
            f"layer {layouts.index('gqa')} has grouped-query attention and DeepSeek-V3 has MLA in every layer: "
            "`mlaforge convert MODEL OUT --deepseek-style --layers all`"
        )
    if "latent" in layouts:
        raise UserError(
            f"layer {layouts.index('latent')} has the layout latent, which rotates keys after decompression, and "
            "DeepSeek-V3 rotates one key beside the latent: `mlaforge convert MODEL OUT --deepseek-style`"
        )
    if raw["mla_q_bias"] and raw["q_lora_rank"] is None:
        raise UserError(
            "queries have a bias and DeepSeek-V3's q_proj has none, but its q_a_proj can: convert with --q-lora-rank "
            f"({raw['hidden_size']}, the hidden size, loses nothing)"
        )


def stock_config(source: Any, raw: dict[str, Any], rank: int, q_rank: int | None, biased: bool) -> dict[str, Any]:
    """Return config.json of the export without dtype: DeepSeek's fields only. source: the configuration of SRC."""
    shared_fields = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
        "max_position_embeddings", "initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id",
        "tie_word_embeddings", "rope_parameters", "attention_dropout",
    )  # fmt: skip
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **{name: getattr(source, name) for name in shared_fields},
        **{name: raw[name] for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")},
        "num_key_value_heads": source.num_attention_heads,
        "kv_lora_rank": rank,
        "q_lora_rank": q_rank,
        "rms_norm_eps": LATENT_EPS,
        # Also in rope_parameters; older readers expect it here.
        "rope_theta": source.rope_parameters["rope_theta"],
        "rope_interleave": True,
        "attention_bias": biased,
        # Every layer is dense, but loaders read the fields of experts.
        "first_k_dense_replace": source.num_hidden_layers,
        "moe_layer_freq": 1,
        "n_routed_experts": 0,
        "n_shared_experts": 0,
        "num_experts_per_tok": 0,
        "moe_intermediate_size": source.intermediate_size,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
    }


def linearizing_exponent(weight: Tensor, bias: Tensor, gain: Tensor, width: int) -> int:
    """Return the exponent k with which RMSNorm(√eps·2^-k·y)·2^k equals y up to NORM_ERROR, for y = weight·x + bias and
    every output x of an RMSNorm with this gain.

    weight [n, C], bias [n], gain [C], fp64; width: that of the norm, at least n.
    """
    largest = float((weight * gain).norm()) * math.sqrt(len(gain)) + float(bias.norm())
    return max(0, math.ceil(math.log2(max(largest, 1e-30) / math.sqrt(2 * width * NORM_ERROR))))


class Export:
    """Tensors of one source in DeepSeek-V3's format, computed layer by layer."""

    def __init__(self, reader: Reader, raw: dict[str, Any], spec: ModelSpec, rank: int, dtype: torch.dtype) -> None:
        """Raises UserError for tensors and rotary frequencies that DeepSeek-V3 does not have."""
        self.reader, self.raw, self.spec, self.rank, self.dtype = reader, raw, spec, rank, dtype
        source = self._config(raw)
        q_rank = raw["q_lora_rank"]
        self.constant_query = q_rank is not None and self._has_bias("q_b_proj.bias")
        self.biased = self.constant_query or any(
            map(self._has_bias, ("kv_a_proj_with_mqa.bias", "o_proj.bias", "kv_b_proj.bias"))
        )
        # A query bias needs one more input of q_b_proj, a constant.
        q_rank = q_rank and q_rank + self.constant_query
        self.settings = stock_config(source, raw, rank, q_rank, self.biased)
        self.settings["dtype"] = str(dtype).removeprefix("torch.")
        with torch.device("meta"):
            source_model: Any = loading.model_class(raw)[1](source)
            export_model: Any = loading.model_class(self.settings)[1](self._config(self.settings))
        self.shapes = {name: tuple(tensor.shape) for name, tensor in export_model.state_dict().items()}
        for name in reader:
            if ".self_attn." not in name and name not in self.shapes:
                raise UserError(f"DeepSeek-V3 has no equivalent of the tensor {name!r}: this model cannot be exported")
        # On the CPU, because frequencies are needed, not only shapes.
        self.source_rope, self.rope = (
            type(model.model.rotary_emb)(model.config) for model in (source_model, export_model)
        )
        self.orders = [self._rotary_order(i) for i in range(spec.num_layers)]
        # DeepSeek's softmax scale follows from its dimensions; the queries are scaled by the quotient.
        self.query_scale = raw["softmax_scale"] / export_model.model.layers[0].self_attn.scaling
        # All norms of the export have the epsilon of the norms on latents, for which the residual stream is scaled.
        self.stream_scale = math.sqrt(LATENT_EPS / source.rms_norm_eps)

    @staticmethod
    def _config(settings: dict[str, Any]) -> Any:
        return loading.model_class(settings)[0](**{k: v for k, v in settings.items() if k != "model_type"})

    def _get(self, layer: int, name: str) -> Tensor | None:
        """Return a tensor of a layer in fp64; None for an absent bias."""
        full_name = LAYER.format(layer=layer) + name
        return self.reader[full_name].double() if full_name in self.reader or not name.endswith(".bias") else None

    def _attention(self, layer: int, name: str, like: Tensor | None = None) -> Tensor:
        stored = self._get(layer, f"self_attn.{name}")
        if stored is None:
            assert like is not None
            return like.new_zeros(len(like))
        return stored

    def _value_bias(self, layer: int) -> Tensor:
        """Return the value bias [G, D]. The key bias shifts all logits of a query equally: without sinks it has no
        effect."""
        bias = self._attention(layer, "kv_b_proj.bias").view(self.spec.layers[layer].num_kv_heads, -1)
        return bias[:, self.raw["qk_nope_head_dim"] :]

    def _has_bias(self, name: str) -> bool:
        """Return whether a bias has an effect in any layer."""
        for layer in range(self.spec.num_layers):
            bias = self._value_bias(layer) if name == "kv_b_proj.bias" else self._get(layer, f"self_attn.{name}")
            if bias is not None and bias.any():
                return True
        return False

    def _rotary_order(self, layer: int) -> Tensor:
        """Return the order of the layer's rotary pairs by DeepSeek's frequencies, [E/2]."""
        index = self.reader[ATTENTION.format(layer=layer) + "rope_index"]
        order = index.argsort(stable=True)
        frequencies, expected = self.source_rope.inv_freq[index[order]], self.rope.inv_freq
        if bool(((frequencies - expected).abs() > SAME_FREQUENCY * expected).any()):
            head, count = self.raw["qk_nope_head_dim"], len(index)
            if index[order].tolist() == list(range(0, head // 2, head // 2 // count)):
                raise UserError(
                    f"RoPE of type {self.spec.rope.kind!r} gives {2 * count} dimensions other frequencies than every "
                    f"{head // 2 // count}th pair of {head}: convert with --deepseek-style --qk-rope-head-dim {head}"
                )
            raise UserError(
                f"the rotary key of layer {layer} has other frequencies than DeepSeek-V3's: convert with "
                "--deepseek-style"
            )
        assert self.source_rope.attention_scaling == self.rope.attention_scaling
        return order

    def vllm_deviations(self) -> Iterator[str]:
        """Yield the reasons why vLLM 0.32 would silently compute another function."""
        if self.biased:
            option = "out --bits" if self.raw["mla_code_counts"] else " --deepseek-style"
            yield f"it drops the attention's biases; convert with{option}, which adds none"
        rope = self.settings["rope_parameters"]
        kind, factor = self.spec.rope.kind, rope.get("factor", 1.0)
        if kind not in ("default", "yarn"):
            yield f"it treats RoPE of type {kind!r} as yarn"
        if kind == "yarn":
            up, down = (0.1 * rope.get(key, default) * math.log(factor) + 1.0 if factor > 1 else 1.0
                        for key, default in (("mscale", 1.0), ("mscale_all_dim", 0.0)))  # fmt: skip
            unscaled = rope.get("attention_factor") == 1.0 and rope.get("mscale_all_dim")
            if unscaled or not math.isclose(up / down, self.rope.attention_scaling, rel_tol=1e-6):
                yield "it ignores yarn's attention_factor"
            if not rope.get("truncate", True):
                yield "it ignores yarn's truncate"

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the export, in its dtype."""
        tied = self.settings["tie_word_embeddings"]
        for name in progress(self.reader, "write weights", len(list(self.reader))):
            if ".self_attn." in name or (tied and name == HEAD):
                continue
            tensor, scale = self.reader[name], 1.0
            if name == EMBEDDING or name.endswith("mlp.down_proj.weight"):
                scale = self.stream_scale
            elif name == FINAL_NORM and tied:
                scale = 1 / self.stream_scale
            # fp32 suffices for one product; an embedding in fp64 would dominate memory.
            tensor = self._cast(tensor if scale == 1.0 else tensor.float() * scale)
            yield name, tensor
            if name == EMBEDDING and tied:
                # vLLM reads the head even if it is tied.
                yield HEAD, tensor.clone()
        for layer in progress(range(self.spec.num_layers), "write attention", self.spec.num_layers):
            gain = self._get(layer, "input_layernorm.weight")
            assert gain is not None
            attention = {**self._queries(layer, gain), **self._latent(layer, gain), **self._output(layer)}
            for name, tensor in attention.items():
                if self.biased or not name.endswith(".bias"):
                    yield ATTENTION.format(layer=layer) + name, self._cast(tensor)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype)

    def _interleaved(self, layer: int) -> Tensor:
        """Return the half-split rows (n, n + E/2) of DeepSeek's rotary pairs (2i, 2i+1), [E]."""
        order = self.orders[layer]
        return torch.stack((order, order + len(order)), dim=1).flatten()

    def _head_order(self, rows: Tensor, layer: int) -> Tensor:
        """Return the rows [H·(D+E), ...] of the queries in DeepSeek's order, multiplied by the softmax scale."""
        D = self.raw["qk_nope_head_dim"]
        index = torch.cat((torch.arange(D), D + self._interleaved(layer)))
        by_head = rows.view(self.spec.layers[layer].num_heads, len(index), *rows.shape[1:])
        return (by_head[:, index] * self.query_scale).reshape(rows.shape)

    def _queries(self, layer: int, gain: Tensor) -> dict[str, Tensor]:
        if self.raw["q_lora_rank"] is None:
            return {"q_proj.weight": self._head_order(self._attention(layer, "q_proj.weight"), layer)}
        down, up = self._attention(layer, "q_a_proj.weight"), self._attention(layer, "q_b_proj.weight")
        up, shift = self._head_order(up, layer), self._head_order(self._attention(layer, "q_b_proj.bias", up), layer)
        constant = down.new_zeros(len(down))
        if self.constant_query:
            down, constant = torch.cat((down, torch.zeros_like(down[:1]))), torch.cat((constant, down.new_ones(1)))
        exponent = linearizing_exponent(down, constant, gain, len(down))
        scale = math.sqrt(LATENT_EPS) * 2.0**-exponent
        if self.constant_query:
            # Divide by the constant as rounded to its dtype.
            stored = float(self._cast(constant[-1] * scale)) / scale
            up = torch.cat((up, shift[:, None] / stored), dim=1)
        return {
            "q_a_proj.weight": down * scale,
            "q_a_proj.bias": constant * scale,
            "q_a_layernorm.weight": torch.full_like(constant, 2.0**exponent),
            "q_b_proj.weight": up,
        }

    def _latent(self, layer: int, gain: Tensor) -> dict[str, Tensor]:
        """Return the tensors of the latent, padded to the rank of all layers and scaled so that its norm is linear.
        Coded rows keep the units of their code, which both projections contain."""
        R, E = self.raw["mla_kv_lora_ranks"][layer], self.raw["qk_rope_head_dim"]
        padding = self.rank - R
        down = self._attention(layer, "kv_a_proj_with_mqa.weight")
        shift = self._attention(layer, "kv_a_proj_with_mqa.bias", down)
        exponent = linearizing_exponent(down[:R], shift[:R], gain, self.rank)
        scale, rotary = math.sqrt(LATENT_EPS) * 2.0**-exponent, R + self._interleaved(layer)

        def rows(tensor: Tensor) -> Tensor:
            return torch.cat((tensor[:R] * scale, tensor.new_zeros(padding, *tensor.shape[1:]), tensor[rotary]))

        assert len(rotary) == E
        spec = self.spec.layers[layer]
        up = self._attention(layer, "kv_b_proj.weight").view(spec.num_kv_heads, -1, R)
        up = up.repeat_interleave(spec.group, dim=0).reshape(-1, R)
        return {
            "kv_a_proj_with_mqa.weight": rows(down),
            "kv_a_proj_with_mqa.bias": rows(shift),
            "kv_a_layernorm.weight": torch.full((self.rank,), 2.0**exponent, dtype=torch.float64),
            "kv_b_proj.weight": torch.nn.functional.pad(up, (0, padding)),
        }

    def _output(self, layer: int) -> dict[str, Tensor]:
        """Attention weights sum to 1, so that the value bias passes through and is added to o_proj's bias."""
        weight = self._attention(layer, "o_proj.weight")
        value = self._value_bias(layer).repeat_interleave(self.spec.layers[layer].group, dim=0)
        bias = self._attention(layer, "o_proj.bias", weight) + weight @ value.flatten()
        return {"o_proj.weight": weight * self.stream_scale, "o_proj.bias": bias * self.stream_scale}
