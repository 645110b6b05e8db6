"""Chat requests as prompts, and generated text as a chat message: by the model's template, or by harmony."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from mlaforge.engine.request import chat_template
from mlaforge.engine.request.conversation import MessageError
from mlaforge.engine.request.harmony import FIELDS, Harmony
from mlaforge.engine.request.output import Completion
from mlaforge.serving.harmony_process import HarmonyProcesses
from mlaforge.serving.prompts import Prompts
from mlaforge.serving.protocol import ChatMessage, ChatRequest, NamedTool
from mlaforge.serving.tool_calls import CallsReader, begun_call
from mlaforge.serving.wire import ApiError, parse

# What tokenizers take besides the template's variables: a request may not set these through chat_template_kwargs.
_RESERVED = frozenset({
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "tokenizer", "self",
})  # fmt: skip


class AnswerParser(Protocol):
    """Reads one choice's answer. `failed`: a part of it is no harmony; `calls`: tools called so far, of the model's
    own accord or as one of several."""

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

    def __init__(self, spoken: Harmony, tools: list[dict[str, Any]]) -> None:
        self._parser = spoken.parser(tools)

    @property
    def failed(self) -> bool:
        return self._parser.failed

    @property
    def calls(self) -> int:
        return self._parser.calls

    def read(self, new: Completion) -> dict[str, Any]:
        return self._parser.feed(new.token_ids, new.finish_reason is not None)


class CallsParser:
    """A list of calls, as the schema of `tool_choice: required` has the model write it."""

    failed = False

    def __init__(self) -> None:
        self._reader = CallsReader()

    @property
    def calls(self) -> int:
        return self._reader.calls

    def read(self, new: Completion) -> dict[str, Any]:
        added = self._reader.read(new.text)
        return {"tool_calls": added} if added else {}


class NamedCallParser:
    """Everything is the arguments of one tool. As OpenAI and vLLM have it, such an answer ends with `stop`."""

    failed = False
    calls = 0

    def __init__(self, name: str) -> None:
        self._call = begun_call(0, name)

    def read(self, new: Completion) -> dict[str, Any]:
        if not new.text:
            return {}
        call, self._call = self._call, {"index": 0, "function": {}}
        return {"tool_calls": [{**call, "function": {**call["function"], "arguments": new.text}}]}


class Chat:
    """How one model is talked with: in harmony, or by its chat template."""

    def __init__(self, tokenizer: Any, spoken: Harmony | None, prompts: Prompts, ignored_tools: str = "error") -> None:
        self._tokenizer, self._prompts, self._ignored_tools = tokenizer, prompts, ignored_tools
        self.harmony = spoken
        self._processes = None if spoken is None else HarmonyProcesses(spoken)

    def prompt(self, request: ChatRequest) -> list[int]:
        """The request's prompt as token ids. Raises ApiError (400), PromptTooLong."""
        return self._by_template(request) if self._processes is None else self._in_harmony(self._processes, request)

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()

    def parser(self, request: ChatRequest) -> Callable[[], AnswerParser]:
        """What makes the parsers of the request's answers."""
        if self.harmony is not None:
            return functools.partial(ChannelParser, self.harmony, _tools(request))
        if isinstance(request.tool_choice, NamedTool):
            return functools.partial(NamedCallParser, request.tool_choice.function.name)
        return CallsParser if request.tool_choice == "required" else PlainParser

    def sampling(self, request: ChatRequest) -> dict[str, Any]:
        """What talking so changes in the sampling parameters. Raises ApiError (400)."""
        if self.harmony is None:
            return {}
        for name in (
            "response_format", "regex", "guided_regex", "guided_json", "structured_outputs", "stop", "tool_choice",
        ):  # fmt: skip
            value = getattr(request, name)
            if value and value not in ("auto", "none") and getattr(value, "type", "") != "text":
                why = f"{name} would bind harmony's channels too; use --no-harmony, or say it in a message"
                raise ApiError(400, why, name, "unsupported_parameter")
        stops = () if request.ignore_eos else self.harmony.stop_token_ids
        return {"stop_token_ids": (*request.stop_token_ids, *stops)}

    def _in_harmony(self, processes: HarmonyProcesses, request: ChatRequest) -> list[int]:
        if request.continue_final_message or not request.add_generation_prompt:
            raise ApiError(400, "with harmony the answer is always a new message", "add_generation_prompt")
        if request.chat_template_kwargs:
            raise ApiError(400, "with harmony there is no chat template", "chat_template_kwargs")
        messages = [message.model_dump(include=set(FIELDS), exclude_none=True) for message in request.messages]
        self._prompts.check("\n".join(message.text for message in request.messages))
        try:
            return processes.render(messages, _tools(request), request.reasoning_effort)
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
        # A forced call has the tool's schema in its grammar: the tools are not lost.
        ignored = self._ignored_tools if request.forced is None else "log"
        try:
            text = chat_template.text(
                self._tokenizer, [_plain(message, f"messages.{i}") for i, message in enumerate(request.messages)],
                tools=_tools(request), reasoning_effort=request.reasoning_effort, variables=variables,
                ignored_tools=ignored,
            )  # fmt: skip
        except MessageError as error:
            raise ApiError(400, str(error), error.field) from error
        return self._prompts.encode(text, bool(request.add_special_tokens))


def _tools(request: ChatRequest) -> list[dict[str, Any]]:
    """The tools that the model is told of, as plain objects."""
    return [] if request.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in request.tools]


def _plain(message: ChatMessage, where: str) -> dict[str, Any]:
    """A message with the fields that templates know. Calls' arguments are parsed here, where JSON has its limits."""
    plain = message.model_dump(include=set(FIELDS), exclude_none=True)
    for call in plain.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"], where)
    return plain


def _arguments(text: str, where: str) -> dict[str, Any]:
    """A call's arguments, which the API carries as JSON text. Raises ApiError (400)."""
    try:
        arguments = parse(text or "{}")
    except ValueError as error:
        raise ApiError(400, f"{where}: a call's arguments are not JSON", f"{where}.tool_calls") from error
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{where}: a call's arguments are no JSON object", f"{where}.tool_calls")
    return arguments
