"""Engine outputs as responses. `Reply` is the interface of an endpoint's response; `ChunkReply` is OpenAI's of
/v1/completions and /v1/chat/completions.

A full response is converted from one chunk with the whole output, so that streamed and full responses agree.
"""

from __future__ import annotations

import abc
import dataclasses
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from mlaforge.engine.request.output import Completion, RequestOutput
from mlaforge.engine.sampling.logprobs import Logprobs
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.serving import wire
from mlaforge.serving.answer_parsers import AnswerParser
from mlaforge.serving.protocol import StreamOptions
from mlaforge.serving.token_text import Offsets, TokenText
from mlaforge.serving.wire import ApiError

# JSON has no -inf; vLLM writes this value for a token of probability zero.
MIN_LOGPROB = -9999.0


@dataclasses.dataclass
class Prompt:
    """One prompt of a request; `echo` repeats `text`."""

    token_ids: list[int]
    text: str = ""
    logprobs: list[Logprobs | None] | None = None


@dataclasses.dataclass
class Usage:
    """Token counts of a request, updated with each output."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: dict[str, int] = dataclasses.field(default_factory=dict)
    # Tokens of the reasoning of each choice; empty where the answer has no such part.
    reasoning: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached.values())

    @property
    def reasoning_tokens(self) -> int:
        return sum(self.reasoning.values())

    def as_dict(self) -> dict[str, Any]:
        details = {"completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens}} if self.reasoning else {}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **details,
        }


class Choice(Protocol):
    """Formatter of one continuation."""

    def chunk(self, new: Completion) -> dict[str, Any]:
        """Return a streamed chunk's choice for an incremental completion, without index and finish_reason."""

    def finish_reason(self, new: Completion) -> str | None:
        """Return the finish reason as this endpoint names it."""

    @property
    def reasoning_tokens(self) -> int | None:
        """Number of tokens of the reasoning so far; None where the answer has no such part."""


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def vllm_prompt_logprobs(prompt: list[Logprobs | None], tokens: TokenText) -> list[Any]:
    """Return vLLM's field `prompt_logprobs`: for each position None, or token id -> logprob and text."""
    return [
        None
        if position is None
        else {
            str(token): {"logprob": _finite(logprob), "decoded_token": tokens.text(token)}
            for token, logprob in ((position.token_id, position.logprob), *position.top)
        }
        for position in prompt
    ]


class TextChoice:
    """A choice of /v1/completions, with logprobs in OpenAI's legacy shape."""

    def __init__(self, form: TextForm, prompt: Prompt) -> None:
        self._form, self._prompt = form, prompt
        self._offsets = Offsets(form.tokens, form.params.skip_special_tokens)
        self._started = False

    def chunk(self, new: Completion) -> dict[str, Any]:
        form, prompt = self._form, self._prompt
        text = "" if form.scoring_only else new.text
        logprobs = [] if form.scoring_only else list(new.logprobs or ())
        choice: dict[str, Any] = {}
        positions: list[tuple[int, Logprobs | None]] = [(position.token_id, position) for position in logprobs]
        if not self._started:
            self._started = True
            if form.echo:
                text = prompt.text + text
                prompt_logprobs = prompt.logprobs or [None] * len(prompt.token_ids)
                positions = [*zip(prompt.token_ids, prompt_logprobs, strict=True), *positions]
            elif form.logprobs is not None:
                self._skip_prompt()
            if form.with_prompt_logprobs and prompt.logprobs is not None:
                choice["prompt_logprobs"] = vllm_prompt_logprobs(prompt.logprobs, form.tokens)
        choice["text"] = text
        choice["logprobs"] = None if form.logprobs is None else self._legacy(positions)
        if new.stop_reason is not None:
            choice["stop_reason"] = new.stop_reason
        return choice

    reasoning_tokens = None

    def finish_reason(self, new: Completion) -> str | None:
        return "length" if self._form.scoring_only and new.finish_reason else new.finish_reason

    def _skip_prompt(self) -> None:
        """Advance the offsets: OpenAI counts them from the beginning of the prompt, with or without echo."""
        for token_id in self._prompt.token_ids:
            self._offsets.next(token_id)

    def _legacy(self, positions: list[tuple[int, Logprobs | None]]) -> dict[str, Any]:
        text = self._form.token
        tops: list[dict[str, float] | None] = []
        for token_id, position in positions:
            if position is None:
                tops.append(None)
                continue
            top = {text(token): _finite(logprob) for token, logprob in position.top}
            top.setdefault(text(token_id), _finite(position.logprob))
            tops.append(top)
        return {
            "tokens": [text(token_id) for token_id, _ in positions],
            "token_logprobs": [None if position is None else _finite(position.logprob) for _, position in positions],
            "top_logprobs": tops,
            "text_offset": [self._offsets.next(token_id) for token_id, _ in positions],
        }


