"""Outputs of requests: for each step and request, only what is new."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mlaforge.engine.sampling.logprobs import Logprobs
from mlaforge.runtime import UserError


@dataclasses.dataclass
class Completion:
    """New tokens and text of one of a request's `n` continuations. `finish_reason` is set once, in its last output."""

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[Logprobs] | None = None
    # "stop" (end of text, stop id or stop string), "length", "abort", "error" (see RequestOutput.error), "tool_calls"
    # (LLM.chat with tools, some of them called), or None while the continuation runs.
    finish_reason: str | None = None
    # The stop string or token id that ended it; None for the model's own end of text.
    stop_reason: str | int | None = None
    # From LLM.chat: the reasoning before the answer, which is not in `text`.
    reasoning_content: str = ""
    # From LLM.chat with tools: the tool calls in OpenAI's format. A streamed call comes in pieces: the first has id and
    # name, and each adds to the arguments, which are JSON text.
    tool_calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    # Whether a part of the answer so far could not be parsed as harmony.
    harmony_parse_error: bool = False


class NonFiniteLogits(UserError):
    """The model's logits had NaN or infinity, which is not the request's fault. `outputs`: from `LLM.generate` and
    `LLM.chat`, the outputs of all requests."""

    outputs: Sequence[RequestOutput] = ()

    @staticmethod
    def explain(format: str) -> str:
        """Return what is wrong with a model whose weights have this format, and what would be right."""
        right = "its weights may be damaged (mlaforge verify DIR)"
        if format == "float16":
            right = "float16 ends at 65504; load it with dtype bfloat16 or float32"
        return f"the model's logits have NaN or infinity in {format}: {right}"


@dataclasses.dataclass
class RequestOutput:
    """What is new of a request since its last output.

    `prompt` is the text that LLM was given; None for token ids and conversations. `prompt_logprobs` comes once, with
    the first output; its first entry is None (nothing precedes it). `num_cached_tokens` counts the prompt tokens that
    came from the prefix cache. Times are seconds of time.perf_counter(). `error` says why the request ended early: its
    grammar became too costly to follow, or, with `non_finite`, the model's logits had NaN or infinity.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Completion]
    finished: bool = False
    prompt_logprobs: list[Logprobs | None] | None = None
    num_cached_tokens: int = 0
    arrived: float = 0.0
    first_token: float | None = None
    prompt: str | None = None
    error: str | None = None
    non_finite: bool = False

    def raise_for_error(self) -> None:
        """Raise UserError, or its subclass NonFiniteLogits, where the request ended with an error."""
        if self.error is not None:
            raise (NonFiniteLogits if self.non_finite else UserError)(self.error)


def _merge_completions(old: Completion, new: Completion) -> Completion:
    logprobs = None
    if old.logprobs is not None or new.logprobs is not None:
        logprobs = [*(old.logprobs or ()), *(new.logprobs or ())]
    return Completion(
        old.index,
        old.token_ids + new.token_ids,
        old.text + new.text,
        logprobs,
        new.finish_reason or old.finish_reason,
        old.stop_reason if new.stop_reason is None else new.stop_reason,
        old.reasoning_content + new.reasoning_content,
        _merge_calls(old.tool_calls, new.tool_calls),
        old.harmony_parse_error or new.harmony_parse_error,
    )


def _merge_calls(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    calls = {call["index"]: call for call in old}
    for call in new:
        if (known := calls.get(call["index"])) is not None:
            arguments = known["function"]["arguments"] + call["function"]["arguments"]
            call = {**known, "function": {**known["function"], "arguments": arguments}}
        calls[call["index"]] = call
    return list(calls.values())


def merge(old: RequestOutput, new: RequestOutput) -> RequestOutput:
    """Merge two consecutive outputs of a request into one."""
    completions = {c.index: c for c in old.outputs}
    for c in new.outputs:
        completions[c.index] = _merge_completions(completions[c.index], c) if c.index in completions else c
    return dataclasses.replace(
        new,
        outputs=[completions[index] for index in sorted(completions)],
        finished=old.finished or new.finished,
        prompt_logprobs=old.prompt_logprobs if new.prompt_logprobs is None else new.prompt_logprobs,
        num_cached_tokens=max(old.num_cached_tokens, new.num_cached_tokens),
        first_token=new.first_token if old.first_token is None else old.first_token,
    )
