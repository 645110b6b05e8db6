"""Engine outputs as OpenAI's JSON. A whole answer is the same as one chunk that holds everything, so that streaming and
not streaming cannot disagree.
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
from mlaforge.serving.chat import AnswerParser
from mlaforge.serving.token_text import Offsets, TokenText

# JSON has no -inf: what vLLM writes for a token that cannot come.
LEAST_LOGPROB = -9999.0


@dataclasses.dataclass
class Prompt:
    """One prompt of a request; `text` is what `echo` repeats."""

    token_ids: list[int]
    text: str = ""
    logprobs: list[Logprobs | None] | None = None


@dataclasses.dataclass
class Usage:
    """Tokens of a request, counted as its outputs come."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: dict[str, int] = dataclasses.field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


class Choice(Protocol):
    """One continuation on its way to the client."""

    def chunk(self, new: Completion) -> dict[str, Any]:
        """What a streamed chunk's choice says of the news, without index and finish_reason."""

    def finish_reason(self, new: Completion) -> str | None:
        """The reason as this endpoint names it."""


def _number(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def vllm_prompt_logprobs(prompt: list[Logprobs | None], tokens: TokenText) -> list[Any]:
    """vLLM's field `prompt_logprobs`: per position None or token id -> its logprob and text."""
    return [
        None
        if at is None
        else {
            str(token): {"logprob": _number(logprob), "decoded_token": tokens.text(token)}
            for token, logprob in ((at.token_id, at.logprob), *at.top)
        }
        for at in prompt
    ]


class TextChoice:
    """A choice of /v1/completions, with logprobs in OpenAI's legacy shape."""

    def __init__(self, form: TextForm, prompt: Prompt) -> None:
        self._form, self._prompt = form, prompt
        self._offsets = Offsets(form.tokens, form.params.skip_special_tokens)
        self._begun = False

    def chunk(self, new: Completion) -> dict[str, Any]:
        form, prompt = self._form, self._prompt
        text = "" if form.scoring_only else new.text
        logprobs = [] if form.scoring_only else list(new.logprobs or ())
        choice: dict[str, Any] = {}
        positions: list[tuple[int, Logprobs | None]] = [(at.token_id, at) for at in logprobs]
        if not self._begun:
            self._begun = True
            if form.echo:
                text = prompt.text + text
                known = prompt.logprobs or [None] * len(prompt.token_ids)
                positions = [*zip(prompt.token_ids, known, strict=True), *positions]
            elif form.logprobs is not None:
                self._skip_prompt()
            if form.wants_prompt_logprobs and prompt.logprobs is not None:
                choice["prompt_logprobs"] = vllm_prompt_logprobs(prompt.logprobs, form.tokens)
        choice["text"] = text
        choice["logprobs"] = None if form.logprobs is None else self._legacy(positions)
        if new.stop_reason is not None:
            choice["stop_reason"] = new.stop_reason
        return choice

    def finish_reason(self, new: Completion) -> str | None:
        return "length" if self._form.scoring_only and new.finish_reason else new.finish_reason

    def _skip_prompt(self) -> None:
        """OpenAI counts offsets from the prompt's beginning, echoed or not."""
        for token_id in self._prompt.token_ids:
            self._offsets.place(token_id)

    def _legacy(self, positions: list[tuple[int, Logprobs | None]]) -> dict[str, Any]:
        text = self._form.token
        tops: list[dict[str, float] | None] = []
        for token_id, at in positions:
            if at is None:
                tops.append(None)
                continue
            top = {text(token): _number(logprob) for token, logprob in at.top}
            top.setdefault(text(token_id), _number(at.logprob))
            tops.append(top)
        return {
            "tokens": [text(token_id) for token_id, _ in positions],
            "token_logprobs": [None if at is None else _number(at.logprob) for _, at in positions],
            "top_logprobs": tops,
            "text_offset": [self._offsets.place(token_id) for token_id, _ in positions],
        }


class ChatChoice:
    """A choice of /v1/chat/completions."""

    def __init__(self, form: ChatForm, prompt: Prompt) -> None:
        self._form, self._prompt = form, prompt
        self._parser = form.parser()
        self._begun = False

    def chunk(self, new: Completion) -> dict[str, Any]:
        delta = self._parser.read(new)
        choice: dict[str, Any] = {}
        if not self._begun:
            self._begun = True
            delta = {"role": "assistant", "content": "", **delta}
            if self._form.wants_prompt_logprobs and self._prompt.logprobs is not None:
                choice["prompt_logprobs"] = vllm_prompt_logprobs(self._prompt.logprobs, self._form.tokens)
        choice["delta"] = delta
        choice["logprobs"] = None
        if self._form.logprobs is not None:
            choice["logprobs"] = {"content": [self._entry(at) for at in new.logprobs or ()], "refusal": None}
        if new.stop_reason is not None:
            choice["stop_reason"] = new.stop_reason
        if self._parser.failed:
            choice["harmony_parse_error"] = True
        return choice

    def finish_reason(self, new: Completion) -> str | None:
        return "tool_calls" if self._parser.calls and new.finish_reason == "stop" else new.finish_reason

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._form.tokens.raw(token_id)
        return {"token": self._form.token(token_id), "logprob": _number(logprob), "bytes": list(raw)}

    def _entry(self, at: Logprobs) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in at.top]
        return {**self._token(at.token_id, at.logprob), "top_logprobs": top}


