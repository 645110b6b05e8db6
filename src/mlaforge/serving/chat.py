"""Chat requests to prompts and generated text to chat messages, by the model's chat template or by harmony."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from mlaforge.engine.request import chat_template
from mlaforge.engine.request.conversation import MessageError
from mlaforge.engine.request.harmony import FIELDS, Harmony
from mlaforge.engine.request.harmony_grammar import calls_grammar
from mlaforge.engine.request.text_format import PLAIN, PROMPT_END, TextFormat
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import log
from mlaforge.serving.answer_parsers import (
    AnswerParser,
    CallsParser,
    ChannelParser,
    NamedCallParser,
    PlainParser,
    TextAnswerParser,
)
from mlaforge.serving.harmony_process import HarmonyProcesses
from mlaforge.serving.prompts import Prompts
from mlaforge.serving.protocol import ChatMessage, ChatRequest, NamedTool
from mlaforge.serving.strict import log_ignored
from mlaforge.serving.wire import ApiError, parse

# Efforts of OpenAI's API for models with three of them. Harmony always reasons.
_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high"}

# Arguments of tokenizers that are not template variables: chat_template_kwargs may not set them.
_RESERVED = frozenset({
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "tokenizer", "self",
})  # fmt: skip


class Chat:
    """The chat format of one model: harmony, or its chat template."""

    def __init__(
        self,
        tokenizer: Any,
        harmony: Harmony | None,
        prompts: Prompts,
        require_tool_template: bool = False,
        text_format: TextFormat = PLAIN,
    ) -> None:
        self._tokenizer, self._prompts, self._require_tool_template = tokenizer, prompts, require_tool_template
        self._text_format = text_format
        self.harmony = harmony
        self._processes = None if harmony is None else HarmonyProcesses(harmony)
        if harmony is None and not text_format.plain:
            names = ("tool calls", text_format.tool_parser), ("reasoning", text_format.reasoning_parser)
            log("chat: " + ", ".join(f"{what} as {name}" for what, name in names if name))
        self.ignores_tools = harmony is None and chat_template.ignores_tools(tokenizer)

    def prompt(self, request: ChatRequest) -> list[int]:
        """Return the prompt's token ids. Raises ApiError (400), PromptTooLong."""
        if self._processes is None:
            return self._template_prompt(request)
        return self._harmony_prompt(self._processes, request)

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()

    def parser(self, request: ChatRequest, params: SamplingParams, prompt_ids: list[int]) -> Callable[[], AnswerParser]:
        """Return the factory of the parsers for the request's choices."""
        if self.harmony is not None:
            return functools.partial(ChannelParser, self.harmony, _tools(request), params)
        if isinstance(request.tool_choice, NamedTool):
            return functools.partial(NamedCallParser, request.tool_choice.function.name)
        if request.tool_mode == "required":
            return CallsParser
        text_format, tools = self._format(request)
        if text_format.plain or params.constrained:
            # A grammar begins with the answer itself.
            return PlainParser
        prompt_end = self._tokenizer.decode(prompt_ids[-PROMPT_END:], skip_special_tokens=False)
        shows_special = request.skip_special_tokens and not params.skip_special_tokens
        dropped = text_format.dropped_tokens(self._tokenizer) if shows_special else ()
        reasoning = text_format.reasoning_parser is not None

        def new_parser() -> AnswerParser:
            parser = text_format.parser(tools, prompt_end, dropped)
            return TextAnswerParser(parser, reasoning, request.parallel_tool_calls, self._tokenizer)

        return new_parser

    def _format(self, request: ChatRequest) -> tuple[TextFormat, list[str]]:
        """Return the format of the answer's text, and the names of the tools that it may call."""
        tools = [tool.function.name for tool in request.offered_tools]
        return self._text_format.for_tools(tools), tools

    def params(
        self, request: ChatRequest, vocab_size: int, defaults: Mapping[str, Any], **changes: Any
    ) -> list[SamplingParams]:
        """Return the sampling parameters in the model's chat format, and their fallbacks for a grammar that cannot be
        followed. Raises ApiError (400)."""
        if self.harmony is None:
            if request.tool_mode != "required" and self._format(request)[0].shows_special_tokens(self._tokenizer):
                changes["skip_special_tokens"] = False
            return request.params(vocab_size, defaults, request.grammars(), **changes)
        tools = _tools(request)
        if (schemas := request.forced_schemas()) is None:
            candidates = request.params(vocab_size, defaults, request.grammars(), **changes)
        else:
            grammars = [{"grammar": calls_grammar(parameters)} for parameters in schemas.candidates()]
            candidates = request.params(vocab_size, defaults, grammars, **changes)
        return [self.harmony.adapted(params, tools) for params in candidates]

    def _harmony_prompt(self, processes: HarmonyProcesses, request: ChatRequest) -> list[int]:
        if request.continue_final_message or not request.add_generation_prompt:
            raise ApiError(400, "with harmony the answer is always a new message", "add_generation_prompt")
        for name in request.chat_template_kwargs.keys() - {"reasoning_effort"}:
            log_ignored("chat_template_kwargs (harmony has no template)", name)
        messages = [message.model_dump(include=set(FIELDS), exclude_none=True) for message in request.messages]
        self._prompts.check("\n".join(message.text for message in request.messages))
        effort = request.reasoning_effort or request.chat_template_kwargs.get("reasoning_effort")
        if not isinstance(effort, str | None):
            raise ApiError(400, "reasoning_effort must be a string", "chat_template_kwargs")
        try:
            return processes.render(messages, _tools(request), _effort(effort))
        except MessageError as error:
            raise ApiError(400, str(error), error.field) from error

    def _template_prompt(self, request: ChatRequest) -> list[int]:
        if not self._tokenizer.chat_template:
            raise ApiError(400, "this model has no chat template; use /v1/completions", "messages")
        if reserved := sorted(_RESERVED & request.chat_template_kwargs.keys()):
            raise ApiError(400, f"chat_template_kwargs may not set {reserved[0]}", "chat_template_kwargs")
        if request.continue_final_message and request.add_generation_prompt:
            raise ApiError(400, "continue_final_message needs add_generation_prompt = false", "continue_final_message")
        # Templates with a switch for reasoning name it enable_thinking.
        thinking = {"enable_thinking": False} if request.reasoning_effort == "none" else {}
        variables = {
            **thinking,
            **request.chat_template_kwargs,
            "add_generation_prompt": request.add_generation_prompt,
            "continue_final_message": request.continue_final_message,
        }
        effort = None if request.reasoning_effort == "none" else request.reasoning_effort
        # A forced call has the tool's schema in its grammar, so the template may ignore the tools.
        required = self._require_tool_template and request.forced_tools is None
        messages = [_plain(message, f"messages.{i}") for i, message in enumerate(request.messages)]
        try:
            text = chat_template.text(
                self._tokenizer, messages, tools=_tools(request), reasoning_effort=_effort(effort), variables=variables,
                ignored_tools="error" if required else "log",
            )  # fmt: skip
        except MessageError as error:
            raise ApiError(400, str(error), error.field) from error
        return self._prompts.encode(text, bool(request.add_special_tokens))


def _effort(effort: str | None) -> str | None:
    return _EFFORTS.get(effort, effort) if effort is not None else None


def _tools(request: ChatRequest) -> list[dict[str, Any]]:
    """Return the tools that the prompt describes, as plain objects."""
    return [tool.model_dump(exclude_none=True) for tool in request.offered_tools]


def _plain(message: ChatMessage, where: str) -> dict[str, Any]:
    """Return a message with the fields that templates know. Arguments of tool calls are parsed here, where the size of
    JSON is limited; those that the token limit cut off stay text. Raises ApiError (400)."""
    plain = message.model_dump(include=set(FIELDS), exclude_none=True)
    for call in plain.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"], where)
    return plain


def _arguments(arguments: str | dict[str, Any], where: str) -> str | dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    try:
        parsed = parse(arguments or "{}")
    except json.JSONDecodeError:
        return arguments
    except ValueError as error:
        raise ApiError(400, f"{where}: a call's arguments cannot be read: {error}", f"{where}.tool_calls") from error
    return parsed if isinstance(parsed, dict) else arguments
