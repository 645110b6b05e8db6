"""The response of /v1/responses: one object, or server-sent events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from mlaforge.engine.request.output import RequestOutput
from mlaforge.serving import wire
from mlaforge.serving.pieces import Pieces
from mlaforge.serving.replies import ChatForm, Reply
from mlaforge.serving.response_output import Event, ResponseOutput
from mlaforge.serving.response_store import ResponseStore
from mlaforge.serving.responses_request import ResponsesRequest
from mlaforge.serving.token_text import Offsets
from mlaforge.serving.wire import ApiError


class ResponsesReply(Reply):
    """A response and its events in OpenAI's order. A complete one is put into `store` with its `input_items`, if the
    request says so. The full response is the one in the last event, so that both agree."""

    def __init__(
        self, form: ChatForm, request: ResponsesRequest, input_items: list[dict[str, Any]], store: ResponseStore
    ) -> None:
        super().__init__(form, request.stream)
        self._request, self._store = request, store
        self._input_items = wire.dumps(input_items) if request.store else b""
        self._created = int(time.time())
        self._choice = form.choice(form.prompts[0])
        self._pieces = Pieces(Offsets(form.tokens, form.params.skip_special_tokens))
        spaces = {name: (tool.name, space) for name, (tool, space) in request.functions.items() if space is not None}
        self._output = ResponseOutput(spaces, request.encrypts_reasoning)
        self._finish_reason: str | None = None
        self._sequence_number = 0

    def new_id(self) -> str:
        return f"resp_{uuid.uuid4().hex}"

    def start(self) -> bytes:
        response = self._response("in_progress")
        return self._numbered(
            [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]
        )

    def events(self, output: RequestOutput, write: Callable[[Any], bytes]) -> bytes:
        self._read(output)
        return self._new_events(write)

    def end(self) -> bytes:
        response = self._finished()
        self._output.events.append({"type": f"response.{response['status']}", "response": response})
        return self._new_events()

    def error(self, error: ApiError) -> bytes:
        """Return the event response.failed: OpenAI's clients know no other end of a stream with an error."""
        self._output.fail()
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        response = {**self._response("failed"), "error": {"code": code, "message": error.message}}
        return self._numbered([{"type": "response.failed", "response": response}])

    def full_response(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        for output in outputs:
            self._read(output)
        return self._finished()

    def _read(self, output: RequestOutput) -> None:
        self.usage.cached[output.request_id] = output.num_cached_tokens
        for new in output.outputs:
            self.usage.completion_tokens += len(new.token_ids)
            for piece in self._pieces.split(new):
                chunk = self._choice.chunk(piece)
                self._output.add(chunk["delta"], (chunk["logprobs"] or {}).get("content", []))
            self._finish_reason = new.finish_reason
        if (reasoning_tokens := self._choice.reasoning_tokens) is not None:
            self.usage.reasoning[0] = reasoning_tokens

    def _finished(self) -> dict[str, Any]:
        """Close the output, store the response and return it."""
        status = "incomplete" if self._finish_reason == "length" else "completed"
        self._output.finish(status)
        response = self._response(status)
        if self._request.store:
            self._store.put(response, self._input_items)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        params, ended = self.form.params, status in ("completed", "incomplete")
        return {
            "id": self.id, "object": "response", "created_at": self._created, "status": status,
            "completed_at": int(time.time()) if status == "completed" else None, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.form.model, "output": self._output.as_list(), "temperature": params.temperature,
            "top_p": params.top_p, "usage": self._usage() if ended else None, **self._request.settings(),
        }  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "input_tokens": usage.prompt_tokens,
            # Writing to the prefix cache is not counted: it happens with every prompt.
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _new_events(self, write: Callable[[Any], bytes] = wire.dumps) -> bytes:
        events, self._output.events = self._output.events, []
        return self._numbered(events, write)

    def _numbered(self, events: list[Event], write: Callable[[Any], bytes] = wire.dumps) -> bytes:
        body = []
        for event in events:
            numbered = {"type": event["type"], "sequence_number": self._sequence_number, **event}
            body.append(f"event: {event['type']}\n".encode() + wire.event(numbered, write))
            self._sequence_number += 1
        return b"".join(body)
