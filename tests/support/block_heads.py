"""Random block heads for the tiny models, and their drafts in plain PyTorch."""

import torch
from transformers import LlamaConfig

from mlaforge.checkpoint.block_head import write_head
from mlaforge.modeling.block_head import BlockConfig, BlockHead
from support.eagle3_heads import LAYER, corrected, randomized

HEADS = {
    "plain": {},
    "two layers": {"layers": 2, "fc_norm": True, "draft_vocab_size": 260},
    "window": {"sliding_window": 9, "layers": 2},
    "long block": {"block_size": 9, "boundaries": (1, 2)},
    "Markov": {"markov_rank": 6},
}


def make(layer=None, tokens=None, seed=0, layers=1, **fields):
    """Return a random head. `tokens`: its vocabulary, by default every third token of the target."""
    torch.manual_seed(seed)
    tokens = list(range(0, 260, 3)) if tokens is None else tokens
    settings = {"target_hidden_size": 64, "draft_vocab_size": len(tokens), "boundaries": (0, 1, 2), "block_size": 5}
    shape = LlamaConfig(**{**LAYER, "num_hidden_layers": layers, **(layer or {})})
    return randomized(BlockHead(BlockConfig(shape, **{**settings, **fields})), tokens)


def saved(folder, **fields):
    folder.mkdir(exist_ok=True)
    write_head(make(**fields), folder, torch.float32)
    return folder


@torch.no_grad()
def draft_logits(head, oracle, token_ids, drafted):
    """Return the head's logits for as many tokens as `drafted` after token_ids, by a whole pass."""
    out = oracle.model(torch.tensor([token_ids]), output_hidden_states=True)
    states = torch.cat([out.hidden_states[boundary] for boundary in head.config.boundaries], dim=-1)[:, :-1]
    newest = oracle.model.get_input_embeddings()(torch.tensor(token_ids[-1:]))
    return corrected(head, head.logits(head(states.float(), newest, len(drafted)))[0], drafted)