class ChatChoice:
    """A choice of /v1/chat/completions."""

    def __init__(self, form: ChatForm, prompt: Prompt) -> None:
        self._form, self._prompt = form, prompt
        self._parser = form.parser()
        self._started = False

    def chunk(self, new: Completion) -> dict[str, Any]:
        delta = self._parser.read(new)
        if "reasoning_content" in delta:
            # vLLM's newer name.
            delta["reasoning"] = delta["reasoning_content"]
        choice: dict[str, Any] = {}
        if not self._started:
            self._started = True
            delta = {"role": "assistant", "content": "", **delta}
            if self._form.with_prompt_logprobs and self._prompt.logprobs is not None:
                choice["prompt_logprobs"] = vllm_prompt_logprobs(self._prompt.logprobs, self._form.tokens)
        choice["delta"] = delta
        choice["logprobs"] = None
        if self._form.logprobs is not None:
            content = [self._entry(position) for position in new.logprobs or ()]
            choice["logprobs"] = {"content": content, "refusal": None}
        if new.stop_reason is not None:
            choice["stop_reason"] = new.stop_reason
        if self._parser.failed:
            choice["harmony_parse_error"] = True
        return choice

    def finish_reason(self, new: Completion) -> str | None:
        return "tool_calls" if self._parser.calls and new.finish_reason == "stop" else new.finish_reason

    @property
    def reasoning_tokens(self) -> int | None:
        return self._parser.reasoning_tokens

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._form.tokens.raw(token_id)
        return {"token": self._form.token(token_id), "logprob": _finite(logprob), "bytes": list(raw)}

    def _entry(self, position: Logprobs) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in position.top]
        return {**self._token(position.token_id, position.logprob), "top_logprobs": top}


@dataclasses.dataclass
class Form(abc.ABC):
    """Response format of one endpoint for one request."""

    model: str
    prompts: list[Prompt]
    params: SamplingParams
    tokens: TokenText
    logprobs: int | None = None
    with_prompt_logprobs: bool = False
    # Log probabilities name tokens by their ids, in vLLM's notation.
    tokens_as_ids: bool = False
    # What of the request has no effect; a response header names it.
    warnings: list[str] = dataclasses.field(default_factory=list)
    # Parameters for a grammar that cannot be followed, in the order in which they are tried.
    fallbacks: list[SamplingParams] = dataclasses.field(default_factory=list)

    id_prefix = ""
    response_object = ""
    chunk_object = ""

    def token(self, token_id: int) -> str:
        """Return a token as log probabilities name it."""
        return f"token_id:{token_id}" if self.tokens_as_ids else self.tokens.text(token_id)

    @abc.abstractmethod
    def choice(self, prompt: Prompt) -> Choice:
        """Return a new continuation of `prompt`."""

    @abc.abstractmethod
    def full_choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Convert a chunk's choice with the whole output to the choice of a full response."""


@dataclasses.dataclass
class TextForm(Form):
    """Format of /v1/completions. `scoring_only`: max_tokens was 0; the one token that the engine generates is
    omitted."""

    echo: bool = False
    scoring_only: bool = False

    id_prefix = "cmpl-"
    response_object = chunk_object = "text_completion"

    def choice(self, prompt: Prompt) -> Choice:
        return TextChoice(self, prompt)

    def full_choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        return choice


