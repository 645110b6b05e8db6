"""Messages of Anthropic's API in content blocks, and their conversion to chat messages.

Source of the fields: https://docs.anthropic.com/en/api/messages and the types of the package `anthropic`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from mlaforge.serving.strict import Strict
from mlaforge.serving.wire import ApiError

# Claude Code begins the system prompt with a line that differs in every request: no prefix would be found in the cache.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
# Type of a block -> roles of the messages that may contain it.
_ROLES = {
    "text": ("system", "user", "assistant"), "thinking": ("assistant",), "redacted_thinking": ("assistant",),
    "tool_use": ("assistant",), "tool_result": ("user",),
}  # fmt: skip
_NO_EFFECT = frozenset({"cache_control", "citations", "signature", "data", "caller", "toolset_name"})


class TextBlock(Strict):
    harmless: ClassVar[frozenset[str]] = _NO_EFFECT

    type: Literal["text"]
    text: str


class ThinkingBlock(Strict):
    """Reasoning of an earlier answer. Its signature is not verified: clients may see all reasoning of this server."""

    harmless: ClassVar[frozenset[str]] = _NO_EFFECT

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Strict):
    """Encrypted reasoning of another server. It is ignored."""

    harmless: ClassVar[frozenset[str]] = _NO_EFFECT

    type: Literal["redacted_thinking"]


class ToolUseBlock(Strict):
    harmless: ClassVar[frozenset[str]] = _NO_EFFECT

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


def _supported(value: Any) -> Any:
    """Raises ValueError that names the type of a block that this server cannot read."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in _ROLES:
        raise ValueError(f"content of type {kind[:40]!r} is not supported: this model reads only text")
    return value


class ToolResultBlock(Strict):
    harmless: ClassVar[frozenset[str]] = _NO_EFFECT

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[Annotated[TextBlock, BeforeValidator(_supported)]], Field(fail_fast=True)] = ""
    is_error: bool = False

    @property
    def text(self) -> str:
        """The content as one text. Chat messages have no mark for errors: the text begins with one."""
        text = self.content if isinstance(self.content, str) else "\n".join(block.text for block in self.content)
        return f"Error: {text}" if self.is_error else text


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class Message(Strict):
    """A message; newer clients also write system messages between the others."""

    role: Literal["user", "assistant", "system"]
    content: (
        str
        | Annotated[
            list[Annotated[Block, Field(discriminator="type"), BeforeValidator(_supported)]], Field(fail_fast=True)
        ]
    )

    @property
    def blocks(self) -> Sequence[Block]:
        return text_blocks(self.content) if isinstance(self.content, str) else self.content


def text_blocks(text: str) -> list[TextBlock]:
    """Return a text as blocks."""
    return [TextBlock(type="text", text=text)]


class ChatMessages:
    """Chat messages of a conversation in Anthropic's format, in `messages`.

    Consecutive messages of a role are merged, as in Anthropic's API. A tool result becomes a message of role tool. A
    system message after the first turn becomes a user's in its place: chat templates read system messages only at the
    beginning, and there it would change the prefix that the cache has of the conversation.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        # Path of each of them in the request, and the ids of tool calls so far.
        self._paths: list[str] = []
        self._calls: set[str] = set()

    def add_system(self, blocks: Sequence[TextBlock]) -> None:
        """Add the system prompt."""
        for block in blocks:
            if text := _BILLING.sub("", block.text):
                self._add_text("system", "system", text)

    def add(self, message: Message, path: str) -> None:
        """Add the message at `path` of the request. Raises ApiError (400) for a block that its role cannot have, and
        for the result of an unknown call."""
        begun = bool(self.messages) and self.messages[-1]["role"] != "system"
        role = "user" if message.role == "system" and begun else message.role
        for i, block in enumerate(message.blocks):
            if message.role not in _ROLES[block.type]:
                right = f"{block.type} belongs to a message of role {_ROLES[block.type][0]}"
                raise ApiError(400, f"{path}.content.{i}: {right}")
            if isinstance(block, TextBlock):
                self._add_text(role, path, block.text)
            elif isinstance(block, ToolResultBlock):
                if block.tool_use_id not in self._calls:
                    where = f"{path}.content.{i}.tool_use_id"
                    raise ApiError(400, f"{where}: no earlier message has a tool_use block with this id")
                self._append("tool", path, tool_call_id=block.tool_use_id, content=block.text)
            elif isinstance(block, ToolUseBlock):
                self._calls.add(block.id)
                call = {"id": block.id, "function": {"name": block.name, "arguments": block.input}}
                self._last(role, path).setdefault("tool_calls", []).append(call)
            elif isinstance(block, ThinkingBlock):
                turn = self._last(role, path)
                turn["reasoning_content"] = "\n\n".join(filter(None, (turn.get("reasoning_content"), block.thinking)))

    def _append(self, role: str, path: str, **fields: Any) -> None:
        self.messages.append({"role": role, **fields})
        self._paths.append(path)

    def _last(self, role: str, path: str) -> dict[str, Any]:
        """Return the last message, which is a new one unless the role continues."""
        if not self.messages or self.messages[-1]["role"] != role:
            self._append(role, path, content=[])
        return self.messages[-1]

    def _add_text(self, role: str, path: str, text: str) -> None:
        self._last(role, path)["content"].append({"type": "text", "text": text})

    def located(self, text: str) -> str:
        """Return an error's text with the paths of chat messages replaced by those in the request."""
        return re.sub(r"\bmessages\.(\d+)", lambda match: self._paths[int(match[1])], text)
