"""The request of /v1/responses, and its conversion to a chat request.

Source: the API reference of OpenAI's Responses API; the sampling fields of /v1/completions and /v1/chat/completions are
accepted too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator

from mlaforge.serving.messages import FunctionSpec, NamedTool
from mlaforge.serving.protocol import Generation, ToolMode
from mlaforge.serving.response_items import InputItem, Item, messages, qualified
from mlaforge.serving.strict import Strict, Whole, are_fields_strict, log_ignored
from mlaforge.serving.wire import ApiError

_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED_REASONING = "reasoning.encrypted_content"
# Field of a chat request -> field of this request.
_NAMES = {
    "messages": "input", "response_format": "text.format", "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort",
}  # fmt: skip
_CHAT_NAME = re.compile(rf"\b({'|'.join(_NAMES)})\b(?:\.\d[\w.]*)?")
# Fields that the chat request has too, with the same meaning.
_SAME = (Generation.model_fields.keys() | {"chat_template_kwargs"}) - {"stream", "stream_options"}
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
Echoed = Annotated[str, Field(max_length=1000)] | None


class FunctionTool(FunctionSpec):
    harmless: ClassVar[frozenset[str]] = FunctionSpec.harmless | {
        "defer_loading", "allowed_callers", "output_schema", "async",
    }  # fmt: skip

    type: Literal["function"]


class OtherTool(BaseModel):
    """A tool that OpenAI's servers or the client's platform execute: it is not offered to the model."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Annotated[str, Field(max_length=100)]


def _tool_kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return str(kind) if kind in ("function", "namespace") else "other"


FunctionItem = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[OtherTool, Tag("other")], Discriminator(_tool_kind)
]


