"""Requests and their sequences (continuations), as the scheduler and the engine use them."""

from __future__ import annotations

import dataclasses
import time

from mlaforge.engine.request.stopping import Stopping
from mlaforge.engine.sampling.logprobs import Logprobs
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.sampling.state import SamplingState
from mlaforge.runtime import UserError


class PromptTooLong(UserError):
    """The prompt and the new tokens exceed the model's context. Clients of OpenAI's and vLLM's servers recognise the
    wording.

    tokens      tokens of the prompt; `at_least`: or more
    new_tokens  requested tokens after the prompt
    field       what must be smaller: "prompt" or "max_tokens"
    """

    def __init__(self, tokens: int, new_tokens: int, max_model_len: int, at_least: bool = False) -> None:
        count = f"at least {tokens}" if at_least else str(tokens)
        # If the prompt leaves no room for a single token, the number of requested tokens does not matter.
        room = max(0, max_model_len - min(new_tokens, 1))
        self.field = "prompt" if tokens > room else "max_tokens"
        why = f"the prompt has {count} tokens, and there is room for {room}; shorten the prompt"
        if self.field == "max_tokens":
            limit = f"at most {max_model_len - tokens}"
            why = f"the prompt has {count} tokens and max_tokens is {new_tokens}; set max_tokens to {limit}"
            if not at_least:
                why += ", or shorten the prompt"
        super().__init__(f"This model's maximum context length is {max_model_len} tokens, but {why}")


def check_prompt(prompt_ids: list[int], vocab_size: int, max_model_len: int, new_tokens: int) -> None:
    """Raise UserError for a prompt that is empty or of another vocabulary, PromptTooLong where the prompt and
    `new_tokens` exceed the context."""
    if not prompt_ids:
        raise UserError("the prompt is empty; it must have at least one token")
    if (wrong := next((t for t in prompt_ids if not 0 <= t < vocab_size), None)) is not None:
        raise UserError(
            f"the prompt has token {wrong}, but the model's vocabulary has {vocab_size}: it comes from another model's "
            "tokenizer"
        )
    if len(prompt_ids) + new_tokens > max_model_len:
        raise PromptTooLong(len(prompt_ids), new_tokens, max_model_len)


@dataclasses.dataclass(eq=False)
class Request:
    """A request. `unfinished` counts its sequences; the first sequence computes the prompt for all."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    arrived: float = dataclasses.field(default_factory=time.perf_counter)
    first_token: float | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[Logprobs | None] | None = None
    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    unfinished: int = 0


@dataclasses.dataclass(eq=False)
class Sequence:
    """One continuation of a request. The cache holds the first `computed` of its tokens (of a waiting sequence: when it
    was queued); `number` names it in block tables.

    original  of a copy with provisional tokens: the sequence that it was copied from
    """

    number: int
    request: Request
    index: int
    token_ids: list[int]
    state: SamplingState
    stopping: Stopping
    computed: int = 0
    # Whether it has run: cached blocks that it finds after a preemption may be its own.
    started: bool = False
    # Whether the prompt was ever computed completely: later prompt passes are recomputation.
    prefilled: bool = False
    # Steps skip the sequence until its grammar's mask is there (grammar_wait.py).
    waiting_for_grammar: bool = False
    original: Sequence | None = None

    def provisional_copy(self) -> Sequence:
        """Return a copy for provisional tokens; tokens appended to it do not change this sequence."""
        return dataclasses.replace(
            self, token_ids=list(self.token_ids), state=self.state.provisional_copy(), original=self
        )

    @property
    def reuses_prefix(self) -> bool:
        """Whether cached blocks may replace its first tokens: not while the logits of the prompt are needed."""
        return self.prefilled or self.request.params.prompt_logprobs is None

    @property
    def token_cost(self) -> int:
        """Share of a step's token budget per token: log probabilities of the prompt need the whole vocabulary, which
        costs about as much again as the tokens."""
        return 1 if self.reuses_prefix else 2

    @property
    def generating(self) -> bool:
        """Whether the next token to compute was generated, now or before a preemption."""
        return self.prefilled and self.computed >= len(self.request.prompt_ids)

    @property
    def decoding(self) -> bool:
        """Whether all tokens but the newest are in the cache."""
        return self.prefilled and self.computed == len(self.token_ids) - 1
