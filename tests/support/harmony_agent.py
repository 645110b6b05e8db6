"""A tiny GPT-OSS with harmony's real vocabulary that behaves like an agent in any conversation, whatever its prompt.

harmony_checkpoint.py answers a few exact prompts; clients write prompts of their own. This model decides by three
tokens alone, so that every client gets the same answer:

    reasons first;
    then calls get_weather({"city":"Paris"}) if the prompt offers functions and no tool was called yet;
    else answers "It is 4 °C in Paris."

Under a grammar that excludes these texts it writes empty strings, 0 and short lists, so that an object ends soon.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.harmony_checkpoint import ALL, tokenizer

HIDDEN, HEAD_DIM, WINDOW = 256, 64, 3
START = "<|end|><|start|>assistant"
REASONING, ANSWER, TOOL, ARGUMENTS = "Easy.", "It is 4 °C in Paris.", "get_weather", '{"city":"Paris"}'
REASONS = f"<|channel|>analysis<|message|>{REASONING}<|end|><|start|>assistant"
ANSWERS = f"<|channel|>final<|message|>{ANSWER}<|return|>"
CALLS = f"<|channel|>commentary to=functions.{TOOL} <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
# Token -> what its presence anywhere in the conversation adds to the choice of a channel.
FLAGS = {
    "analysis": {"analysis": -100.0},
    "namespace": {"comment": 40.0},
    "<|call|>": {"comment": -100.0},
}
CHANNELS = {"analysis": 120.0, "comment": 40.0, "final": 60.0}
# Logits where a grammar excludes the texts above: what ends a value is likelier than what prolongs it.
ENDINGS = {
    "}": 30.0, '"}': 29.0, "]": 28.0, '"': 27.0, '",': 25.0, ",": 24.0, '{"': 23.0, "{": 22.0, "[": 22.0, '":': 22.0,
    "0": 21.0, "true": 20.0, "<|return|>": 31.0, "<|call|>": 31.0,
}  # fmt: skip
LIKELY = 60.0
# Dimensions of a state: a constant, the gate of <|channel|>, one for each flag and one for its result; then tokens.
CONSTANT, GATE, FLAG, RESULT, TOKENS = 0, 1, 2, 5, 8


class Agent:
    """Builds the weights. `encoding` is harmony's."""

    def __init__(self, encoding: Any) -> None:
        from transformers import GptOssConfig, GptOssForCausalLM

        self.encoding = encoding
        torch.manual_seed(0)
        config = GptOssConfig(
            vocab_size=ALL, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=2, num_local_experts=4,
            num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=4, head_dim=HEAD_DIM, eos_token_id=200002,
            layer_types=["sliding_attention", "full_attention"], sliding_window=WINDOW, max_position_embeddings=16384,
            pad_token_id=199999,
        )  # fmt: skip
        self.model = GptOssForCausalLM(config).float().eval()

    def ids(self, text: str) -> list[int]:
        return list(self.encoding.encode(text, allowed_special="all"))

    def token(self, text: str) -> int:
        [token] = self.ids(text)
        return token

    @torch.no_grad()
    def build(self) -> Any:
        """Return the model with its weights set."""
        for name, parameter in self.model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        self._embed()
        self._attend_to_window(self.model.model.layers[0].self_attn)
        self._attend_to_flags(self.model.model.layers[1].self_attn)
        self._solve_head()
        return self.model

    def _embed(self) -> None:
        """Tokens of the texts differ in every dimension from TOKENS on; all others are one and the same."""
        embedding = self.model.model.embed_tokens.weight
        embedding[:, CONSTANT] = 1.0
        tokens = sorted({token for text in (START, REASONS, ANSWERS, CALLS) for token in self.ids(text)})
        embedding[tokens, TOKENS:] = torch.randn(len(tokens), HIDDEN - TOKENS) / (HIDDEN - TOKENS) ** 0.5
        embedding[self.token("<|channel|>"), GATE] = 1.0
        for i, token in enumerate(FLAGS):
            embedding[self.token(token), FLAG + i] = 1.0

    def _attend_to_window(self, attention: Any) -> None:
        """Add a mixture of the last WINDOW tokens to each state."""
        attention.sinks.fill_(-1e4)
        width = HIDDEN - TOKENS
        attention.v_proj.weight[:width, TOKENS:] = torch.eye(width)
        attention.o_proj.weight[TOKENS:, :width] = torch.linalg.qr(torch.randn(width, width))[0]

    def _attend_to_flags(self, attention: Any) -> None:
        """At <|channel|>, head i adds 1 where token i of FLAGS precedes; elsewhere the sinks take all attention."""
        attention.sinks.fill_(20.0)
        # The slowest rotation: a score is the same at every distance.
        slowest = HEAD_DIM // 2 - 1
        for i in range(len(FLAGS)):
            attention.q_proj.weight[HEAD_DIM * i + slowest, GATE] = 20.0
            attention.k_proj.weight[HEAD_DIM * i + slowest, FLAG + i] = 20.0
            attention.v_proj.weight[HEAD_DIM * i, CONSTANT] = 1.0
            attention.o_proj.weight[RESULT + i, HEAD_DIM * i] = 1.0

    def _states(self, ids: list[int]) -> torch.Tensor:
        return self.model.model(torch.tensor([ids])).last_hidden_state[0].double()

    def _solve_head(self) -> None:
        """Solve the head from the states of the texts, and from that of other tokens, which ENDINGS follow."""
        start, channel, other = self.ids(START), self.token("<|channel|>"), self.token("~")
        following: dict[tuple[int, ...], dict[str, float]] = {}
        for text in (REASONS + ANSWERS, CALLS):
            ids = start + self.ids(text)
            for at in range(len(start), len(ids)):
                follows = CHANNELS if ids[at - 1] == channel else {self.encoding.decode([ids[at]]): LIKELY}
                window = tuple(ids[at - WINDOW : at])
                assert following.setdefault(window, follows) == follows, self.encoding.decode(ids[:at])
        following[other, other, other] = {}
        rows = torch.stack([self._states(list(window))[-1] for window in following])
        targets = torch.zeros(len(rows), ALL, dtype=torch.float64)
        for row, follows in zip(targets, following.values(), strict=True):
            for text, logit in (ENDINGS | follows).items():
                row[self.token(text)] = logit
        # Tokens alone determine it; traces of attention that the sinks leave over must not.
        rows[:, GATE:TOKENS] = 0.0
        head = torch.linalg.pinv(rows, rtol=1e-4) @ targets
        assert (rows @ head - targets).abs().max() < 1, "more windows than a head of this width can distinguish"
        for i, (flag, logits) in enumerate(FLAGS.items()):
            present = self._states([*self.ids(flag), *start, channel])[-1, RESULT + i]
            for text, logit in logits.items():
                head[RESULT + i, self.token(text)] = logit / present
        self.model.lm_head.weight.copy_(head.T.float())


def save(directory: Path, encoding: Any) -> Path:
    """Save the checkpoint with packed experts, like public checkpoints."""
    from support.tiny_models import save_packed

    plain = directory.with_name(f"{directory.name}-plain")
    Agent(encoding).build().save_pretrained(plain)
    tokenizer(encoding).save_pretrained(plain)
    return save_packed(plain, directory, torch.float32)
