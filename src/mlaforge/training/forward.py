"""A causal LM's forward pass over packed rows, student's or teacher's: what healing and drafting share.

Legend: B rows, T tokens, C hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from mlaforge.data.packing import Rows


def masks(config: Any, rows: Rows) -> Any:
    """transformers' block-diagonal masks of rows, in the form in which the decoders of `config` take them; None where
    every row is one document: kernels need no mask then, and RoPE sees only differences."""
    whole = torch.arange(rows.ids.shape[1], device=rows.ids.device)
    if bool((rows.positions == whole).all()):
        return None
    # By place: transformers 5.24 gave the cache another name.
    arguments = (config, rows.ids[..., None].float(), None, None, rows.positions)
    makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
    if kinds := getattr(config, "layer_types", None):
        return {kind: makers[kind](*arguments) for kind in set(kinds)}
    return makers["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"](*arguments)


def final_states(model: Any, rows: Rows) -> Tensor:
    """A causal LM's final, normed hidden states on rows, [B·T, C]."""
    mask = masks(model.config, rows)
    positions = None if mask is None else rows.positions
    out = model.model(input_ids=rows.ids, attention_mask=mask, position_ids=positions, use_cache=False)
    states: Tensor = out.last_hidden_state
    return states.flatten(0, 1)
