"""What draft heads of all kinds share: the vocabulary that they propose from, and the rotary embedding.

Requires only torch and transformers. Legend: V draft vocabulary, C hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding


class DraftVocabularyHead(nn.Module):
    """Base of draft heads, which define `config`, `fc`, `norm` and `lm_head`. Buffers: `d2t` [V], target token id minus
    draft token id; `t2d` [target vocabulary], whether the draft vocabulary has the token; none for a head with the
    target's vocabulary."""

    config: Any
    fc: nn.Linear
    norm: LlamaRMSNorm
    lm_head: nn.Linear

    def make_vocabulary(self) -> None:
        """Register the buffers."""
        draft, target = self.config.draft_vocab_size, self.config.layer.vocab_size
        if draft != target:
            self.register_buffer("d2t", torch.zeros(draft, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(target, dtype=torch.bool))

    @property
    def target_ids(self) -> Tensor:
        """Target token id of each draft token: int64 [V]."""
        head_ids = torch.arange(self.config.draft_vocab_size, device=self.fc.weight.device)
        offsets = getattr(self, "d2t", None)
        return head_ids if offsets is None else head_ids + offsets

    def rotary(self) -> LlamaRotaryEmbedding:
        """Return the rotary embedding of the head's RoPE."""
        return LlamaRotaryEmbedding(self.config.layer).to(self.fc.weight.device)

    def logits(self, out: Tensor) -> Tensor:
        """Return logits over the draft vocabulary, [..., V], of outputs before the final norm, [..., C]."""
        logits: Tensor = self.lm_head(self.norm(out))
        return logits
