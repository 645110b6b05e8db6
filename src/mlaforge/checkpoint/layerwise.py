"""Streaming of a causal LM from disk, one decoder layer at a time: memory is that of the largest layer.

Calibration, conversion and perplexity run on it, layer by layer over many windows of tokens.

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

# Rows of logits in memory at once (each has the length of the vocabulary).
HEAD_ROWS = 512


class LayerStream:
    """The layers of a model directory, original or converted, each loaded when needed and released afterwards.

    Use it as a context manager: it keeps the weight files open. Tensors are loaded in `dtype` on `device`; MXFP4
    experts stay packed (ops/mxfp4_experts.py).
    """

    def __init__(self, model: Path | SourceModel, dtype: torch.dtype, device: torch.device):
        """Raises UserError as `checkpoint.Reader` does, and for an invalid config.json."""
        self.source, self.dtype, self.device = SourceModel.open(model), dtype, device
        self.spec = self.source.spec
        # Prompt tokens attend densely: without `as_generated` a sparse model would be evaluated as a dense one.
        causal_lm: Any = loading.as_generated(loading.skeleton(self.source.config)).eval()
        self._expected = loading.tensors_of(causal_lm, self.source.config)
        loading.keep_packed(causal_lm, self.source.config)
        self.causal_lm, self.decoder = causal_lm, causal_lm.model
        self.config = causal_lm.config
        # The fused attention supports learned sinks and never materialises all scores.
        self.config._attn_implementation = FUSED
        loading.compute_frequencies(causal_lm, device)
        self.sparsity = getattr(self.decoder, "sparsity", None)
        self._arguments: dict[tuple[int, int, bool], dict[str, Any]] = {}
        self._selections: dict[int, Any] = {}
        self.reader = self.source.weights()

    def __enter__(self) -> LayerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.__exit__()

    @property
    def num_layers(self) -> int:
        return self.spec.num_layers

    def check(self) -> None:
        """Raises UserError for the first weight that is missing, unexpected, wrongly shaped, or not finite."""
        self.reader.check(*self._expected)

    def tensor(self, name: str) -> Tensor:
        """Return a weight by its name in the model class."""
        tensor = self.reader[name].to(self.device)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    @contextmanager
    def loaded(self, module: nn.Module, prefix: str) -> Iterator[Any]:
        """Load the weights of `module` for the duration of the context; in the files their names begin with
        `prefix`."""
        state = {name: self.tensor(prefix + name) for name in module.state_dict()}
        module.load_state_dict(state, assign=True)
        module.requires_grad_(False)
        del state
        try:
            yield module
        finally:
            module.to("meta")

    def layer(self, index: int) -> Any:
        """Context manager: load decoder layer `index`."""
        return self.loaded(self.decoder.layers[index], f"model.layers.{index}.")

    def attention(self, index: int, *parts: str) -> dict[str, Tensor]:
        """Return the tensors of a layer's attention by their names below `self_attn.`, all or those of `parts`."""
        prefix, names = f"model.layers.{index}.self_attn.", self.decoder.layers[index].self_attn.state_dict()
        return {name: self.tensor(prefix + name) for name in names if not parts or name.split(".")[0] in parts}

    def embed(self, ids_BT: Tensor) -> Tensor:
        """Return the embeddings [B, T, C] of token ids [B, T]."""
        rows = nn.functional.embedding(ids_BT.cpu(), self.reader["model.embed_tokens.weight"])
        return rows.to(device=self.device, dtype=self.dtype)

    def arguments(self, index: int, hidden_BTC: Tensor) -> dict[str, Any]:
        """Return the arguments of layer `index` beside its hidden states, the same as in the model's forward."""
        B, T, _ = hidden_BTC.shape
        windowed = self.spec.layers[index].window is not None
        if (B, T, windowed) not in self._arguments:
            positions = torch.arange(T, device=self.device)[None]
            make = create_sliding_window_causal_mask if windowed else create_causal_mask
            self._arguments[B, T, windowed] = {
                # Positional: transformers 5.24 renamed the cache argument, here None.
                "attention_mask": make(self.config, hidden_BTC.detach(), None, None, positions),
                "position_embeddings": self.decoder.rotary_emb(hidden_BTC.detach(), positions),
                "position_ids": positions,
            }
        return self._arguments[B, T, windowed]

    def run(self, layer: Any, index: int, hidden_BTC: Tensor) -> Tensor:
        """Run one loaded decoder layer, possibly with another attention, on hidden states."""
        out: Tensor = layer(hidden_BTC, **self.arguments(index, hidden_BTC))
        return out

    @torch.no_grad()
    def last_states(
        self, texts: Iterable[Tensor], what: str, observe: Callable[[int, int, Tensor], None] | None = None
    ) -> list[Tensor]:
        """Return the last layer's outputs [1, T, C] for each text of token ids [T], loading each layer once.

        what: label of the progress bar. observe: called with every layer's inputs, as (layer index, text index, states
        [1, T, C]).
        """
        hidden = [self.embed(ids[None]) for ids in texts]
        for index in progress(range(self.num_layers), what, self.num_layers):
            with self.layer(index) as layer:
                for n, states in enumerate(hidden):
                    if observe is not None:
                        observe(index, n, states)
                    with self.text(n):
                        hidden[n] = self.run(layer, index, states)
        return hidden

    @contextmanager
    def text(self, n: int) -> Iterator[None]:
        """Context of running a layer on the n-th of several texts that pass through the layers together: a sparse layer
        may share the token selection of an earlier layer on the same text."""
        sparsity = self.sparsity
        if sparsity is None or "shared" not in self.config.indexer_types:
            yield
        else:
            sparsity.chosen = self._selections.get(n)
            yield
            self._selections[n] = sparsity.chosen

    @contextmanager
    def head(self) -> Iterator[tuple[Any, Tensor]]:
        """Context manager: load the final norm and the weight of the LM head [vocabulary, C]."""
        name = "lm_head.weight" if "lm_head.weight" in self.reader else "model.embed_tokens.weight"
        with self.loaded(self.decoder.norm, "model.norm.") as norm:
            yield norm, self.tensor(name)
