"""Input items of /v1/responses, and their conversion to the messages of a chat.

Source: the API reference of OpenAI's Responses API and the types of the package openai (openai.types.responses).
"""

from __future__ import annotations

import abc
import base64
import binascii
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from mlaforge.serving.messages import TextPart
from mlaforge.serving.strict import Strict
from mlaforge.serving.wire import ApiError

# Begins the `encrypted_content` of this server's reasoning items: the text in base64, which is not secret. Clients of
# a stateless server return it, and some of them nothing else of the reasoning.
ENCRYPTED = "mlaforge-"
_LEADING = ("system", "developer")


class ContentPart(TextPart):
    """Text of a message or of a tool's result: input_text, output_text or refusal."""

    harmless: ClassVar[frozenset[str]] = TextPart.harmless | {"prompt_cache_breakpoint"}

    # Of an output item that is sent back.
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


Content = str | list[ContentPart]


class ReasoningPart(Strict):
    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class Item(Strict, abc.ABC):
    """An item of a conversation. Items of responses may be sent back unchanged."""

    harmless: ClassVar[frozenset[str]] = frozenset({"created_by", "caller", "async"})

    id: str | None = None
    status: str | None = None

    @abc.abstractmethod
    def as_item(self) -> dict[str, Any]:
        """Return the item as the API lists it, with an id."""

    def _head(self, prefix: str) -> dict[str, Any]:
        return {"id": self.id or f"{prefix}_{uuid.uuid4().hex}", "status": self.status or "completed"}


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: str | None = None

    def as_item(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": "input_text"}
        if self.role == "assistant":
            part = {"type": "output_text", "annotations": []}
        texts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        content = [{**part, "text": text} for text in texts]
        return {**self._head("msg"), "type": "message", "role": self.role, "content": content}


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: list[ReasoningPart] = Field(default_factory=list)
    content: list[ReasoningPart] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        """The reasoning, or its summary where the reasoning is unknown."""
        if self.content or self.encrypted_content is None:
            return "\n\n".join(part.text for part in self.content or self.summary)
        return decrypted(self.encrypted_content) or "\n\n".join(part.text for part in self.summary)

    def as_item(self) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": self.text}]
        return {**self._head("rs"), "type": "reasoning", "summary": [], "content": content}


class FunctionCallItem(Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None

    def as_item(self) -> dict[str, Any]:
        fields = self.model_dump(include={"type", "call_id", "name", "arguments", "namespace"}, exclude_none=True)
        return {**self._head("fc"), **fields}


class FunctionCallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Content

    def as_item(self) -> dict[str, Any]:
        return {**self._head("fco"), "type": self.type, "call_id": self.call_id, "output": content_text(self.output)}


class ItemReference(Strict):
    """An item of an earlier response, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: str


def _kind(item: Any) -> str:
    """Return the type of an item. Without one it is a message, or a reference where there is only an id."""
    kind = item.get("type") if isinstance(item, dict) else item.type
    if kind is not None:
        return str(kind)
    return "item_reference" if isinstance(item, dict) and "id" in item and "role" not in item else "message"


def _known_type(item: Any) -> Any:
    if not isinstance(item, dict):
        raise ValueError("an item must be an object")
    if (kind := _kind(item)) not in _TYPES:
        raise ValueError(f"items of type {kind[:40]!r} are not supported; there are {', '.join(_TYPES)}")
    return item


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind),
    BeforeValidator(_known_type),
]
_TYPES = ("message", "reasoning", "function_call", "function_call_output", "item_reference")


def encrypted(text: str) -> str:
    """Return reasoning as `encrypted_content`, which `decrypted` reads."""
    return ENCRYPTED + base64.b64encode(text.encode()).decode()


def decrypted(content: str) -> str | None:
    """Return the reasoning in an `encrypted_content`; None for that of another server."""
    if not content.startswith(ENCRYPTED):
        return None
    try:
        return base64.b64decode(content.removeprefix(ENCRYPTED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def content_text(content: Content) -> str:
    """Return content as one text; parts are joined by newlines, as in a chat."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def qualified(namespace: str | None, name: str) -> str:
    """Return the name of a function in a chat, which has no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


def messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return a conversation as chat messages.

    Consecutive items of the assistant are one message. Instructions, and the system and developer messages at the
    beginning, are one system message, because many chat templates read only one. Raises ApiError (400) for the output
    of a call that is not among the items before it.
    """
    turns: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    calls: set[str] = set()
    for item in items:
        if isinstance(item, FunctionCallOutputItem):
            if item.call_id not in calls:
                message = f"no tool call found for function call output with call_id {item.call_id[:100]!r}"
                raise ApiError(400, message, "input")
            turns.append({"role": "tool", "tool_call_id": item.call_id, "content": content_text(item.output)})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            leads = item.role in _LEADING and all(turn["role"] in _LEADING for turn in turns)
            if leads and turns:
                turns[0]["content"] = _joined(turns[0]["content"], content_text(item.content))
            else:
                role = "system" if leads else item.role
                turns.append({"role": role, "content": content_text(item.content)})
        else:
            if not turns or turns[-1]["role"] != "assistant":
                turns.append({"role": "assistant"})
            _add(turns[-1], item)
            if isinstance(item, FunctionCallItem):
                calls.add(item.call_id)
    return turns


def _add(turn: dict[str, Any], item: Item) -> None:
    """Add an assistant's item to its message."""
    if isinstance(item, ReasoningItem):
        if item.text:
            turn["reasoning_content"] = _joined(turn.get("reasoning_content", ""), item.text)
    elif isinstance(item, MessageItem):
        turn["content"] = _joined(turn.get("content", ""), content_text(item.content))
    elif isinstance(item, FunctionCallItem):
        function = {"name": qualified(item.namespace, item.name), "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})


def _joined(first: str, second: str) -> str:
    """Return two texts as paragraphs; the second may begin with the empty line itself, as in an answer in harmony."""
    return first + ("\n\n" if first and not second.startswith("\n\n") else "") + second


def num_droppable(items: Sequence[Item]) -> int:
    """Return how many items `oldest_dropped` may drop: those before the last, or before the call whose output it is."""
    last = items[-1]
    call_id = last.call_id if isinstance(last, FunctionCallOutputItem) else None
    ends = (item is last or (isinstance(item, FunctionCallItem) and item.call_id == call_id) for item in items)
    end = next(i for i, is_end in enumerate(ends) if is_end)
    return sum(map(_counts, items[:end]))


def oldest_dropped(items: Sequence[Item], count: int) -> list[Item]:
    """Return a conversation without its oldest `count` items, nor the outputs of calls among them. System and developer
    messages are not counted and remain."""
    remaining: list[Item] = []
    calls: set[str] = set()
    for item in items:
        if count and _counts(item):
            count -= 1
            if isinstance(item, FunctionCallItem):
                calls.add(item.call_id)
        elif not (isinstance(item, FunctionCallOutputItem) and item.call_id in calls):
            remaining.append(item)
    return remaining


def _counts(item: Item) -> bool:
    return not (isinstance(item, MessageItem) and item.role in _LEADING)
