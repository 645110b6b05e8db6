"""The requests of Anthropic's /v1/messages and /v1/messages/count_tokens, and their conversion to chat requests.

Source of the fields: https://docs.anthropic.com/en/api/messages and the types of the package `anthropic`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from mlaforge.config import nearest
from mlaforge.serving.anthropic_messages import ChatMessages, Message, TextBlock, text_blocks
from mlaforge.serving.protocol import MAX_TEMPERATURE, StopString
from mlaforge.serving.strict import RequestModel, Strict, Whole, api_error
from mlaforge.serving.wire import ApiError

# Reasoning effort -> smallest budget in tokens: those of Gemini's OpenAI-compatible API. Claude Code's words "think",
# "think hard" and "ultrathink" stand for 4,000, 10,000 and 31,999 tokens.
_BUDGETS = {"high": 24_576, "medium": 8_192, "low": 0}
# Type of tool_choice -> tool_choice of a chat request.
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesTool(Strict):
    """A tool of the client, with `input_schema`, or one that Anthropic's servers define and name by `type`."""

    harmless: ClassVar[frozenset[str]] = frozenset({
        "cache_control", "allowed_callers", "defer_loading", "eager_input_streaming", "input_examples",
    })  # fmt: skip

    type: str = "custom"
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _defined(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind != "custom":
            # Such a tool is not offered: its options, for example max_uses, and its name do not matter.
            return {"type": kind, "name": "server_tool"}
        return value

    def function(self) -> dict[str, Any]:
        """Return the tool in OpenAI's format."""
        fields = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {**fields, "strict": self.strict}}


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if self.type == "tool" and self.name is None:
            raise ValueError("type tool needs the name of the tool")
        return self

    def chat_choice(self) -> str | dict[str, Any]:
        """Return the tool_choice of a chat request."""
        return {"type": "function", "function": {"name": self.name}} if self.type == "tool" else _CHOICES[self.type]


class Thinking(Strict):
    """Whether the model reasons, and for at most how many tokens; the budget chooses an effort, it is no limit."""

    harmless: ClassVar[frozenset[str]] = frozenset({"display"})

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Whole | None = None

    @property
    def effort(self) -> str | None:
        """Reasoning effort of a chat request; None for the model's own."""
        if self.type == "disabled":
            return "none"
        if self.type != "enabled" or self.budget_tokens is None:
            return None
        return next((effort for effort, least in _BUDGETS.items() if self.budget_tokens >= least), "low")


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesRequest(RequestModel):
    """Request of /v1/messages; that of /v1/messages/count_tokens has fewer fields. `output_format` is the beta's name
    of output_config.format."""

    harmless: ClassVar[frozenset[str]] = frozenset({
        "metadata", "cache_control", "service_tier", "container", "betas", "context_management", "diagnostics",
        "inference_geo", "speed", "user_profile_id", "workspace_id",
    })  # fmt: skip

    model: str | None = None
    max_tokens: Annotated[Whole, Field(ge=1, le=2**31 - 1)] | None = None
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] = Field(default_factory=list)
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[MessagesTool], Field(max_length=512, fail_fast=True)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=64)] = Field(default_factory=list)
    temperature: Annotated[float, Field(le=MAX_TEMPERATURE)] | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    stream: bool = False
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    output_format: OutputFormat | None = None

    @classmethod
    def read(cls, payload: dict[str, Any]) -> Self:
        """Parse the request from a JSON object. Raises ApiError (400) that names the field."""
        if payload.get("thread") is not None:
            # At this code the clients' tool runners, which use threads by default, send the whole conversation.
            reason = "thread is not supported: conversations are not stored; send all of it in messages"
            raise ApiError(400, reason, "thread", "thread_unsupported_request")
        values = {name: value for name, value in payload.items() if name not in cls.harmless and value is not None}
        try:
            request = cls.model_validate(values)
        except ValidationError as error:
            raise api_error(error, values) from error
        unknown = [name[:100] for name in values if name not in cls.model_fields][:10]
        request._warnings += [f"unknown field {name!r}{nearest(name, cls.model_fields)}" for name in unknown]
        server_tools = [tool.type[:100] for tool in request.tools if tool.type != "custom"][:10]
        request._warnings += [f"tools: {kind} runs on Anthropic's servers, and is not offered" for kind in server_tools]
        return request

    @property
    def shows_thinking(self) -> bool:
        """Whether the answer has blocks of thinking, where the model reasons."""
        return self.thinking is None or self.thinking.type != "disabled"

    def chat_messages(self) -> ChatMessages:
        """Return the conversation as chat messages. Raises ApiError (400)."""
        chat = ChatMessages()
        chat.add_system(text_blocks(self.system) if isinstance(self.system, str) else self.system)
        for i, message in enumerate(self.messages):
            chat.add(message, f"messages.{i}")
        return chat

    def chat_payload(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the body of a chat request with these messages, without a limit of tokens.

        A last message of the assistant is continued (prefill).
        """
        names = ("model", "temperature", "top_p", "top_k")
        payload = {name: value for name in names if (value := getattr(self, name)) is not None}
        payload |= {"messages": messages, "stop": self.stop_sequences}
        last = messages[-1] if messages else {}
        if last.get("role") == "assistant" and last["content"] and "tool_calls" not in last:
            payload |= {"add_generation_prompt": False, "continue_final_message": True}
        if tools := [tool.function() for tool in self.tools if tool.type == "custom"]:
            payload["tools"] = tools
        if (choice := self.tool_choice) is not None:
            payload["tool_choice"] = choice.chat_choice()
            payload["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if (output := self.output_config.format or self.output_format) is not None:
            schema = {"name": "output", "schema": output.schema_}
            payload["response_format"] = {"type": "json_schema", "json_schema": schema}
        if (effort := self._effort()) is not None:
            payload["reasoning_effort"] = effort
        return payload

    def _effort(self) -> str | None:
        """Return the reasoning effort: that of output_config, unless thinking is disabled."""
        effort = self.thinking.effort if self.thinking is not None else None
        if effort == "none" or self.output_config.effort is None:
            return effort
        return "xhigh" if self.output_config.effort == "max" else self.output_config.effort