@dataclasses.dataclass
class Form(abc.ABC):
    """How one endpoint answers one request."""

    model: str
    prompts: list[Prompt]
    params: SamplingParams
    tokens: TokenText
    logprobs: int | None = None
    wants_prompt_logprobs: bool = False
    # Log probabilities name tokens by their ids, as vLLM writes them.
    tokens_as_ids: bool = False

    prefix = ""
    whole_object = ""
    chunk_object = ""

    def token(self, token_id: int) -> str:
        """A token as log probabilities name it."""
        return f"token_id:{token_id}" if self.tokens_as_ids else self.tokens.text(token_id)

    @abc.abstractmethod
    def choice(self, prompt: Prompt) -> Choice:
        """A new continuation of `prompt`."""

    @abc.abstractmethod
    def whole(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A chunk's choice that holds everything, as the choice of a whole answer."""


@dataclasses.dataclass
class TextForm(Form):
    """/v1/completions. `scoring_only`: max_tokens was 0; the one token that the engine makes is not told."""

    echo: bool = False
    scoring_only: bool = False

    prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def choice(self, prompt: Prompt) -> Choice:
        return TextChoice(self, prompt)

    def whole(self, choice: dict[str, Any]) -> dict[str, Any]:
        return choice


@dataclasses.dataclass
class ChatForm(Form):
    """/v1/chat/completions."""

    parser: Callable[[], AnswerParser] = dataclasses.field(kw_only=True)

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, prompt: Prompt) -> Choice:
        return ChatChoice(self, prompt)

    def whole(self, choice: dict[str, Any]) -> dict[str, Any]:
        message = choice.pop("delta")
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
            message["content"] = message["content"] or None
        return {"message": message, **choice}


class Reply:
    """All choices of one request, from the engine's outputs to JSON objects."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.id = form.prefix + uuid.uuid4().hex
        self.usage = Usage(prompt_tokens=sum(len(prompt.token_ids) for prompt in form.prompts))
        self.request_ids = {f"{self.id}-{i}": i for i in range(len(form.prompts))}
        self._choices: dict[int, Choice] = {}
        self._head = {"id": self.id, "created": int(time.time()), "model": form.model}

    def _chunk_choices(self, output: RequestOutput) -> list[dict[str, Any]]:
        """Each choice that has news, as a chunk's choice."""
        which = self.request_ids[output.request_id]
        prompt = self.form.prompts[which]
        if output.prompt_logprobs is not None:
            prompt.logprobs = output.prompt_logprobs
        self.usage.cached[output.request_id] = output.num_cached_tokens
        choices = []
        for new in output.outputs:
            index = which * self.form.params.n + new.index
            choice = self._choices.get(index) or self._choices.setdefault(index, self.form.choice(prompt))
            if not getattr(self.form, "scoring_only", False):
                self.usage.completion_tokens += len(new.token_ids)
            news = choice.chunk(new)
            choices.append({"index": index, **news, "finish_reason": choice.finish_reason(new)})
        return choices

    def chunks(self, output: RequestOutput) -> list[dict[str, Any]]:
        """The streamed chunks of an output; what a client would not notice is left out."""
        fields = ("text", "delta", "prompt_logprobs", "finish_reason")
        return [
            {"object": self.form.chunk_object, **self._head, "choices": [choice]}
            for choice in self._chunk_choices(output)
            if any(choice.get(name) for name in fields) or _has_tokens(choice["logprobs"])
        ]

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk where the client asked for usage."""
        return {"object": self.form.chunk_object, **self._head, "choices": [], "usage": self.usage.as_dict()}

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The answer of a request that is not streamed."""
        choices = [
            {"index": choice.pop("index"), **self.form.whole(choice)}
            for output in outputs
            for choice in self._chunk_choices(output)
        ]
        return {
            "object": self.form.whole_object, **self._head, "choices": choices, "usage": self.usage.as_dict(),
        }  # fmt: skip


def _has_tokens(logprobs: dict[str, Any] | None) -> bool:
    return logprobs is not None and any(logprobs.values())
