"""What draft heads of all kinds share: the vocabulary that they propose from, the rotary embedding, and the Markov
correction of heads that draft several tokens in one pass.

Requires only torch and transformers. Legend: V draft vocabulary, C hidden size, R rank of the Markov correction.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding


class DraftVocabularyHead(nn.Module):
    """Base of draft heads, which define `config`, `fc`, `norm` and `lm_head`. Buffers: `d2t` [V], target token id minus
    draft token id; `t2d` [target vocabulary], whether the draft vocabulary has the token; none for a head with the
    target's vocabulary.

    With `config.markov_rank` the token drafted before adds `markov_head(markov_embed[token])` to the logits of a place
    (DSpark, arXiv:2607.05147): a low-rank table of which token follows which, because one pass does not know the tokens
    that it drafts."""

    config: Any
    fc: nn.Linear
    norm: LlamaRMSNorm
    lm_head: nn.Linear

    def make_vocabulary(self) -> None:
        """Register the buffers, and the Markov correction, initially zero."""
        if rank := self.config.markov_rank:
            self.markov_embed = nn.Embedding(self.config.draft_vocab_size, rank)
            self.markov_head = nn.Linear(rank, self.config.draft_vocab_size, bias=False)
            nn.init.zeros_(self.markov_head.weight)
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

    def draft_ids(self) -> Tensor:
        """Return the draft token of each target token id, -1 for tokens that are not proposed: int64 [target
        vocabulary]."""
        ids = torch.full((self.config.layer.vocab_size,), -1, device=self.fc.weight.device)
        return ids.index_copy(0, self.target_ids, torch.arange(self.config.draft_vocab_size, device=ids.device))

    def logits(self, out: Tensor) -> Tensor:
        """Return logits over the draft vocabulary, [..., V], of outputs before the final norm, [..., C]."""
        logits: Tensor = self.lm_head(self.norm(out))
        return logits

    def follows(self, draft_ids: Tensor) -> Tensor:
        """Return what drafted tokens say of the next ones, [..., R], the input of `markov_head`: 0 for -1."""
        return F.embedding(draft_ids.clamp_min(0), self.markov_embed.weight) * (draft_ids >= 0)[..., None]
