"""OpenAI's Responses API: /v1/responses over the functions of chat, and the responses in the store."""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter

from mlaforge.engine.request.sequence import PromptTooLong
from mlaforge.serving.generation import Endpoint, GenerationResponse
from mlaforge.serving.replies import ChatForm, Reply
from mlaforge.serving.response_items import InputItem, Item, ItemReference, MessageItem, num_droppable, oldest_dropped
from mlaforge.serving.response_store import ResponseStore, StoredResponse
from mlaforge.serving.responses_reply import ResponsesReply
from mlaforge.serving.responses_request import ResponsesRequest, renamed
from mlaforge.serving.service import Service
from mlaforge.serving.wire import ApiError

_ITEM: TypeAdapter[Any] = TypeAdapter(InputItem)


class Responses:
    """Converts requests to replies; has the store."""

    def __init__(self, service: Service, store: ResponseStore) -> None:
        self._service, self.store = service, store

    def reply(self, payload: dict[str, Any]) -> Reply:
        """Parse and tokenize a request. Raises ApiError."""
        request = ResponsesRequest.read(payload)
        items = self._conversation(request)
        form = self._fitting_form(request, payload, items)
        form.warnings = [*request.warnings, *form.warnings]
        return ResponsesReply(form, request, [item.as_item() for item in items], self.store)

    def stored(self, response_id: str) -> StoredResponse:
        """Return a response in the store. Raises ApiError (404)."""
        if (response := self.store.get(response_id)) is None:
            raise ApiError(404, f"Response with id '{response_id[:100]}' not found.")
        return response

    def _conversation(self, request: ResponsesRequest) -> list[Item]:
        """Return the items of earlier turns and of this one. Raises ApiError (400)."""
        items: list[Item] = []
        if (response_id := request.previous_response_id) is not None:
            if (previous := self.store.get(response_id)) is None:
                message = f"Previous response with id '{response_id[:100]}' not found."
                raise ApiError(400, message, "previous_response_id", "previous_response_not_found")
            items += [_ITEM.validate_python(item) for item in previous.conversation()]
        new = [MessageItem(role="user", content=request.input)] if isinstance(request.input, str) else request.input
        items += [self._referenced(item) if isinstance(item, ItemReference) else item for item in new]
        if not items:
            raise ApiError(400, "input is needed: a text or a list of items, not empty", "input")
        return items

    def _referenced(self, reference: ItemReference) -> Item:
        if (item := self.store.item(reference.id)) is None:
            message = f"Item with id '{reference.id[:100]}' not found. It is not, or no longer, stored: send the item"
            raise ApiError(400, message, "input")
        return _ITEM.validate_python(item)

    def _fitting_form(self, request: ResponsesRequest, payload: dict[str, Any], items: Sequence[Item]) -> ChatForm:
        """Return the form of a conversation; with truncation = "auto", without as many of its oldest items as exceed
        the model's context, but with its last item. Raises ApiError (400)."""
        try:
            return self._form(request, payload, items)
        except PromptTooLong as error:
            last = num_droppable(items) if request.truncation == "auto" else 0
            forms: dict[int, ChatForm] = {}

            def fits(count: int) -> bool:
                try:
                    forms[count] = self._form(request, payload, oldest_dropped(items, count))
                except PromptTooLong:
                    return False
                return True

            count = 1 + bisect.bisect_left(range(1, last + 1), True, key=fits)
            if count not in forms:
                param = "input" if error.field == "prompt" else "max_output_tokens"
                message = str(error).replace("max_tokens", "max_output_tokens")
                raise ApiError(400, message, param, "context_length_exceeded") from error
            forms[count].warnings.append(f"truncation: the oldest {count} items are not part of the prompt")
            return forms[count]

    def _form(self, request: ResponsesRequest, payload: dict[str, Any], items: Sequence[Item]) -> ChatForm:
        try:
            return self._service.chat_form(request.chat_payload(payload, items))[1]
        except ApiError as error:
            raise renamed(error) from error


def listed(items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of items: `order` asc or desc (the default), `after` an item's id, `limit` 1 to 100 (20). Raises
    ApiError (400)."""
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise ApiError(400, "order must be asc or desc", "order")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= 100):
        raise ApiError(400, "limit must be a number from 1 to 100", "limit")
    ordered = items if order == "asc" else items[::-1]
    if (after := query.get("after")) is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise ApiError(400, f"after names no item of this response: {after[:100]!r}", "after")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[: int(limit)]
    ids = [item["id"] for item in page] or [None]
    return {
        "object": "list", "data": page, "first_id": ids[0], "last_id": ids[-1], "has_more": len(page) < len(ordered),
    }  # fmt: skip


def add_responses(app: FastAPI, service: Service) -> None:
    """Add the Responses API to the application."""
    responses = Responses(service, ResponseStore())
    endpoint = Endpoint("responses", responses.reply, "input")

    @app.post("/v1/responses")
    async def create() -> Response:
        return GenerationResponse(service, endpoint)

    @app.get("/v1/responses/{response_id}")
    async def retrieve(response_id: str, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise ApiError(400, "a stored response is not streamed", "stream", "unsupported_parameter")
        return Response(responses.stored(response_id).response, media_type="application/json")

    @app.delete("/v1/responses/{response_id}")
    async def delete(response_id: str) -> Response:
        responses.stored(response_id)
        responses.store.remove(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(response_id: str, request: Request) -> Response:
        items = json.loads(responses.stored(response_id).input_items)
        return JSONResponse(listed(items, request.query_params))
