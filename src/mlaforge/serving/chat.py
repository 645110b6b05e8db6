"""Chat requests as prompts, and generated text as a chat message: by the model's template, or by harmony."""

from __future__ import annotations

import json
from typing import Any, Protocol

from mlaforge.engine.request import chat_template
from mlaforge.engine.request.harmony import FIELDS, Harmony, MessageError
from mlaforge.engine.request.output import Completion
from mlaforge.runtime import UserError
from mlaforge.serving.protocol import ChatMessage, ChatRequest
from mlaforge.serving.wire import ApiError

# What tokenizers take besides the template's variables: a request may not set these through chat_template_kwargs.
_RESERVED = frozenset({
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "tokenizer", "self",
})  # fmt: skip


class AnswerParser(Protocol):
    """Reads one choice's answer. `failed`: it was no harmony after all; `calls`: tools called so far."""

    @property
    def failed(self) -> bool: ...
    @property
    def calls(self) -> int: ...

    def read(self, new: Completion) -> dict[str, Any]:
        """What a completion's news add to the message."""


class PlainParser:
    """Everything is content. Calls of tools stay in the text as the model writes them."""

    failed = False
    calls = 0

    def read(self, new: Completion) -> dict[str, Any]:
        return {"content": new.text} if new.text else {}


class ChannelParser:
    """Tokens, not text, are read: harmony's structure is in its special tokens."""

    def __init__(self, spoken: Harmony) -> None:
        self._parser = spoken.parser()

    @property
    def failed(self) -> bool:
        return self._parser.failed

    @property
    def calls(self) -> int:
        return self._parser.calls

    def read(self, new: Completion) -> dict[str, Any]:
        return self._parser.feed(new.token_ids, new.finish_reason is not None)


class Chat:
    """How one model is talked with: in harmony, or by its chat template."""

    def __init__(self, tokenizer: Any, spoken: Harmony | None) -> None:
        self._tokenizer = tokenizer
        self.harmony = spoken

    def prompt(self, request: ChatRequest) -> list[int]:
        """The request's prompt as token ids. Raises ApiError (400)."""
        return self._by_template(request) if self.harmony is None else self._in_harmony(self.harmony, request)

    def parser(self) -> AnswerParser:
        return PlainParser() if self.harmony is None else ChannelParser(self.harmony)

    def sampling(self, request: ChatRequest) -> dict[str, Any]:
        """What talking so changes in the sampling parameters. Raises ApiError (400)."""
        if self.harmony is None:
            return {}
        for name in ("response_format", "regex", "guided_regex", "guided_json", "stop"):
            value = getattr(request, name)
            if value and getattr(value, "type", "") != "text":
                why = f"{name} would bind harmony's channels too; use --no-harmony, or say it in a message"
                raise ApiError(400, why, name, "unsupported_parameter")
        stops = () if request.ignore_eos else self.harmony.stop_token_ids
        return {"stop_token_ids": (*request.stop_token_ids, *stops)}

    def _in_harmony(self, spoken: Harmony, request: ChatRequest) -> list[int]:
        if request.continue_final_message or not request.add_generation_prompt:
            raise ApiError(400, "with harmony the answer is always a new message", "add_generation_prompt")
        if request.chat_template_kwargs:
            raise ApiError(400, "with harmony there is no chat template", "chat_template_kwargs")
        messages = [
            {**message.model_dump(include=set(FIELDS), exclude_none=True), "content": message.text}
            for message in request.messages
        ]
        try:
            return spoken.render(messages, _tools(request), request.reasoning_effort)
        except MessageError as error:
            raise ApiError(400, str(error), error.field) from error

    def _by_template(self, request: ChatRequest) -> list[int]:
        if not self._tokenizer.chat_template:
            raise ApiError(400, "this model has no chat template; use /v1/completions", "messages")
        if reserved := sorted(_RESERVED & request.chat_template_kwargs.keys()):
            raise ApiError(400, f"chat_template_kwargs may not set {reserved[0]}", "chat_template_kwargs")
        if request.continue_final_message and request.add_generation_prompt:
            raise ApiError(400, "continue_final_message needs add_generation_prompt = false", "continue_final_message")
        variables = {
            **request.chat_template_kwargs,
            "add_generation_prompt": request.add_generation_prompt,
            "continue_final_message": request.continue_final_message,
        }
        if request.reasoning_effort is not None:
            variables["reasoning_effort"] = request.reasoning_effort
        if tools := _tools(request):
            variables["tools"] = tools
        messages = [_plain(message, f"messages.{i}") for i, message in enumerate(request.messages)]
        try:
            return chat_template.render(self._tokenizer, messages, variables, bool(request.add_special_tokens))
        except UserError as error:
            raise ApiError(400, str(error), "messages") from error


def _tools(request: ChatRequest) -> list[dict[str, Any]]:
    """The tools that the model is told of, as plain objects."""
    return [tool.model_dump(exclude_none=True) for tool in request.tools] if request.tool_choice == "auto" else []


def _plain(message: ChatMessage, where: str) -> dict[str, Any]:
    """A message as templates take it: text content, calls' arguments as objects."""
    plain: dict[str, Any] = {"role": message.role, "content": message.text}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, where)},
            }
            for call in message.tool_calls
        ]
    return plain


def _arguments(text: str, where: str) -> Any:
    """A call's arguments, which the API carries as JSON text. Raises ApiError (400)."""
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{where}: a call's arguments are not JSON", f"{where}.tool_calls") from error
