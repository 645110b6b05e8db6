"""A model directory becomes a model that runs on the paged cache: the same classes, built on the meta device, loaded
strictly one layer at a time, with attention and MLP of each layer rewritten in place as it arrives.

Legend: N tokens, C hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mlaforge import checkpoint
from mlaforge.engine.linear import QUANTIZED, PackedLinear, fastest_format
from mlaforge.engine.mlp import rewritten
from mlaforge.runtime import log, progress, resolve_dtype
from mlaforge.spec import ModelSpec
from mlaforge.stream import LayerStream


def choose_format(name: str, directory: Path, spec: ModelSpec, device: torch.device) -> str:
    """The format of the weights. `auto` is the checkpoint's dtype on a GPU; on a CPU it is measured and said."""
    if name in QUANTIZED:
        return name
    stored = checkpoint.stored_dtype(checkpoint.read_config(directory))
    if name != "auto" or device.type != "cpu":
        return str(resolve_dtype(name, stored)).removeprefix("torch.")
    layer, hidden = spec.layers[0], spec.hidden_size
    heads = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
    mlp = layer.mlp_params // (3 * hidden)
    shapes = [(heads, hidden), (hidden, layer.num_heads * layer.head_dim), (2 * mlp, hidden), (hidden, mlp)]
    best, seconds = fastest_format(shapes)
    told = ", ".join(f"{name} {1e3 * time:.2f} ms" for name, time in seconds.items())
    log(f"dtype auto: {best} (a layer at one token: {told})")
    return best


class RmsNorm(nn.Module):
    """RMS norm as one layer norm: that of [x, -x], whose mean is zero, so its variance is the mean square of x.

    On a CPU torch has a kernel for the one and six for the other; the statistics are in fp32 in both.
    """

    def __init__(self, norm: Any):
        super().__init__()
        weight = norm.weight.detach()
        self.eps = norm.variance_epsilon
        self.weight = torch.cat((weight, torch.zeros_like(weight)))
        self.bias = torch.zeros_like(self.weight)

    def forward(self, x_NC: Tensor) -> Tensor:
        C = x_NC.shape[-1]
        return F.layer_norm(torch.cat((x_NC, -x_NC), dim=-1), (2 * C,), self.weight, self.bias, self.eps)[..., :C]


class EngineModel:
    """The decoder of a causal LM with its attention on the cache: tokens of a step in, hidden states and logits out."""

    def __init__(self, directory: Path, format: str, device: torch.device):
        """Raises UserError for a missing, extra, wrongly shaped or non-finite tensor, and an unsupported model."""
        self.format, self.device = format, device
        self.dtype = QUANTIZED.get(format) or getattr(torch, format)
        self._stream = LayerStream(directory, self.dtype, device)
        self.spec, self.config = self._stream.spec, self._stream.config
        # transformers' experts without a loop over them that the host would have to wait for.
        self.config._experts_implementation = "grouped_mm"
        self.layers: list[Any] = []

    @torch.inference_mode()
    def load(self, paged_attention: Any) -> None:
        """Loads layer after layer; `paged_attention(index, self_attn)` gives what replaces a layer's attention."""
        with self._stream as stream:
            stream.check()
            for index in progress(range(stream.num_layers), "load layers"):
                layer = stream.decoder.layers[index]
                self._fill(layer, f"model.layers.{index}.")
                layer.self_attn = paged_attention(index, layer.self_attn)
                self._rewrite(layer)
                self.layers.append(layer)
            self._fill(stream.decoder.norm, "model.norm.")
            self.norm = self._norm(stream.decoder.norm)
            self.embedding = stream.tensor("model.embed_tokens.weight")
            tied = "lm_head.weight" not in stream.reader
            head = self.embedding if tied else stream.tensor("lm_head.weight")
            self.head = PackedLinear(head, None, self.format)
            self.rotary: Any = stream.decoder.rotary_emb
        del self._stream

    def _fill(self, module: nn.Module, prefix: str) -> None:
        state = {name: self._stream.tensor(prefix + name) for name in module.state_dict()}
        module.load_state_dict(state, assign=True)
        module.requires_grad_(False).eval()

    def _rewrite(self, layer: Any) -> None:
        """A layer's norms and its MLP."""
        layer.mlp = rewritten(layer.mlp, self.format, self.device)
        layer.input_layernorm = self._norm(layer.input_layernorm)
        layer.post_attention_layernorm = self._norm(layer.post_attention_layernorm)

    def _norm(self, norm: Any) -> Any:
        return RmsNorm(norm) if self.device.type == "cpu" else norm

    def hidden(self, token_ids_N: Tensor, step: Any) -> Tensor:
        """Hidden states before the final norm, [N, C]."""
        hidden_NC = F.embedding(token_ids_N, self.embedding)
        for layer in self.layers:
            hidden_NC = layer(hidden_NC, position_embeddings=step)
        return hidden_NC

    def logits(self, hidden_NC: Tensor) -> Tensor:
        """[N, vocabulary] in the model's dtype."""
        logits: Tensor = self.head(self.norm(hidden_NC))
        return logits
