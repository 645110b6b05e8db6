"""The HTTP application: OpenAI's endpoints over one AsyncEngine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from mlaforge import runtime
from mlaforge.engine.request import harmony
from mlaforge.engine.request.output import RequestOutput
from mlaforge.engine.request.sequence import PromptTooLong, check_prompt
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError
from mlaforge.serving import wire
from mlaforge.serving.admission import (
    AdmissionControl,
    ApiKey,
    App,
    Disconnected,
    Receive,
    Scope,
    Send,
    send_json,
    while_connected,
    with_write_timeout,
)
from mlaforge.serving.async_engine import AsyncEngine, EngineUnavailable, Stream
from mlaforge.serving.bodies import Bodies, BodyReceive
from mlaforge.serving.chat import Chat
from mlaforge.serving.config import ServeConfig
from mlaforge.serving.metrics import Metrics
from mlaforge.serving.prompts import Prompts
from mlaforge.serving.protocol import ChatRequest, CompletionRequest, Generation, StreamOptions, refusal
from mlaforge.serving.responses import ChatForm, Form, Prompt, Reply, TextForm
from mlaforge.serving.token_text import TokenText
from mlaforge.serving.wire import ApiError

# Bodies of maximal size that fit in memory at once: as many unfinished ones, and as many that wait for a slot.
MAX_BODIES = 16
# Grammars compiled concurrently, each in a process.
GRAMMAR_CHECKS = 16
# /health fails if the engine has work and finishes no step for this many seconds. The first steps on a GPU may compile
# kernels.
STUCK_SECONDS = 120.0
# The client closed the connection before the response: nginx's status code, for the metrics alone.
CLIENT_CLOSED_REQUEST = 499


class Service:
    """State shared by the endpoints: the engine, limits, metrics, and the conversion of requests to response forms."""

    def __init__(self, engine: AsyncEngine, config: ServeConfig) -> None:
        inner = engine.engine
        self.engine, self.config = engine, config
        self.model = config.served_model_name or inner.model_name
        self.created = int(time.time())
        max_bytes = MAX_BODIES * config.max_body
        self.bodies = Bodies(config.max_body, config.client_timeout, max_bytes)
        self.admission = AdmissionControl(config.max_concurrent, config.max_queue, max_bytes)
        self.metrics = Metrics(engine, self.admission)
        self.tokens = TokenText(inner.tokenizer)
        self.prompts = Prompts(inner.tokenizer, inner.max_model_len)
        self.chat = Chat(
            inner.tokenizer, harmony.choose(inner.tokenizer, config.harmony), self.prompts, config.ignored_tools
        )
        self.grammar_pool = ThreadPoolExecutor(GRAMMAR_CHECKS, thread_name_prefix="mlaforge-grammar")

    async def check_grammar(self, params: SamplingParams) -> None:
        """Compile the request's grammar without blocking other requests. Raises ApiError (400) for an invalid one."""
        if params.regex is None and params.json_schema is None:
            return
        try:
            check = self.engine.engine.check_grammar
            await asyncio.get_running_loop().run_in_executor(self.grammar_pool, check, params)
        except UserError as error:
            raise refusal(error) from error

    def text_form(self, payload: dict[str, Any]) -> tuple[CompletionRequest, Form]:
        """Parse and tokenize a completion request. Raises ApiError."""
        inner, request = self.engine.engine, CompletionRequest.read(payload)
        self._check(request)
        if request.max_tokens == 0 and not request.echo:
            raise ApiError(400, "max_tokens must be at least 1, or echo true", "max_tokens")
        prompts = []
        for prompt in request.prompts(self.config.max_prompts):
            if isinstance(prompt, str):
                ids = self.prompts.encode(prompt, request.add_special_tokens is not False)
                self._check_prompt(ids, request.max_tokens)
                prompts.append(Prompt(ids, prompt))
            else:
                self._check_prompt(prompt, request.max_tokens)
                echo = request.echo and inner.tokenizer.decode(prompt, skip_special_tokens=request.skip_special_tokens)
                prompts.append(Prompt(prompt, echo or ""))
        scoring_only = request.max_tokens == 0
        defaults = inner.sampling_defaults
        max_tokens = defaults.get("max_tokens", 16) if request.max_tokens is None else max(request.max_tokens, 1)
        changes: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": request.logprobs}
        if request.echo and request.prompt_logprobs is None:
            changes["prompt_logprobs"] = request.logprobs
        params = request.params(inner.vocab_size, defaults, **changes)
        with_prompt_logprobs = request.prompt_logprobs is not None
        form = TextForm(
            self.model, prompts, params, self.tokens, request.logprobs, with_prompt_logprobs,
            request.return_tokens_as_token_ids, echo=request.echo, scoring_only=scoring_only,
        )  # fmt: skip
        return request, form

    def chat_form(self, payload: dict[str, Any]) -> tuple[ChatRequest, Form]:
        """Parse and tokenize a chat request. Raises ApiError."""
        request = ChatRequest.read(payload)
        self._check(request)
        defaults = self.engine.engine.sampling_defaults
        limit, top_logprobs = request.limit(), request.num_top_logprobs()
        max_tokens = defaults.get("max_tokens") if limit is None else limit
        changes = {"max_tokens": max_tokens, "logprobs": top_logprobs, **self.chat.sampling(request)}
        params = request.params(self.engine.engine.vocab_size, defaults, **changes)
        ids = self.chat.prompt(request)
        self._check_prompt(ids, limit)
        with_prompt_logprobs = request.prompt_logprobs is not None
        form = ChatForm(
            self.model, [Prompt(ids)], params, self.tokens, top_logprobs, with_prompt_logprobs,
            request.return_tokens_as_token_ids, parser=self.chat.parser(request),
        )  # fmt: skip
        return request, form

    def _check(self, request: Generation) -> None:
        if request.model is not None and request.model != self.model:
            message = f"the model {request.model[:200]!r} does not exist here; use {self.model!r}"
            raise ApiError(404, message, "model", "model_not_found")
        if request.n > (max_n := self.config.max_n or self.config.max_num_seqs):
            raise ApiError(400, f"n = {request.n} is too large; at most {max_n}", "n")

    def _check_prompt(self, token_ids: list[int], max_tokens: int | None) -> None:
        inner = self.engine.engine
        try:
            check_prompt(token_ids, inner.vocab_size, inner.max_model_len, max_tokens or 1)
        except PromptTooLong:
            raise
        except UserError as error:
            raise ApiError(400, str(error), "prompt") from error

    async def drain(self) -> None:
        """Refuse new requests with 503, wait up to `drain_timeout` for the running ones, then end them."""
        start = time.perf_counter()
        await self.admission.drain(self.config.drain_timeout)
        await self.engine.drain(max(self.config.drain_timeout - (time.perf_counter() - start), 0))

    def close(self) -> None:
        self.engine.close()
        self.chat.close()
        self.prompts.close()
        self.grammar_pool.shutdown(wait=False, cancel_futures=True)


