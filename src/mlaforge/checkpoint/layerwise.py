"""A causal LM read from its directory one decoder layer at a time: no model is larger than its largest layer.

Calibration, conversion and perplexity all run on it, layer by layer over many windows of tokens.

Legend: B windows, T tokens, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from mlaforge.checkpoint import loading
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.modeling.latent_attention_mla import FUSED
from mlaforge.runtime import progress

# Rows of logits held at once (each is as long as the vocabulary).
HEAD_ROWS = 512


class LayerStream:
    """The parts of a model directory, original or converted, loaded where they are needed and released after.

    Use it as a context manager: it holds the weight files open. Tensors are made in `dtype` on `device`; MXFP4
    experts stay as they are stored (ops/mxfp4_experts.py).
    """

    def __init__(self, model: Path | SourceModel, dtype: torch.dtype, device: torch.device):
        """Raises UserError as `checkpoint.Reader` does, and for a config.json that makes no model."""
        self.source, self.dtype, self.device = SourceModel.open(model), dtype, device
        self.spec = self.source.spec
        # A sparse model would be judged as a dense one if its tokens read as a prompt's do.
        causal_lm: Any = loading.as_generated(loading.skeleton(self.source.config)).eval()
        loading.keep_packed(causal_lm, self.source.config)
        self.causal_lm, self.decoder = causal_lm, causal_lm.model
        self.config = causal_lm.config
        # The fused path of our attention: a learned sink needs it, and it never holds all scores at once.
        self.config._attn_implementation = FUSED
        loading.compute_frequencies(causal_lm, device)
        self.sparsity = getattr(self.decoder, "sparsity", None)
        self._arguments: dict[tuple[int, int, bool], dict[str, Any]] = {}
        self._chosen: dict[int, Any] = {}
        self.reader = self.source.weights()

    def __enter__(self) -> LayerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.__exit__()

    @property
    def num_layers(self) -> int:
        return self.spec.num_layers

    def check(self) -> None:
        """Raises UserError for the first weight that is missing, extra, wrongly shaped, or holds NaN or infinity."""
        self.reader.check(*loading.expected_tensors(self.source.config))

    def tensor(self, name: str) -> Tensor:
        """A weight by the name that the model class has for it."""
        tensor = self.reader[name].to(self.device)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    @contextmanager
    def loaded(self, module: nn.Module, prefix: str) -> Iterator[Any]:
        """`module` with its weights, which `prefix` precedes in the files; afterwards without them again."""
        state = {name: self.tensor(prefix + name) for name in module.state_dict()}
        module.load_state_dict(state, assign=True)
        module.requires_grad_(False)
        del state
        try:
            yield module
        finally:
            module.to("meta")

    def layer(self, index: int) -> Any:
        """Context manager: decoder layer `index`, loaded."""
        return self.loaded(self.decoder.layers[index], f"model.layers.{index}.")

    def attention(self, index: int, *parts: str) -> dict[str, Tensor]:
        """The tensors of a layer's attention by their names below `self_attn.`, of those parts where any are named."""
        prefix, names = f"model.layers.{index}.self_attn.", self.decoder.layers[index].self_attn.state_dict()
        return {name: self.tensor(prefix + name) for name in names if not parts or name.split(".")[0] in parts}

    def embed(self, ids_BT: Tensor) -> Tensor:
        """[B, T] token ids -> [B, T, C]."""
        rows = nn.functional.embedding(ids_BT.cpu(), self.reader["model.embed_tokens.weight"])
        return rows.to(device=self.device, dtype=self.dtype)

    def arguments(self, index: int, hidden_BTC: Tensor) -> dict[str, Any]:
        """What layer `index` is called with beside its hidden states, as the model's own forward would."""
        B, T, _ = hidden_BTC.shape
        windowed = self.spec.layers[index].window is not None
        if (B, T, windowed) not in self._arguments:
            positions = torch.arange(T, device=self.device)[None]
            make = create_sliding_window_causal_mask if windowed else create_causal_mask
            self._arguments[B, T, windowed] = {
                # By place: transformers 5.24 gave the cache, here None, another name.
                "attention_mask": make(self.config, hidden_BTC.detach(), None, None, positions),
                "position_embeddings": self.decoder.rotary_emb(hidden_BTC.detach(), positions),
                "position_ids": positions,
            }
        return self._arguments[B, T, windowed]

    def run(self, layer: Any, index: int, hidden_BTC: Tensor) -> Tensor:
        """One decoder layer (loaded, perhaps with another attention) on hidden states."""
        out: Tensor = layer(hidden_BTC, **self.arguments(index, hidden_BTC))
        return out

    @torch.no_grad()
    def last_states(
        self, texts: Iterable[Tensor], what: str, see: Callable[[int, int, Tensor], None] | None = None
    ) -> list[Tensor]:
        """The last layer's outputs [1, T, C] on each text of token ids [T], each layer loaded once for all of them.

        what: what is done, to who watches. see: is shown every layer's inputs, as the layer's index, the text's and
        the states [1, T, C].
        """
        hidden = [self.embed(ids[None]) for ids in texts]
        for index in progress(range(self.num_layers), what, self.num_layers):
            with self.layer(index) as layer:
                for n, states in enumerate(hidden):
                    if see is not None:
                        see(index, n, states)
                    with self.text(n):
                        hidden[n] = self.run(layer, index, states)
        return hidden

    @contextmanager
    def text(self, n: int) -> Iterator[None]:
        """Around a layer's run on the n-th of several texts that go through the layers side by side: a sparse layer may
        read what one before it chose on the same text."""
        sparsity = self.sparsity
        if sparsity is None or "shared" not in self.config.indexer_types:
            yield
        else:
            sparsity.chosen = self._chosen.get(n)
            yield
            self._chosen[n] = sparsity.chosen

    @contextmanager
    def head(self) -> Iterator[tuple[Any, Tensor]]:
        """Context manager: the final norm, and the language model head's weight [vocabulary, C]."""
        name = "lm_head.weight" if "lm_head.weight" in self.reader else "model.embed_tokens.weight"
        with self.loaded(self.decoder.norm, "model.norm.") as norm:
            yield norm, self.tensor(name)
