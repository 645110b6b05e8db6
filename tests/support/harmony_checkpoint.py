"""A tiny GPT-OSS with MXFP4 experts and the real o200k_harmony vocabulary that generates fixed answers.

The vocabulary comes from openai-harmony; no installed package has GPT-OSS's chat template. Attention is the mean over
the text and the experts output zero, so that a state identifies the position in a text; the LM head is then solved
exactly from the states of the fixed texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

# tiktoken's o200k pattern (MIT licence, OpenAI).
PATTERN = "|".join([
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""\p{N}{1,3}""",
    r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
    r"""\s*[\r\n]+""",
    r"""\s+(?!\S)""",
    r"""\s+""",
])  # fmt: skip
ORDINARY, ALL = 199998, 201088
HIDDEN = 128


def tokenizer(encoding: Any) -> Any:
    """Return a transformers tokenizer with harmony's vocabulary: its ranks as merges, the same ids of special
    tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    ranks = {bytes(encoding._inner.decode_bytes([i])): i for i in range(ORDINARY)}
    words = {token: "".join(letters[b] for b in token) for token in ranks}
    merges = []
    for token in ranks:
        pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
        splits = [(left, right) for left, right in pairs if left in ranks and right in ranks]
        merges += sorted(splits, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    vocabulary = {words[token]: i for token, i in ranks.items()}
    bpe = Tokenizer(models.BPE(vocabulary, [(words[a], words[b]) for a, b in merges], ignore_merges=True))
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    bpe.decoder = decoders.ByteLevel()
    special = [encoding.decode([i]) for i in range(ORDINARY, ALL)]
    bpe.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<|startoftext|>", eos_token="<|return|>", pad_token="<|endoftext|>"
    )


def model(texts: list[tuple[list[int], list[int]]]) -> Any:
    """Return a GPT-OSS in fp32 that answers each prompt with its answer, both token ids."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=ALL, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=2, num_local_experts=4,
        num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64, eos_token_id=200002,
        layer_types=["sliding_attention", "full_attention"], max_position_embeddings=4096, pad_token_id=199999,
    )  # fmt: skip
    causal_lm = GptOssForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in causal_lm.named_parameters():
            if "norm" not in name:
                parameter.normal_() if "embed" in name else parameter.zero_()
            if name.endswith("sinks"):
                parameter.fill_(-1e4)
        attention = causal_lm.model.layers[1].self_attn
        torch.nn.init.normal_(attention.v_proj.weight)
        torch.nn.init.normal_(attention.o_proj.weight)
        states, labels = [], []
        for prompt, answer in texts:
            ids = torch.tensor([prompt + answer[:-1]])
            states.append(causal_lm.model(ids).last_hidden_state[0, len(prompt) - 1 :].double())
            labels += answer
        causal_lm.lm_head.weight.zero_()
        answers = sorted(set(labels))
        target = torch.zeros(len(labels), len(answers), dtype=torch.float64)
        target[range(len(labels)), [answers.index(token) for token in labels]] = 20.0
        rows = torch.cat(states)
        assert len(rows) <= HIDDEN, "more tokens than a head of this width can distinguish"
        causal_lm.lm_head.weight[answers] = (torch.linalg.pinv(rows) @ target).T.float()
    return causal_lm


def save(directory: Path, encoding: Any, texts: list[tuple[list[int], list[int]]], template: str | None) -> Path:
    """Save the checkpoint with packed experts, like public checkpoints."""
    from support.tiny_models import save_packed

    plain = directory.with_name(f"{directory.name}-plain")
    model(texts).save_pretrained(plain)
    harmony_tokenizer = tokenizer(encoding)
    harmony_tokenizer.chat_template = template
    harmony_tokenizer.save_pretrained(plain)
    return save_packed(plain, directory, torch.float32)