class GenerationResponse(Response):
    """ASGI response of a generation request, from reading the body to the last byte; its blocks and slot are released
    however it ends."""

    def __init__(
        self, service: Service, endpoint: str, read: Callable[[dict[str, Any]], tuple[Generation, Form]]
    ) -> None:
        super().__init__()
        self._service, self._endpoint, self._read = service, endpoint, read
        self._arrived = time.perf_counter()
        self._body = b""
        self._reply: Reply | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, status, receive_body = self._service, 500, BodyReceive(receive)
        try:
            content_type = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
            wire.check_media_type(content_type)
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
            await send_json(send, status, wire.dumps(error.body()), error.headers, more_body=unread)
            if unread:
                await receive_body.discard(service.config.client_timeout)
                await send({"type": "http.response.body", "body": b""})
        finally:
            reply = self._reply
            ids, n = (list(reply.request_ids), reply.form.params.n) if reply else ([], 0)
            service.metrics.record_request(self._endpoint, status, self._arrived, ids, n)

    def _parse(self, body: bytes) -> tuple[Generation, Form]:
        """Raises ApiError."""
        try:
            return self._read(wire.parse_object(body))
        except PromptTooLong as error:
            # The prompt of a chat is its messages.
            field = "messages" if error.field == "prompt" and self._endpoint == "chat" else error.field
            raise ApiError(400, str(error), field, "context_length_exceeded") from error

    async def _respond(self, send: Send) -> None:
        service, body = self._service, self._body
        async with AsyncExitStack() as slot:
            with service.admission.waiting(len(body)):
                request, form = await service.prompts.in_thread(len(body), self._parse, body)
                await service.check_grammar(form.params)
                await slot.enter_async_context(service.admission.slot())
            # Running requests are limited by count, not by bytes: their bodies are released.
            self._body = body = b""
            reply = self._reply = Reply(form)
            requests = {
                request_id: (form.prompts[i].token_ids, form.params) for request_id, i in reply.request_ids.items()
            }  # fmt: skip
            try:
                async with service.engine.open(requests, self._arrived) as stream:
                    await stream.accepted()
                    if request.stream:
                        await _stream(reply, request, stream, send)
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
        await send_json(send, 200, response, {})


