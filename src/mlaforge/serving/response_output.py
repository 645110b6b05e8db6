"""Output items of a response, built from the deltas of its chat message, and the events that stream them.

Source of the order of the events: OpenAI's Responses API and the stream helper of the package openai.
"""

from __future__ import annotations

import abc
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

from mlaforge.serving.response_items import encrypted

Event = dict[str, Any]


class OutputItem(abc.ABC):
    """An item that grows by text. `event` is the name of the events that add to it."""

    id_prefix: ClassVar[str]
    event: ClassVar[str]

    def __init__(self) -> None:
        self.id = f"{self.id_prefix}_{uuid.uuid4().hex}"
        self.text = ""

    @abc.abstractmethod
    def as_item(self, status: str) -> dict[str, Any]:
        """Return the item as the API shows it; one in progress has no content."""

    def part(self) -> dict[str, Any] | None:
        """Return the item's content part, or None for a kind without."""
        return None

    def whole(self) -> dict[str, Any]:
        """Return the fields of the event that has the whole text."""
        return {"text": self.text}

    def extra(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return further fields of the events that add text; `logprobs` are of this text."""
        return {} if self.part() is None else {"content_index": 0}

    def _content(self, status: str) -> list[dict[str, Any]]:
        part = self.part()
        return [] if part is None or status == "in_progress" else [part]


class ReasoningOutput(OutputItem):
    """Reasoning, with `encrypt` also as encrypted_content."""

    id_prefix = "rs"
    event = "response.reasoning_text"

    def __init__(self, encrypt: bool) -> None:
        super().__init__()
        self._encrypt = encrypt

    def as_item(self, status: str) -> dict[str, Any]:
        item = {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": self._content(status)}
        if self._encrypt:
            item["encrypted_content"] = encrypted(self.text)
        return item

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}


class MessageOutput(OutputItem):
    """The text of the answer and the log probabilities of its tokens."""

    id_prefix = "msg"
    event = "response.output_text"

    def __init__(self) -> None:
        super().__init__()
        self.logprobs: list[dict[str, Any]] = []

    def as_item(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id, "type": "message", "role": "assistant", "status": status, "content": self._content(status),
        }  # fmt: skip

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}

    def whole(self) -> dict[str, Any]:
        """Return the fields of the event that has the whole text."""
        return {"text": self.text}

    def extra(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"content_index": 0, "logprobs": [_without_bytes(entry) for entry in logprobs]}


class CallOutput(OutputItem):
    """A call of a function; the text is its arguments."""

    id_prefix = "fc"
    event = "response.function_call_arguments"

    def __init__(self, call_id: str, name: str, namespace: str | None) -> None:
        super().__init__()
        self._call_id, self._name = call_id, name
        self._namespace = {} if namespace is None else {"namespace": namespace}

    def as_item(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id, "type": "function_call", "status": status, "call_id": self._call_id, "name": self._name,
            "arguments": self.text, **self._namespace,
        }  # fmt: skip

    def whole(self) -> dict[str, Any]:
        return {"name": self._name, "arguments": self.text}


def _without_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a token's log probability as events have it."""
    return {
        "token": entry["token"], "logprob": entry["logprob"],
        "top_logprobs": [{"token": top["token"], "logprob": top["logprob"]} for top in entry["top_logprobs"]],
    }  # fmt: skip


class ResponseOutput:
    """The items of one response. Methods append events, without sequence_number, to `events` until it is replaced.

    functions  name in the chat -> name and namespace, of functions that have a namespace
    """

    def __init__(self, functions: Mapping[str, tuple[str, str]], encrypt_reasoning: bool = False) -> None:
        self.events: list[Event] = []
        self._functions = functions
        self._encrypt_reasoning = encrypt_reasoning
        self._items: list[OutputItem] = []
        # Status of the last item.
        self._status = "in_progress"
        # Of tokens that may belong to the text that comes next.
        self._logprobs: list[dict[str, Any]] = []

    def as_list(self) -> list[dict[str, Any]]:
        """Return all items."""
        last = len(self._items) - 1
        return [item.as_item(self._status if i == last else "completed") for i, item in enumerate(self._items)]

    def add(self, delta: dict[str, Any], logprobs: list[dict[str, Any]]) -> None:
        """Add a chat message's delta and the log probabilities of its tokens. Those of an open message are part of it,
        and those before any item."""
        self._logprobs += logprobs
        for name, value in delta.items():
            if name == "tool_calls":
                for call in value:
                    self._add_to_call(call)
            elif name == "reasoning_content" and value:
                if not isinstance(self._last, ReasoningOutput):
                    self._open(ReasoningOutput(self._encrypt_reasoning))
                self._extend(value)
            elif name == "content" and value:
                if not isinstance(self._last, MessageOutput):
                    self._open(MessageOutput())
                self._extend(value)
        if not isinstance(self._last, MessageOutput | None):
            self._logprobs.clear()

    def finish(self, status: str) -> None:
        """Close the last item; without any there is an empty message."""
        if not self._items and status == "completed":
            self._open(MessageOutput())
        if isinstance(self._last, MessageOutput):
            self._last.logprobs += self._logprobs
        self._close(status)

    def fail(self) -> None:
        """Mark the last item as incomplete, without events."""
        self._status = "incomplete"

    @property
    def _last(self) -> OutputItem | None:
        return self._items[-1] if self._items else None

    def _add_to_call(self, call: dict[str, Any]) -> None:
        function = call["function"]
        if "id" in call:
            name, namespace = self._functions.get(function["name"], (function["name"], None))
            self._open(CallOutput(call["id"], name, namespace))
        if arguments := function.get("arguments"):
            self._extend(arguments)

    def _emit(self, kind: str, **fields: Any) -> None:
        self.events.append({"type": kind, "output_index": len(self._items) - 1, **fields})

    def _open(self, item: OutputItem) -> None:
        self._close("completed")
        self._items.append(item)
        self._status = "in_progress"
        self._emit("response.output_item.added", item=item.as_item(self._status))
        if (part := item.part()) is not None:
            self._emit("response.content_part.added", item_id=item.id, content_index=0, part=part)

    def _extend(self, text: str) -> None:
        item, logprobs, self._logprobs = self._items[-1], self._logprobs, []
        item.text += text
        if isinstance(item, MessageOutput):
            item.logprobs += logprobs
        kind, extra = f"{item.event}.delta", item.extra(logprobs)
        last = self.events[-1] if self.events else {}
        if last.get("type") == kind and last["item_id"] == item.id:
            last["delta"] += text
            if "logprobs" in extra:
                last["logprobs"] += extra["logprobs"]
        else:
            self._emit(kind, item_id=item.id, delta=text, **extra)

    def _close(self, status: str) -> None:
        if (item := self._last) is None or self._status != "in_progress":
            return
        self._status = status
        logprobs = item.logprobs if isinstance(item, MessageOutput) else []
        self._emit(f"{item.event}.done", item_id=item.id, **item.whole(), **item.extra(logprobs))
        if (part := item.part()) is not None:
            self._emit("response.content_part.done", item_id=item.id, content_index=0, part=part)
        self._emit("response.output_item.done", item=item.as_item(status))
