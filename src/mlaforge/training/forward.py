"""Forward pass of a causal LM over packed rows, for students and teachers.

Legend: B rows, T tokens, C hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from mlaforge.data.packing import Rows


def masks(config: Any, rows: Rows) -> Any:
    """Return transformers' block-diagonal attention masks for packed rows, in the form that the decoders of `config`
    take. None if every row is one document: then no mask is needed, and RoPE depends on differences only."""
    positions = torch.arange(rows.ids.shape[1], device=rows.ids.device)
    if bool((rows.positions == positions).all()):
        return None
    # Positional, because transformers 5.24 renamed the cache argument.
    arguments = (config, rows.ids[..., None].float(), None, None, rows.positions)
    factories = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
    if layer_types := getattr(config, "layer_types", None):
        return {layer_type: factories[layer_type](*arguments) for layer_type in set(layer_types)}
    layer_type = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return factories[layer_type](*arguments)


def final_states(model: Any, rows: Rows) -> Tensor:
    """Return the hidden states of a causal LM after the final norm, [B·T, C]."""
    mask = masks(model.config, rows)
    positions = None if mask is None else rows.positions
    out = model.model(input_ids=rows.ids, attention_mask=mask, position_ids=positions, use_cache=False)
    states: Tensor = out.last_hidden_state
    return states.flatten(0, 1)