def _is_long(output: RequestOutput) -> bool:
    """Return whether serialising an output's log probabilities takes so long that it is done in a thread."""
    counts = [len(completion.logprobs or ()) for completion in output.outputs]
    return output.prompt_logprobs is not None or sum(counts) > wire.SLICE


def _unavailable(error: EngineUnavailable) -> ApiError:
    return ApiError(503, str(error), headers={"Retry-After": "10"})


async def _stream(reply: Reply, request: Generation, stream: Stream, send: Send) -> None:
    """Send server-sent events; an error after the head is the last event, as in OpenAI's API."""
    options = request.stream_options
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    end = b""
    try:
        async for output in stream:
            if _is_long(output):
                body = await asyncio.to_thread(_events, reply, output, options, wire.dumps_long)
            else:
                body = _events(reply, output, options, wire.dumps)
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        if options is not None and options.include_usage:
            end = wire.event(reply.usage_chunk())
        end += wire.DONE
    except UserError as error:
        end = wire.event(refusal(error).body())
    except EngineUnavailable as error:
        end = wire.event(_unavailable(error).body())
    await send({"type": "http.response.body", "body": end, "more_body": False})


def _events(
    reply: Reply, output: RequestOutput, options: StreamOptions | None, write: Callable[[Any], bytes]
) -> bytes:  # fmt: skip
    """Return an output as server-sent events, or nothing if it changes nothing for the client."""
    chunks = reply.chunks(output)
    if options is not None and options.continuous_usage_stats:
        chunks = [{**chunk, "usage": reply.usage.as_dict()} for chunk in chunks]
    return b"".join(wire.event(chunk, write) for chunk in chunks)


class TrailingSlash:
    """ASGI middleware that ignores a slash at the end of a path. (Not every client follows a redirect with a POST.)"""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await self._app(scope, receive, send)


def create_app(engine: AsyncEngine, config: ServeConfig) -> FastAPI:
    """Return the application, which starts the engine and closes it; `app.state.service` is its Service. Raises
    UserError if the package of the model's chat format is missing."""
    service = Service(engine, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        service.close()

    # No documentation pages: they would load scripts from other hosts. No CORS: other web pages have no access.
    app = FastAPI(
        title="mlaforge",
        version=runtime.version(),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    if config.api_key:
        app.add_middleware(ApiKey, key=config.api_key)
    app.add_middleware(TrailingSlash)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)

    @app.post("/v1/completions")
    async def completions() -> Response:
        return GenerationResponse(service, "completions", service.text_form)

    @app.post("/v1/chat/completions")
    async def chat_completions() -> Response:
        return GenerationResponse(service, "chat", service.chat_form)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != service.model:
            error = ApiError(404, f"the model {name[:200]!r} does not exist here", "model", "model_not_found")
            return JSONResponse(error.body(), error.status)
        return JSONResponse(_model(service))

    @app.get("/health")
    async def health() -> Response:
        if service.admission.draining or engine.unavailable is not None:
            reason = str(engine.unavailable or "the server is shutting down")
            return JSONResponse(ApiError(503, reason).body(), 503)
        if (seconds := engine.busy_seconds) > STUCK_SECONDS:
            return JSONResponse(ApiError(503, f"no engine step has finished for {seconds:.0f} s").body(), 503)
        return JSONResponse({"status": "ok", "non_finite_requests": engine.stats.non_finite_requests})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": runtime.version()})

    return app


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model, "object": "model", "created": service.created, "owned_by": "mlaforge",
        "max_model_len": service.engine.engine.max_model_len,
    }  # fmt: skip


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    api_error = ApiError(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}")
    return JSONResponse(api_error.body(), api_error.status, headers=error.headers)


async def _internal_error(request: Request, error: Exception) -> Response:
    """Starlette raises the error again afterwards, so that its traceback appears in the server's log alone."""
    return JSONResponse(ApiError(500, "internal server error; see the server's log").body(), 500)
