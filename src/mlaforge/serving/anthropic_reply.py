"""Engine outputs as messages of Anthropic's API, with the events of its streams.

A full response is the content that the events add up to. Source of the shapes:
https://docs.anthropic.com/en/docs/build-with-claude/streaming and the types of the package `anthropic`.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from mlaforge.engine.request.output import Completion, RequestOutput
from mlaforge.serving import wire
from mlaforge.serving.anthropic_request import MessagesRequest
from mlaforge.serving.replies import ChatForm, Reply
from mlaforge.serving.service import Service
from mlaforge.serving.wire import ApiError

# Field of a chat message's delta -> type of the block, and the name of its text.
_KINDS = {"content": "text", "reasoning_content": "thinking"}


def messages_reply(service: Service, payload: dict[str, Any]) -> MessagesReply:
    """Parse and tokenize a request of /v1/messages. Raises ApiError, PromptTooLong."""
    request = MessagesRequest.read(payload)
    chat = request.chat_messages()
    try:
        _, form = service.chat_form(request.chat_payload(chat.messages))
    except ApiError as error:
        error.message = chat.located(error.message)
        raise
    form.warnings[:0] = request.warnings
    # Clients ask for tens of thousands of tokens: as in Anthropic's API the answer ends where the context does.
    room = service.engine.engine.max_model_len - len(form.prompts[0].token_ids)
    limit = min(request.max_tokens or room, room)
    form.params = dataclasses.replace(form.params, max_tokens=limit)
    form.fallbacks = [dataclasses.replace(params, max_tokens=limit) for params in form.fallbacks]
    cut = "max_tokens" if limit == request.max_tokens else "model_context_window_exceeded"
    return MessagesReply(form, request.stream, ContentBlocks(request.shows_thinking), cut)


class ContentBlocks:
    """Content blocks of an answer, from the deltas of its parser. Thinking may be left out."""

    def __init__(self, with_thinking: bool = True) -> None:
        # Complete blocks and, last, the one that grows.
        self.content: list[dict[str, Any]] = []
        self._with_thinking = with_thinking
        self._arguments = ""
        self._open = False

    def add(self, delta: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Add a delta of a chat message; return its events."""
        for field, value in delta.items():
            if field == "tool_calls":
                for call in value:
                    yield from self._add_call(call)
            elif self._with_thinking or field != "reasoning_content":
                yield from self._add_text(_KINDS[field], value)

    def _add_text(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if not self._open or self.content[-1]["type"] != kind:
            # Line breaks separate parts of a text, and clients may not send back a block of white space.
            text = text.lstrip("\n") if self.content else text
            if not text:
                return
            yield from self._begin({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        self.content[-1][kind] += text
        yield self._event("content_block_delta", delta={"type": f"{kind}_delta", kind: text})

    def _add_call(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        function = call["function"]
        if (call_id := call.get("id")) is not None:
            block = {"type": "tool_use", "id": f"toolu_{call_id.removeprefix('call_')}", "name": function["name"]}
            yield from self._begin({**block, "input": {}})
        if arguments := function.get("arguments"):
            self._arguments += arguments
            yield self._event("content_block_delta", delta={"type": "input_json_delta", "partial_json": arguments})

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.end()
        self.content.append(block)
        self._open, self._arguments = True, ""
        yield self._event("content_block_start", content_block=dict(block))

    def end(self) -> Iterator[dict[str, Any]]:
        """End the last block; return its events."""
        if not self._open:
            return
        block, self._open = self.content[-1], False
        if block["type"] == "tool_use":
            block["input"] = _input(self._arguments)
        elif block["type"] == "thinking":
            # Clients that find no signature may not send the block back. Any is valid here.
            block["signature"] = "unsigned"
            yield self._event("content_block_delta", delta={"type": "signature_delta", "signature": "unsigned"})
        yield self._event("content_block_stop")

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": len(self.content) - 1, **fields}


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call; those that the limit of tokens cut off become an object with their text, as in
    conversations."""
    try:
        value = wire.parse(arguments or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


class MessagesReply(Reply):
    """Response of /v1/messages. `cut`: stop reason of an answer that its limit of tokens ended."""

    def __init__(self, form: ChatForm, stream: bool, blocks: ContentBlocks, cut: str) -> None:
        super().__init__(form, stream)
        self._parser, self._blocks, self._cut = form.parser(), blocks, cut
        self._stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def new_id(self) -> str:
        return f"msg_{uuid.uuid4().hex}"

    def start(self) -> bytes:
        return _write([{"type": "message_start", "message": self._message([])}, {"type": "ping"}])

    def events(self, output: RequestOutput, write: Callable[[Any], bytes]) -> bytes:
        return _write(self._read(output), write)

    def end(self) -> bytes:
        events = list(self._blocks.end())
        events.append({"type": "message_delta", "delta": self._stop, "usage": self._usage()})
        return _write([*events, {"type": "message_stop"}])

    def error(self, error: ApiError) -> bytes:
        return _write([error.anthropic_body()])

    def full_response(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        for output in outputs:
            for _ in self._read(output):
                pass
        for _ in self._blocks.end():
            pass
        return self._message(self._blocks.content)

    def _read(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Return the events of an output."""
        self.usage.cached[output.request_id] = output.num_cached_tokens
        for new in output.outputs:
            self.usage.completion_tokens += len(new.token_ids)
            for piece in _pieces(new):
                yield from self._blocks.add(self._parser.read(piece))
            if new.finish_reason is not None:
                self._stop = self._stopped(new)

    def _stopped(self, new: Completion) -> dict[str, str | None]:
        if isinstance(new.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": new.stop_reason}
        if new.finish_reason == "length":
            return {"stop_reason": self._cut, "stop_sequence": None}
        calls = any(block["type"] == "tool_use" for block in self._blocks.content)
        return {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.form.model}
        return {**head, "content": content, **self._stop, "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        cached = self.usage.cached_tokens
        return {
            "input_tokens": self.usage.prompt_tokens - cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached, "output_tokens": self.usage.completion_tokens,
        }  # fmt: skip


def _pieces(new: Completion) -> Iterator[Completion]:
    """Split a completion into pieces of at most one token and a few characters: the delta of a longer one does not have
    the order of its parts. Parsers read either tokens or text, so that the two need not match."""
    count = max(len(new.token_ids), len(new.text) // 4, 1)
    for i in range(count):
        token_ids = new.token_ids[len(new.token_ids) * i // count : len(new.token_ids) * (i + 1) // count]
        text = new.text[len(new.text) * i // count : len(new.text) * (i + 1) // count]
        if i < count - 1:
            yield Completion(new.index, token_ids, text)
        else:
            yield dataclasses.replace(new, token_ids=token_ids, text=text)


def _write(events: Any, write: Callable[[Any], bytes] = wire.dumps) -> bytes:
    """Return server-sent events, each named by its type."""
    return b"".join(b"event: " + event["type"].encode() + b"\n" + wire.event(event, write) for event in events)
