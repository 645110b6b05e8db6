"""Chat requests to prompts and generated text to chat messages, by the model's chat template or by harmony."""

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
from mlaforge.serving.tool_calls import CallsReader, new_call
from mlaforge.serving.wire import ApiError, parse

# Arguments of tokenizers that are not template variables: chat_template_kwargs may not set them.
_RESERVED = frozenset({
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "tokenizer", "self",
})  # fmt: skip


class AnswerParser(Protocol):
    """Incremental parser of one choice. `failed`: a part of the text is not valid harmony; `calls`: number of tool
    calls so far, except that of a named tool."""

    @property
    def failed(self) -> bool: ...
    @property
    def calls(self) -> int: ...

    def read(self, new: Completion) -> dict[str, Any]:
        """Return the message delta of an incremental completion."""


class PlainParser:
    """All text is content. Tool calls stay in the text as the model writes them."""

    failed = False
    calls = 0

    def read(self, new: Completion) -> dict[str, Any]:
        return {"content": new.text} if new.text else {}


class ChannelParser:
    """Parses tokens, not text: the structure of harmony is in its special tokens."""

    def __init__(self, harmony: Harmony, tools: list[dict[str, Any]]) -> None:
        self._parser = harmony.parser(tools)

    @property
    def failed(self) -> bool:
        return self._parser.failed

    @property
    def calls(self) -> int:
        return self._parser.calls

    def read(self, new: Completion) -> dict[str, Any]:
        return self._parser.feed(new.token_ids, new.finish_reason is not None)


class CallsParser:
    """Parses the list of calls that the schema of `tool_choice: required` prescribes."""

    failed = False

    def __init__(self) -> None:
        self._reader = CallsReader()

    @property
    def calls(self) -> int:
        return self._reader.calls

    def read(self, new: Completion) -> dict[str, Any]:
        deltas = self._reader.read(new.text)
        return {"tool_calls": deltas} if deltas else {}


class NamedCallParser:
    """All text is the arguments of one tool. Such an answer ends with `stop`, as with OpenAI and vLLM."""

    failed = False
    calls = 0

    def __init__(self, name: str) -> None:
        self._call = new_call(0, name)

    def read(self, new: Completion) -> dict[str, Any]:
        if not new.text:
            return {}
        call, self._call = self._call, {"index": 0, "function": {}}
        return {"tool_calls": [{**call, "function": {**call["function"], "arguments": new.text}}]}


class Chat:
    """The chat format of one model: harmony, or its chat template."""

    def __init__(self, tokenizer: Any, harmony: Harmony | None, prompts: Prompts, ignored_tools: str = "error") -> None:
        self._tokenizer, self._prompts, self._ignored_tools = tokenizer, prompts, ignored_tools
        self.harmony = harmony
        self._processes = None if harmony is None else HarmonyProcesses(harmony)

    def prompt(self, request: ChatRequest) -> list[int]:
        """Return the prompt's token ids. Raises ApiError (400), PromptTooLong."""
        if self._processes is None:
            return self._template_prompt(request)
        return self._harmony_prompt(self._processes, request)

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()

    def parser(self, request: ChatRequest) -> Callable[[], AnswerParser]:
        """Return the factory of the parsers for the request's choices."""
        if self.harmony is not None:
            return functools.partial(ChannelParser, self.harmony, _tools(request))
        if isinstance(request.tool_choice, NamedTool):
            return functools.partial(NamedCallParser, request.tool_choice.function.name)
        return CallsParser if request.tool_choice == "required" else PlainParser

    def sampling(self, request: ChatRequest) -> dict[str, Any]:
        """Return the sampling parameters that the chat format sets. Raises ApiError (400)."""
        if self.harmony is None:
            return {}
        for name in (
            "response_format", "regex", "guided_regex", "guided_json", "structured_outputs", "stop", "tool_choice",
        ):  # fmt: skip
            value = getattr(request, name)
            if value and value not in ("auto", "none") and getattr(value, "type", "") != "text":
                reason = f"{name} would constrain harmony's channels, too; use --no-harmony, or state it in a message"
                raise ApiError(400, reason, name, "unsupported_parameter")
        stops = () if request.ignore_eos else self.harmony.stop_token_ids
        return {"stop_token_ids": (*request.stop_token_ids, *stops)}

    def _harmony_prompt(self, processes: HarmonyProcesses, request: ChatRequest) -> list[int]:
        if request.continue_final_message or not request.add_generation_prompt:
            raise ApiError(400, "with harmony the answer is always a new message", "add_generation_prompt")
        if request.chat_template_kwargs:
            raise ApiError(400, "harmony uses no chat template", "chat_template_kwargs")
        messages = [message.model_dump(include=set(FIELDS), exclude_none=True) for message in request.messages]
        self._prompts.check("\n".join(message.text for message in request.messages))
        try:
            return processes.render(messages, _tools(request), request.reasoning_effort)
        except MessageError as error:
            raise ApiError(400, str(error), error.field) from error

    def _template_prompt(self, request: ChatRequest) -> list[int]:
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
        # A forced call has the tool's schema in its grammar, so the template may ignore the tools.
        ignored = self._ignored_tools if request.forced_tools is None else "log"
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
    """Return the tools that the prompt describes, as plain objects."""
    return [] if request.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in request.tools]


def _plain(message: ChatMessage, where: str) -> dict[str, Any]:
    """Return a message with the fields that templates know. Arguments of tool calls are parsed here, where the size of
    JSON is limited."""
    plain = message.model_dump(include=set(FIELDS), exclude_none=True)
    for call in plain.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"], where)
    return plain


def _arguments(text: str, where: str) -> dict[str, Any]:
    """Return the arguments of a tool call, which the API carries as JSON text. Raises ApiError (400)."""
    try:
        arguments = parse(text or "{}")
    except ValueError as error:
        raise ApiError(400, f"{where}: a call's arguments are not JSON", f"{where}.tool_calls") from error
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{where}: a call's arguments must be a JSON object", f"{where}.tool_calls")
    return arguments