@dataclasses.dataclass
class ChatForm(Form):
    """Format of /v1/chat/completions."""

    parser: Callable[[], AnswerParser] = dataclasses.field(kw_only=True)

    id_prefix = "chatcmpl-"
    response_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, prompt: Prompt) -> Choice:
        return ChatChoice(self, prompt)

    def full_choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        message = choice.pop("delta")
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
            message["content"] = message["content"] or None
        return {"message": message, **choice}


class Reply(abc.ABC):
    """Converts the engine's outputs for one request to its response: to one JSON object, or with `stream` to
    server-sent events."""

    def __init__(self, form: Form, stream: bool) -> None:
        self.form, self.stream = form, stream
        self.id = self.new_id()
        self.usage = Usage(prompt_tokens=sum(len(prompt.token_ids) for prompt in form.prompts))
        self.request_ids = {f"{self.id}-{i}": i for i in range(len(form.prompts))}

    def new_id(self) -> str:
        """Return the id of the response."""
        return self.form.id_prefix + uuid.uuid4().hex

    def start(self) -> bytes:
        """Return the events before the first output."""
        return b""

    @abc.abstractmethod
    def events(self, output: RequestOutput, write: Callable[[Any], bytes]) -> bytes:
        """Return an output as events, or nothing if it changes nothing for the client. `write` serialises JSON."""

    @abc.abstractmethod
    def end(self) -> bytes:
        """Return the events after the last output."""

    def error(self, error: ApiError) -> bytes:
        """Return the last event of a stream that fails."""
        return wire.event(error.body())

    @abc.abstractmethod
    def full_response(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Return the response of a request that is not streamed."""


class ChunkReply(Reply):
    """Response in OpenAI's chunks: choices with what an output adds to them."""

    def __init__(self, form: Form, stream: bool, options: StreamOptions | None) -> None:
        super().__init__(form, stream)
        self._options = options or StreamOptions()
        self._choices: dict[int, Choice] = {}
        self._head = {"id": self.id, "created": int(time.time()), "model": form.model}

    def _chunk_choices(self, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the updated choices of an output, as in a chunk."""
        prompt_index = self.request_ids[output.request_id]
        prompt = self.form.prompts[prompt_index]
        if output.prompt_logprobs is not None:
            prompt.logprobs = output.prompt_logprobs
        self.usage.cached[output.request_id] = output.num_cached_tokens
        choices = []
        for new in output.outputs:
            index = prompt_index * self.form.params.n + new.index
            choice = self._choices.get(index) or self._choices.setdefault(index, self.form.choice(prompt))
            if not getattr(self.form, "scoring_only", False):
                self.usage.completion_tokens += len(new.token_ids)
            chunk = choice.chunk(new)
            if (reasoning_tokens := choice.reasoning_tokens) is not None:
                self.usage.reasoning[index] = reasoning_tokens
            choices.append({"index": index, **chunk, "finish_reason": choice.finish_reason(new)})
        return choices

    def events(self, output: RequestOutput, write: Callable[[Any], bytes]) -> bytes:
        fields = ("text", "delta", "prompt_logprobs", "finish_reason")
        usage: dict[str, Any] = {}
        events = []
        for choice in self._chunk_choices(output):
            if self._options.continuous_usage_stats:
                usage = {"usage": self.usage.as_dict()}
            if any(choice.get(name) for name in fields) or _has_tokens(choice["logprobs"]):
                chunk = {"object": self.form.chunk_object, **self._head, "choices": [choice], **usage}
                events.append(wire.event(chunk, write))
        return b"".join(events)

    def end(self) -> bytes:
        """With `include_usage` the last chunk has the usage and no choices."""
        if not self._options.include_usage:
            return wire.DONE
        chunk = {"object": self.form.chunk_object, **self._head, "choices": [], "usage": self.usage.as_dict()}
        return wire.event(chunk) + wire.DONE

    def full_response(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = [
            {"index": choice.pop("index"), **self.form.full_choice(choice)}
            for output in outputs
            for choice in self._chunk_choices(output)
        ]
        return {
            "object": self.form.response_object, **self._head, "choices": choices, "usage": self.usage.as_dict(),
        }  # fmt: skip


def _has_tokens(logprobs: dict[str, Any] | None) -> bool:
    return logprobs is not None and any(logprobs.values())
