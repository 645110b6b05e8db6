"""Messages and tools of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from mlaforge.serving.strict import Strict, Whole


class TextPart(Strict):
    """Part of a message's content: text, or the text of a refusal in an answer of OpenAI's."""

    harmless: ClassVar[frozenset[str]] = frozenset({"cache_control", "annotations", "citations", "id"})

    type: Literal["text", "refusal"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kind = value.get("type")
        if kind == "refusal":
            return {**{name: field for name, field in value.items() if name != "refusal"}, "text": value.get("refusal")}
        if kind in ("input_text", "output_text"):
            return {**value, "type": "text"}
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"Invalid content type: {kind[:40]} is not supported, this model reads only text")
        return value


class FunctionCall(Strict):
    harmless: ClassVar[frozenset[str]] = frozenset({"parsed_arguments", "partial_json"})

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Strict):
    harmless: ClassVar[frozenset[str]] = frozenset({"provider_specific_fields", "extra_content", "caller"})

    id: str | None = None
    type: Literal["function"] = "function"
    index: Whole | None = None
    function: FunctionCall


class ChatMessage(Strict):
    """Message of a chat. An answer of this server may be sent back unchanged."""

    harmless: ClassVar[frozenset[str]] = frozenset({
        "id", "parsed", "cache_control", "provider_specific_fields", "thinking_blocks", "reasoning_details",
        "reasoning_items", "images", "experimental_attachments", "metadata", "status",
    })  # fmt: skip

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    # `reasoning` is vLLM's name.
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _one_reasoning(self) -> ChatMessage:
        self.reasoning_content, self.reasoning = self.reasoning_content or self.reasoning, None
        if self.content is None and self.refusal is not None:
            self.content = self.refusal
        return self

    @property
    def text(self) -> str:
        """The content as one text; parts are joined by newlines, as in vLLM."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class FunctionSpec(Strict):
    harmless: ClassVar[frozenset[str]] = frozenset({"returns", "cache_control"})

    # OpenAI allows 64 characters, Anthropic 128.
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    harmless: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: Literal["function"]
    function: FunctionSpec


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    """A tool that must be called, or that may be called, by name."""

    type: Literal["function"]
    function: FunctionName

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, value: Any) -> Any:
        # The Responses API writes the name beside the type.
        if isinstance(value, dict) and "function" not in value and "name" in value:
            return {**{k: v for k, v in value.items() if k != "name"}, "function": {"name": value["name"]}}
        return value


class AllowedTools(Strict):
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=512, fail_fast=True)]


class AllowedToolChoice(Strict):
    """OpenAI's tool_choice that restricts `tools` to some of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
