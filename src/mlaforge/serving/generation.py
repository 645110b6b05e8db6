"""HTTP responses of generation requests: from reading the body to the last byte, streamed or whole."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from fastapi import Response

from mlaforge.engine.request.output import RequestOutput
from mlaforge.engine.request.sequence import PromptTooLong
from mlaforge.runtime import UserError
from mlaforge.serving import wire
from mlaforge.serving.admission import (
    Disconnected,
    Receive,
    Scope,
    Send,
    send_json,
    while_connected,
    with_write_timeout,
)
from mlaforge.serving.async_engine import EngineUnavailable, Stream
from mlaforge.serving.bodies import BodyReceive
from mlaforge.serving.protocol import refusal
from mlaforge.serving.replies import Reply
from mlaforge.serving.service import Service
from mlaforge.serving.strict import strict_fields
from mlaforge.serving.wire import ApiError

# The client closed the connection before the response: nginx's status code, for the metrics alone.
CLIENT_CLOSED_REQUEST = 499
# Tokens whose parsing blocks other requests for about 10 ms.
PARSED_TOKENS = 1024


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A path with a JSON request.

    name          label of the metrics
    read          payload -> reply, or for ComputedResponse the response; raises ApiError and PromptTooLong
    prompt_field  field of the request that the prompt is made of
    error_body    error -> JSON object of the response
    """

    name: str
    read: Callable[[dict[str, Any]], Any]
    prompt_field: str = "messages"
    error_body: Callable[[ApiError], dict[str, Any]] = ApiError.body


class GenerationResponse(Response):
    """ASGI response of a generation request; its blocks and slot are released however it ends."""

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        super().__init__()
        self._service, self._endpoint = service, endpoint
        self._arrived = time.perf_counter()
        self._body = b""
        self._reply: Reply | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, status, receive_body = self._service, 500, BodyReceive(receive)
        try:
            wire.check_headers(scope["headers"])
            # A request is admitted only when it is complete, so that unfinished bodies occupy no slot.
            self._body = await service.bodies.read(scope, receive_body)
            async with service.admission.admit():
                work = self._respond(with_write_timeout(send, service.config.client_timeout))
                await while_connected(receive, work)
            status = 200
        except Disconnected:
            status = CLIENT_CLOSED_REQUEST
        except ApiError as error:
            status = error.status
            # The rest of a refused body is read and dropped, unless the body timed out.
            unread = receive_body.more and status != 408
            body = wire.dumps(self._endpoint.error_body(error))
            await send_json(send, status, body, error.headers, more_body=unread)
            if unread:
                await receive_body.discard(service.config.client_timeout)
                await send({"type": "http.response.body", "body": b""})
        finally:
            reply = self._reply
            ids, n = (list(reply.request_ids), reply.form.params.n) if reply else ([], 0)
            service.metrics.record_request(self._endpoint.name, status, self._arrived, ids, n)

    def _parse(self, body: bytes) -> Any:
        """Raises ApiError."""
        try:
            with strict_fields(self._service.config.strict_fields):
                return self._endpoint.read(wire.parse_object(body))
        except PromptTooLong as error:
            field = self._endpoint.prompt_field if error.field == "prompt" else error.field
            raise ApiError(400, str(error), field, "context_length_exceeded") from error

    async def _respond(self, send: Send) -> None:
        service, body = self._service, self._body
        async with AsyncExitStack() as slot:
            with service.admission.waiting(len(body)):
                reply = await service.prompts.in_thread(len(body), self._parse, body)
                await service.check_grammar(reply.form)
                await slot.enter_async_context(service.admission.slot())
            # Running requests are limited by count, not by bytes: their bodies are released.
            self._body, self._reply = b"", reply
            form, headers = reply.form, warning_header(reply.form.warnings)
            requests = {
                request_id: (form.prompts[i].token_ids, form.params) for request_id, i in reply.request_ids.items()
            }  # fmt: skip
            try:
                async with service.engine.open(requests, self._arrived) as stream:
                    await stream.accepted()
                    if reply.stream:
                        await _stream(reply, stream, headers, send)
                        return
                    outputs = await stream.complete()
            except UserError as error:
                raise refusal(error) from error
            except EngineUnavailable as error:
                raise _unavailable(error) from error
        if any(map(_is_long, outputs)):
            response = await asyncio.to_thread(lambda: wire.dumps_long(reply.full_response(outputs)))
        else:
            response = wire.dumps(reply.full_response(outputs))
        await send_json(send, 200, response, headers)


class ComputedResponse(GenerationResponse):
    """Response of an endpoint that generates nothing: `Endpoint.read` returns its JSON object."""

    async def _respond(self, send: Send) -> None:
        service, body = self._service, self._body
        with service.admission.waiting(len(body)):
            result = await service.prompts.in_thread(len(body), self._parse, body)
        await send_json(send, 200, wire.dumps_long(result), {})


def warning_header(warnings: list[str]) -> dict[str, str]:
    """Return the response header that names the parts of a request that have no effect, at most 1,000 characters."""
    text = "; ".join(warnings).encode("ascii", "replace").decode()
    text = "".join(c if c.isprintable() else " " for c in text)
    return {"x-mlaforge-warning": text[:1000]} if warnings else {}


def _is_long(output: RequestOutput) -> bool:
    """Return whether parsing an output's tokens and serialising its log probabilities take so long that they are done
    in a thread."""
    tokens = sum(len(completion.token_ids) for completion in output.outputs)
    logprobs = sum(len(completion.logprobs or ()) for completion in output.outputs)
    return output.prompt_logprobs is not None or logprobs > wire.SLICE or tokens > PARSED_TOKENS


def _unavailable(error: EngineUnavailable) -> ApiError:
    return ApiError(503, str(error), headers={"Retry-After": "10"})


async def _stream(reply: Reply, stream: Stream, headers: dict[str, str], send: Send) -> None:
    """Send server-sent events; an error after the head is the last event, as in OpenAI's API."""
    fields = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})
    end = b""
    try:
        if start := reply.start():
            await send({"type": "http.response.body", "body": start, "more_body": True})
        async for output in stream:
            if _is_long(output):
                body = await asyncio.to_thread(reply.events, output, wire.dumps_long)
            else:
                body = reply.events(output, wire.dumps)
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        end = reply.end()
    except UserError as error:
        end = reply.error(refusal(error))
    except EngineUnavailable as error:
        end = reply.error(_unavailable(error))
    await send({"type": "http.response.body", "body": end, "more_body": False})
