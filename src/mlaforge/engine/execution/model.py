"""The model on the paged cache, loaded from a model directory: the same classes, built on the meta device, loaded
strictly one layer at a time, with the attention and the MLP of each layer replaced by the engine's.

Legend: N tokens, C hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.engine.execution.attention import PagedAttention, Step
from mlaforge.engine.execution.linear import QUANTIZED, PackedLinear, bfloat16_unit, vocabulary_head
from mlaforge.engine.execution.mlp import Mlp, make_mlp
from mlaforge.engine.execution.weight_bytes import weight_bytes
from mlaforge.modeling.eagle3 import AFTER_NORM
from mlaforge.ops import native
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.dispatch import prefers_triton
from mlaforge.ops.elementwise import ADD_RMS_NORM, RMS_NORM
from mlaforge.runtime import log, progress, resolve_dtype

# The last line on standard error when a weight file is truncated during use; the exit code is 2.
SHRUNK = (
    "mlaforge: a weight file was cut short, or its disk failed, while the model was in use: fetch the model again\n"
)


def choose_format(name: str, source: SourceModel, device: torch.device) -> str:
    """Return the format of the weights. `auto` is the checkpoint's dtype on a GPU; on a CPU bfloat16 where
    `bfloat16_unit` names a way to multiply it, else float32, whatever the load of the machine. `auto` logs its
    choice."""
    if name in QUANTIZED:
        return name
    if name != "auto":
        return str(resolve_dtype(name, source.dtype)).removeprefix("torch.")
    if device.type != "cpu":
        format, reason = str(source.dtype).removeprefix("torch."), f"that of {source.path.name}"
    elif unit := bfloat16_unit():
        format, reason = "bfloat16", f"by {unit}"
    else:
        format, reason = "float32", "neither AMX, AVX-512 BF16 nor compiled kernels"
    log(f"dtype auto: {format} ({reason})")
    return format


class AddRmsNorm:
    """RMS norm of a sum, on a GPU: one kernel adds the output of a layer's half to the residual stream and norms it."""

    def __init__(self, norm: Any):
        self.weight, self.eps = norm.weight.detach(), norm.variance_epsilon

    def __call__(self, x_NC: Tensor) -> Tensor:
        return self.add(x_NC, None)[0]

    def add(self, x_NC: Tensor, residual_NC: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and this sum."""
        normed, total = ADD_RMS_NORM(x_NC, residual_NC, self.weight, self.eps)
        return normed, total


class RmsNorm:
    """RMS norm on a CPU: our own kernel for bf16, else the layer norm of [x, -x], whose mean is zero, so that its
    variance is the mean square of x: one of torch's kernels instead of six. Statistics are in fp32."""

    def __init__(self, norm: Any):
        self.weight = norm.weight.detach()
        self.eps = norm.variance_epsilon
        self.twice = torch.cat((self.weight, torch.zeros_like(self.weight)))
        self.bias = torch.zeros_like(self.twice)
        fused = self.weight.dtype == torch.bfloat16 and native.is_available()
        self.rms_norm = RMS_NORM.bind(self.weight[:0], self.weight, self.eps) if fused else None

    def __call__(self, x_NC: Tensor) -> Tensor:
        if self.rms_norm is not None:
            normed: Tensor = self.rms_norm(x_NC, self.weight, self.eps)
            return normed
        C = x_NC.shape[-1]
        return F.layer_norm(torch.cat((x_NC, -x_NC), dim=-1), (2 * C,), self.twice, self.bias, self.eps)[..., :C]


def folded(norm: Any, reader: Any) -> Any:
    """Return `norm`, or the identity if the only product that reads its output applies it from now on."""
    if isinstance(norm, RmsNorm) and isinstance(reader, PackedLinear) and reader.fold_norm(norm.weight, norm.eps):
        return _identity
    return norm


def _sum(out_NC: Tensor, residual_NC: Tensor | None) -> Tensor:
    return out_NC if residual_NC is None else out_NC + residual_NC


def _identity(x: Tensor) -> Tensor:
    return x


@dataclasses.dataclass(frozen=True)
class Layer:
    """A decoder layer of every supported family: attention and MLP, each behind a norm, each added to the residual.

    The parts come from the modules of the model's class; only their order is repeated here, because the call of a
    module costs as much as a small kernel (tests compare it with the class for every family).
    """

    input_norm: Any
    attention: PagedAttention
    post_attention_norm: Any
    mlp: Mlp

    def __call__(self, hidden_NC: Tensor, view: CacheView, step: Step) -> Tensor:
        hidden_NC = self.attention(self.input_norm(hidden_NC), view, step, hidden_NC)
        return self.mlp(self.post_attention_norm(hidden_NC), hidden_NC)

    def deferred(
        self, out_NC: Tensor, residual_NC: Tensor | None, view: CacheView, step: Step
    ) -> tuple[Tensor, Tensor]:
        """As __call__ on out + residual, for norms that add: return the output of the MLP and the residual to which the
        next norm adds it."""
        normed_NC, residual_NC = self.input_norm.add(out_NC, residual_NC)
        out_NC = self.attention(normed_NC, view, step, None)
        normed_NC, residual_NC = self.post_attention_norm.add(out_NC, residual_NC)
        return self.mlp(normed_NC, None), residual_NC


class EngineModel:
    """The decoder of a causal LM with its attention on the paged cache: from a step's tokens to hidden states and
    logits."""

    def __init__(self, source: SourceModel, format: str, device: torch.device):
        """Raises UserError for a missing, extra, wrongly shaped or non-finite tensor, and an unsupported model."""
        self.format, self.device = format, device
        self.dtype = QUANTIZED.get(format) or getattr(torch, format)
        self._stream = LayerStream(source, self.dtype, device)
        self.spec, self.config = self._stream.spec, self._stream.config
        # transformers' grouped experts need no loop over experts, for which the host would wait for the device.
        self.config._experts_implementation = "grouped_mm"
        self.layers: list[Layer] = []
        # Where `hidden` captures the residual stream for a drafter: boundary b is the input of layer b.
        self.boundaries: tuple[int, ...] = ()

    def weight_bytes(self, format: str) -> int:
        """Return the bytes of all weights in `format`. To be called before `load`."""
        return weight_bytes(self._stream.causal_lm, format, self.device)

    @torch.inference_mode()
    def load(self, paged_attention: Callable[[int, Any], PagedAttention]) -> None:
        """Load layer after layer; `paged_attention(index, self_attn)` returns the replacement of a layer's
        attention."""
        if self.device.type == "cpu":
            # Packed experts and weights that are stored in the dtype of their use stay mapped from the files.
            native.install_sigbus_handler(SHRUNK)
        with self._stream as stream:
            stream.check()
            for index in progress(range(stream.num_layers), "load layers"):
                layer = stream.decoder.layers[index]
                self._fill(layer, f"model.layers.{index}.")
                attention = paged_attention(index, layer.self_attn)
                mlp = make_mlp(layer.mlp, self.format, self.device)
                self.layers.append(
                    Layer(
                        folded(self.make_norm(layer.input_layernorm), attention.input_projection),
                        attention,
                        folded(self.make_norm(layer.post_attention_layernorm), getattr(mlp, "gate_up", None)),
                        mlp,
                    )
                )
                # Free the module: its weights were packed anew.
                stream.decoder.layers[index] = nn.Identity()
            self._fill(stream.decoder.norm, "model.norm.")
            self.norm = self.make_norm(stream.decoder.norm)
            self.embedding = stream.tensor("model.embed_tokens.weight")
            tied = "lm_head.weight" not in stream.reader
            head = self.embedding if tied else stream.tensor("lm_head.weight")
            self.head = vocabulary_head(head, self.format)
            self.rotary: Any = stream.decoder.rotary_emb
        del self._stream

    def _fill(self, module: nn.Module, prefix: str) -> None:
        state = {name: self._stream.tensor(prefix + name) for name in module.state_dict()}
        module.load_state_dict(state, assign=True)
        module.requires_grad_(False).eval()

    def make_norm(self, norm: Any) -> Any:
        """Return the engine's norm for this device, for a norm of the model or of a draft head."""
        if prefers_triton(self.device):
            return AddRmsNorm(norm)
        return RmsNorm(norm) if self.device.type == "cpu" else norm

    def hidden(self, token_ids_N: Tensor, step: Step) -> Tensor:
        """Return hidden states before the final norm, [N, C]; with `boundaries`, the C columns captured at each of them
        follow."""
        hidden_NC = F.embedding(token_ids_N, self.embedding)
        residual_NC: Tensor | None = None
        captured = {}
        views = step.batch.layer_views([layer.attention.group for layer in self.layers])
        for index, (layer, view) in enumerate(zip(self.layers, views, strict=True)):
            if index in self.boundaries:
                hidden_NC, residual_NC = _sum(hidden_NC, residual_NC), None
                captured[index] = hidden_NC
            if isinstance(layer.input_norm, AddRmsNorm):
                hidden_NC, residual_NC = layer.deferred(hidden_NC, residual_NC, view, step)
            else:
                hidden_NC = layer(hidden_NC, view, step)
        hidden_NC = _sum(hidden_NC, residual_NC)
        if not self.boundaries:
            return hidden_NC
        captured[len(self.layers)] = hidden_NC
        if AFTER_NORM in self.boundaries:
            captured[AFTER_NORM] = self.norm(hidden_NC)
        return torch.cat([hidden_NC, *(captured[boundary] for boundary in self.boundaries)], dim=-1)

    def logits(self, hidden_NC: Tensor) -> Tensor:
        """Return logits [N, vocabulary] in fp32; on a CPU without compiled kernels in the model's dtype."""
        logits: Tensor = self.head(self.norm(hidden_NC))
        return logits
