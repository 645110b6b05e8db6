"""Random EAGLE-3 heads for the tiny models, and their drafts in plain PyTorch."""

import torch
from transformers import LlamaConfig

from mlaforge.checkpoint.eagle3 import write_head
from mlaforge.modeling.eagle3 import Eagle3Config, Eagle3Head

LAYER = {
    "vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512, "num_hidden_layers": 1, "mlp_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip


ALL = {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True}


HEADS = {
    "plain": {},
    "all norms": {**ALL, "draft_vocab_size": 260},
    "window": {"sliding_window": 9, "norm_before_residual": True},
    "parallel": {"mask_token_id": 5, "fc_norm": True},
    "Markov": {"mask_token_id": 5, "markov_rank": 8},
    "another size": {"layer": {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20},
                     "has_embed_tokens": True, "norm_before_residual": True},
}  # fmt: skip


def make(layer=None, tokens=None, seed=0, **fields):
    """Return a random head. `tokens`: its vocabulary, by default every third token of the target."""
    torch.manual_seed(seed)
    tokens = list(range(0, 260, 3)) if tokens is None else tokens
    settings = {"target_hidden_size": 64, "draft_vocab_size": len(tokens), "boundaries": (0, 1, 2), **fields}
    return randomized(Eagle3Head(Eagle3Config(LlamaConfig(**{**LAYER, **(layer or {})}), **settings)), tokens)


def randomized(head, tokens):
    """Return a draft head of any kind with random weights and this vocabulary."""
    for name, parameter in head.named_parameters():
        # A Markov correction, a product of two weights, changes which token is likely.
        std = 0.3 if "norm" in name else 2.0 if "markov" in name else 0.25
        torch.nn.init.normal_(parameter, float("norm" in name), std)
    if "d2t" in dict(head.named_buffers()):
        head.d2t += torch.tensor(tokens) - torch.arange(len(tokens))
        head.t2d[tokens] = True
    return head.requires_grad_(False).eval()


def saved(folder, **fields):
    folder.mkdir(exist_ok=True)
    write_head(make(**fields), folder, torch.float32)
    return folder


@torch.no_grad()
def corrected(head, logits, drafted):
    """Return logits of a head's places with its Markov correction, from the whole table of what follows each token."""
    if head.config.markov_rank:
        follows = head.markov_embed.weight @ head.markov_head.weight.T
        for place, token in enumerate(drafted[:-1], start=1):
            logits[place] += follows[head.target_ids.tolist().index(token)]
    return logits


@torch.no_grad()
def draft_logits(head, oracle, token_ids, drafted):
    """Return the head's logits for `drafted` after token_ids, with a full pass per token."""
    ids, window = torch.tensor([token_ids]), head.config.sliding_window
    hidden_states = oracle.model(ids, output_hidden_states=True).hidden_states
    states = torch.cat([hidden_states[boundary] for boundary in head.config.boundaries], dim=-1)[:, :-1]
    embedding = head.embed_tokens if head.config.has_embed_tokens else oracle.model.get_input_embeddings()
    hidden, rest, logits = head.fuse(states.float()), ids[:, 1:], []
    for token in [*drafted, None]:
        distance = torch.arange(hidden.shape[1])[:, None] - torch.arange(hidden.shape[1])
        mask = (distance >= 0) & (distance < (window or 10**6))
        out = head(hidden, embedding(rest), torch.arange(hidden.shape[1])[None], mask)
        logits.append(head.logits(out)[0, -1])
        masked = head.config.mask_token_id is not None
        state = head.mask_state[None, None] if masked else head.fed_back(out[:, -1:])
        hidden = torch.cat((hidden, state), dim=1)
        if token is not None:
            token = head.config.mask_token_id if masked else token
            rest = torch.cat((rest, torch.tensor([[token]])), dim=1)
    return corrected(head, torch.stack(logits[:-1]), drafted)


def recorded(drafter, least=0.0):
    """Record (text, number of requested tokens, draft) of all later proposals, with minimal probability `least`."""
    records, propose = [], drafter.propose

    def record(budgets, _):
        drafts = propose(budgets, least)
        records.extend((list(s.token_ids), count, d) for (s, count), d in zip(budgets, drafts, strict=True))
        return drafts

    drafter.propose = record
    return records


def check_drafts(records, head, oracle, draft_logits=draft_logits):
    """Assert that drafts are the likeliest tokens of the plain path, or as likely to 1e-3. draft_logits: of this kind
    of head."""
    assert records
    for text, _, draft in records:
        assert draft is not None
        logits = draft_logits(head, oracle, text, draft.token_ids)
        indices = [head.target_ids.tolist().index(token) for token in draft.token_ids]
        gap = logits.max(-1).values - logits[range(len(indices)), indices]
        assert float(gap.max()) < 1e-3, (len(text), draft.token_ids, gap)
