"""A request and its continuations, as the scheduler and the engine see them."""

from __future__ import annotations

import dataclasses
import time

from mlaforge.engine.request.stopping import Stopping
from mlaforge.engine.sampling.logprobs import Logprobs
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.sampling.state import SamplingState
from mlaforge.runtime import UserError


class PromptTooLong(UserError):
    """The model's context has no room for a prompt and what is to come after it. The words are those by which clients
    of OpenAI's and vLLM's servers know it. `field` is what must be smaller: "prompt" or "max_tokens".

    tokens       of the prompt, or `at_least` so many
    new_tokens   that are to come after it
    """

    def __init__(self, tokens: int, new_tokens: int, max_model_len: int, at_least: bool = False) -> None:
        count = f"at least {tokens}" if at_least else str(tokens)
        # Beside a prompt that leaves no room for one token, how many were asked for does not matter.
        room = max(0, max_model_len - min(new_tokens, 1))
        self.field = "prompt" if tokens > room else "max_tokens"
        why = f"the prompt has {count} tokens, and there is room for {room}; shorten the prompt"
        if self.field == "max_tokens":
            most = f"at most {max_model_len - tokens}"
            why = f"the prompt has {count} tokens and max_tokens is {new_tokens}; set max_tokens to {most}"
            if not at_least:
                why += ", or shorten the prompt"
        super().__init__(f"This model's maximum context length is {max_model_len} tokens, but {why}")


def check_prompt(prompt_ids: list[int], vocab_size: int, max_model_len: int, new_tokens: int) -> None:
    """UserError for a prompt that is empty or of another vocabulary, PromptTooLong where `new_tokens` do not fit beside
    it into the context."""
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
    """What was asked for. `unfinished` counts continuations; the first one computes the prompt for all."""

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
    """One continuation. The cache holds the first `computed` of its tokens; `number` is its name in block tables.

    `judged`: of a copy that runs ahead by tokens that wait to be judged, the sequence itself."""

    number: int
    request: Request
    index: int
    token_ids: list[int]
    state: SamplingState
    stopping: Stopping
    computed: int = 0
    # Whether a full prompt pass was ever finished: what comes after it is recomputation.
    prefilled: bool = False
    # Left out of steps until its grammar's mask is there (held.py).
    held: bool = False
    judged: Sequence | None = None

    def ahead(self) -> Sequence:
        """A copy for tokens that wait to be judged: whatever it is given, this one stays as it is."""
        return dataclasses.replace(self, token_ids=list(self.token_ids), state=self.state.ahead(), judged=self)

    @property
    def reuse(self) -> bool:
        """Whether cached blocks may stand for its first tokens: not while the prompt's own logits are wanted."""
        return self.prefilled or self.request.params.prompt_logprobs is None

    @property
    def price(self) -> int:
        """What one of its tokens takes of a step's budget: a prompt's own log probabilities, which pass through the
        whole vocabulary, cost about as much again as the tokens."""
        return 1 if self.reuse else 2

    @property
    def generating(self) -> bool:
        """Whether the next token to be computed was generated, now or before a preemption."""
        return self.prefilled and self.computed >= len(self.request.prompt_ids)

    @property
    def decoding(self) -> bool:
        """Whether all but the newest token is in the cache."""
        return self.prefilled and self.computed == len(self.token_ids) - 1