class NamespaceTool(Strict):
    """Functions of one source, such as a server of tools. A call of one names its namespace."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Annotated[list[FunctionItem], Field(max_length=512, fail_fast=True)]


ToolItem = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[OtherTool, Tag("other")],
    Discriminator(_tool_kind),
]


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=512, fail_fast=True)]


class TextFormat(Strict):
    """Format of the answer; the other fields belong to json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(Strict):
    """`verbosity` has no effect."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    def response_format(self) -> dict[str, Any] | None:
        """Return the format as a chat request has it. Raises ApiError (400)."""
        if self.format is None or self.format.type == "text":
            return None
        if self.format.type == "json_object":
            return {"type": "json_object"}
        if self.format.schema_ is None:
            raise ApiError(400, "text.format of type json_schema needs a schema", "text.format.schema")
        fields = self.format.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        return {"type": "json_schema", "json_schema": fields}


class ReasoningConfig(Strict):
    """`summary` has no effect: the reasoning itself is returned."""

    harmless: ClassVar[frozenset[str]] = frozenset({"context", "mode"})

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(Generation):
    """Request of /v1/responses."""

    refused: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = {
        "messages": ("use input", ()),
        "max_tokens": ("use max_output_tokens", ()),
        "max_completion_tokens": ("use max_output_tokens", ()),
        "response_format": ("use text.format", ()),
        "reasoning_effort": ("use reasoning.effort", ()),
        "logprobs": (f"use include = [{_LOGPROBS!r}]", (False,)),
        "prompt_logprobs": ("use /v1/chat/completions", ()),
        "n": ("a response has one answer", (1,)),
        "best_of": ("a response has one answer", (1,)),
        "prompt": ("no prompt templates are stored here; use instructions and input", ()),
        "background": ("wait for the answer, or set stream = true", (False,)),
        "conversation": ("use previous_response_id, or send the whole conversation in input", ()),
        "context_management": ("use truncation = 'auto'", ([],)),
        "moderation": ("no other model reads the request", ()),
    }

    model_config = ConfigDict(json_schema_extra={"required": ["input"]})

    input: str | Annotated[list[InputItem], Field(fail_fast=True)] = Field(default_factory=list)
    instructions: str | None = None
    tools: Annotated[list[ToolItem], Field(max_length=512, fail_fast=True)] = Field(default_factory=list)
    tool_choice: ToolMode | Annotated[NamedTool | AllowedTools, Field(discriminator="type")] = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = Field(default_factory=TextConfig)
    reasoning: ReasoningConfig = Field(default_factory=ReasoningConfig)
    max_output_tokens: Annotated[Whole, Field(ge=1, le=2**31 - 1)] | None = None
    # OpenAI's limit of calls of built-in tools, of which there are none.
    max_tool_calls: Whole | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] = 0
    include: Annotated[list[str], Field(max_length=100, fail_fast=True)] = Field(default_factory=list)
    truncation: Literal["auto", "disabled"] = "disabled"
    store: bool = True
    previous_response_id: str | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] = Field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    # Codex's; it has no effect.
    client_metadata: dict[str, Any] | None = None
    # Returned as they are.
    user: Echoed = None
    safety_identifier: Echoed = None
    prompt_cache_key: Echoed = None

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _function(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in ("function", "allowed_tools"):
            raise ValueError(f"tools of type {kind[:40]!r} are not supported; a function can be required")
        return value

    @classmethod
    def read(cls, payload: dict[str, Any]) -> Self:
        """Parse the request from a JSON object. Tools that are no functions are dropped with a warning: clients offer
        their platform's tools to every model. With --strict-fields they are refused. Raises ApiError (400)."""
        request = super().read(payload)
        tools = [tool for item in request.tools for tool in (item.tools if isinstance(item, NamespaceTool) else [item])]
        others = dict.fromkeys(tool.type for tool in tools if isinstance(tool, OtherTool))
        for kind in others:
            if are_fields_strict():
                message = f"tools of type {kind!r} are not supported; describe a function"
                raise ApiError(400, message, "tools", "unsupported_parameter")
            log_ignored("tools of a response", kind)
        request._warnings += [f"tools of type {kind!r} are not offered to the model" for kind in others][:10]
        return request

    @property
    def functions(self) -> dict[str, tuple[FunctionTool, str | None]]:
        """The tools that the model can call, and their namespaces, by the names in the chat request."""
        tools: dict[str, tuple[FunctionTool, str | None]] = {}
        for item in self.tools:
            namespace = item.name if isinstance(item, NamespaceTool) else None
            for tool in item.tools if isinstance(item, NamespaceTool) else [item]:
                if isinstance(tool, FunctionTool):
                    tools[qualified(namespace, tool.name)] = tool, namespace
        return tools

    @property
    def encrypts_reasoning(self) -> bool:
        return _ENCRYPTED_REASONING in self.include

    def chat_payload(self, payload: dict[str, Any], items: Sequence[Item]) -> dict[str, Any]:
        """Return the chat request of a conversation; `payload` is the object that the request was read from. Raises
        ApiError (400)."""
        effort = self.reasoning.effort
        logprobs: dict[str, Any] = {}
        if _LOGPROBS in self.include or self.top_logprobs:
            logprobs = {"logprobs": True, "top_logprobs": self.top_logprobs}
        return {
            **{name: payload[name] for name in _SAME & self.model_fields_set},
            "messages": messages(self.instructions, items),
            "tools": [
                {"type": "function", "function": {**_fields(tool), "name": name}}
                for name, (tool, _) in self.functions.items()
            ],
            "tool_choice": self._chat_tool_choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self.text.response_format(),
            "reasoning_effort": "xhigh" if effort == "max" else effort,
            "max_completion_tokens": self.max_output_tokens,
            **logprobs,
        }

    def _chat_tool_choice(self) -> Any:
        if isinstance(self.tool_choice, str):
            return self.tool_choice
        choice = self.tool_choice.model_dump(exclude_none=True)
        return (
            choice if isinstance(self.tool_choice, NamedTool) else {"type": choice.pop("type"), "allowed_tools": choice}
        )

    def settings(self) -> dict[str, Any]:
        """Return the fields of the request that its response repeats."""
        choice: Any = self.tool_choice
        if isinstance(choice, NamedTool):
            choice = _flat(choice)
        elif isinstance(choice, AllowedTools):
            choice = {"type": choice.type, "mode": choice.mode, "tools": [_flat(tool) for tool in choice.tools]}
        text_format = self.text.format or TextFormat(type="text")
        return {
            "background": False, "instructions": self.instructions, "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls, "metadata": self.metadata,
            "parallel_tool_calls": self.parallel_tool_calls, "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self.reasoning.effort, "summary": None},
            "safety_identifier": self.safety_identifier, "service_tier": "default",
            "text": {"format": text_format.model_dump(by_alias=True, exclude_none=True)}, "tool_choice": choice,
            "tools": [_offered(tool) for tool in self.tools if not isinstance(tool, OtherTool)],
            "top_logprobs": self.top_logprobs, "truncation": self.truncation, "user": self.user,
        }  # fmt: skip


def _fields(tool: FunctionTool) -> dict[str, Any]:
    return tool.model_dump(exclude_none=True, exclude={"type"})


def _offered(tool: FunctionTool | NamespaceTool) -> dict[str, Any]:
    """Return a tool without those in it that are not offered to the model."""
    if isinstance(tool, FunctionTool):
        return {"type": "function", **_fields(tool)}
    inner = [_offered(function) for function in tool.tools if isinstance(function, FunctionTool)]
    return {"type": "namespace", "name": tool.name, "description": tool.description or "", "tools": inner}


def _flat(tool: NamedTool) -> dict[str, Any]:
    return {"type": "function", "name": tool.function.name}


def renamed(error: ApiError) -> ApiError:
    """Return an error about the chat request as one about this request."""
    message, param = (
        text and _CHAT_NAME.sub(lambda match: _NAMES[match[1]], text) for text in (error.message, error.param)
    )
    return ApiError(error.status, message or "", param, error.code, error.headers)
