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
from mlaforge.serving.bodies import Bodies, Incoming
from mlaforge.serving.chat import Chat
from mlaforge.serving.config import ServeConfig
from mlaforge.serving.metrics import Metrics
from mlaforge.serving.prompts import Prompts
from mlaforge.serving.protocol import ChatRequest, CompletionRequest, Generation, StreamOptions, refusal
from mlaforge.serving.responses import ChatForm, Form, Prompt, Reply, TextForm
from mlaforge.serving.token_text import TokenText
from mlaforge.serving.wire import ApiError

# Bodies of the largest size for which there is room: that are on their way, and that wait for a slot at the engine.
ROOM = 16
# Grammars that are compiled at once, each in a process.
GRAMMAR_CHECKS = 16
# After so many seconds without the end of a step, though there is work, /health fails. The first steps on a GPU may
# compile kernels.
STUCK_SECONDS = 120.0
# The client closed the connection before its answer: for the metrics alone (nginx's number).
CLIENT_CLOSED_REQUEST = 499


class Service:
    """What the endpoints share: the engine, its limits and metrics, and requests turned into forms."""

    def __init__(self, engine: AsyncEngine, config: ServeConfig) -> None:
        inner = engine.engine
        self.engine, self.config = engine, config
        self.model = config.served_model_name or inner.model_name
        self.created = int(time.time())
        room = ROOM * config.max_body
        self.bodies = Bodies(config.max_body, config.client_timeout, room)
        self.admission = AdmissionControl(config.max_concurrent, config.max_queue, room)
        self.metrics = Metrics(engine, self.admission)
        self.tokens = TokenText(inner.tokenizer)
        self.prompts = Prompts(inner.tokenizer, inner.max_model_len)
        self.chat = Chat(
            inner.tokenizer, harmony.choose(inner.tokenizer, config.harmony), self.prompts, config.ignored_tools
        )
        self.checking = ThreadPoolExecutor(GRAMMAR_CHECKS, thread_name_prefix="mlaforge-grammar")

    async def check_grammar(self, params: SamplingParams) -> None:
        """Raises ApiError (400) where the grammar cannot be followed. Nobody else waits meanwhile."""
        if params.regex is None and params.json_schema is None:
            return
        try:
            check = self.engine.engine.check_grammar
            await asyncio.get_running_loop().run_in_executor(self.checking, check, params)
        except UserError as error:
            raise refusal(error) from error

    def text_form(self, payload: dict[str, Any]) -> tuple[CompletionRequest, Form]:
        """A completion request, tokenized. Raises ApiError."""
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
                echoed = request.echo and inner.tokenizer.decode(
                    prompt, skip_special_tokens=request.skip_special_tokens
                )
                prompts.append(Prompt(prompt, echoed or ""))
        scoring_only = request.max_tokens == 0
        defaults = inner.sampling_defaults
        most = defaults.get("max_tokens", 16) if request.max_tokens is None else max(request.max_tokens, 1)
        changes: dict[str, Any] = {"max_tokens": most, "logprobs": request.logprobs}
        if request.echo and request.prompt_logprobs is None:
            changes["prompt_logprobs"] = request.logprobs
        params = request.params(inner.vocab_size, defaults, **changes)
        wants = request.prompt_logprobs is not None
        form = TextForm(
            self.model, prompts, params, self.tokens, request.logprobs, wants, request.return_tokens_as_token_ids,
            echo=request.echo, scoring_only=scoring_only,
        )  # fmt: skip
        return request, form

    def chat_form(self, payload: dict[str, Any]) -> tuple[ChatRequest, Form]:
        """A chat request, tokenized. Raises ApiError."""
        request = ChatRequest.read(payload)
        self._check(request)
        defaults = self.engine.engine.sampling_defaults
        limit, alternatives = request.limit(), request.alternatives()
        most = defaults.get("max_tokens") if limit is None else limit
        changes = {"max_tokens": most, "logprobs": alternatives, **self.chat.sampling(request)}
        params = request.params(self.engine.engine.vocab_size, defaults, **changes)
        ids = self.chat.prompt(request)
        self._check_prompt(ids, limit)
        wants = request.prompt_logprobs is not None
        form = ChatForm(
            self.model, [Prompt(ids)], params, self.tokens, alternatives, wants, request.return_tokens_as_token_ids,
            parser=self.chat.parser(request),
        )  # fmt: skip
        return request, form

    def _check(self, request: Generation) -> None:
        if request.model is not None and request.model != self.model:
            message = f"there is no model {request.model[:200]!r} here; it is {self.model!r}"
            raise ApiError(404, message, "model", "model_not_found")
        if request.n > (most := self.config.max_n or self.config.max_num_seqs):
            raise ApiError(400, f"n = {request.n} is too large; at most {most}", "n")

    def _check_prompt(self, token_ids: list[int], max_tokens: int | None) -> None:
        inner = self.engine.engine
        try:
            check_prompt(token_ids, inner.vocab_size, inner.max_model_len, max_tokens or 1)
        except PromptTooLong:
            raise
        except UserError as error:
            raise ApiError(400, str(error), "prompt") from error

    async def drain(self) -> None:
        """New requests get 503; waits for the running ones as long as the configuration says, then ends them."""
        start = time.perf_counter()
        await self.admission.drain(self.config.drain_timeout)
        await self.engine.drain(max(self.config.drain_timeout - (time.perf_counter() - start), 0))

    def close(self) -> None:
        self.engine.close()
        self.chat.close()
        self.prompts.close()
        self.checking.shutdown(wait=False, cancel_futures=True)


class Answer(Response):
    """One request from its body to the last byte of its answer; whatever ends it, its blocks and slot are released."""

    def __init__(
        self, service: Service, endpoint: str, read: Callable[[dict[str, Any]], tuple[Generation, Form]]
    ) -> None:
        super().__init__()
        self._service, self._endpoint, self._read = service, endpoint, read
        self._arrived = time.perf_counter()
        self._body = b""
        self._reply: Reply | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, status, incoming = self._service, 500, Incoming(receive)
        try:
            content_type = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
            wire.check_media_type(content_type)
            # Only a request that has come whole is admitted: half a body keeps nobody out.
            self._body = await service.bodies.read(scope, incoming)
            async with service.admission.admit():
                answer = self._answer(with_write_timeout(send, service.config.client_timeout))
                await while_connected(receive, answer)
            status = 200
        except Disconnected:
            status = CLIENT_CLOSED_REQUEST
        except ApiError as error:
            status = error.status
            # The rest of a body that nobody wants is read all the same; not what was waited for in vain.
            unread = incoming.more and status != 408
            await send_json(send, status, wire.dumps(error.body()), error.headers, more_body=unread)
            if unread:
                await incoming.discard(service.config.client_timeout)
                await send({"type": "http.response.body", "body": b""})
        finally:
            reply = self._reply
            ids, n = (list(reply.request_ids), reply.form.params.n) if reply else ([], 0)
            service.metrics.ended(self._endpoint, status, self._arrived, ids, n)

    def _parse(self, body: bytes) -> tuple[Generation, Form]:
        """Raises ApiError."""
        try:
            return self._read(wire.parse_object(body))
        except PromptTooLong as error:
            # Of a chat the messages are the prompt.
            field = "messages" if error.field == "prompt" and self._endpoint == "chat" else error.field
            raise ApiError(400, str(error), field, "context_length_exceeded") from error

    async def _answer(self, send: Send) -> None:
        service, body = self._service, self._body
        async with AsyncExitStack() as held:
            with service.admission.waiting(len(body)):
                request, form = await service.prompts.in_thread(len(body), self._parse, body)
                await service.check_grammar(form.params)
                await held.enter_async_context(service.admission.slot())
            # Those that run are bounded by their number: not a body is kept of them.
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
        if any(map(_long, outputs)):
            whole = await asyncio.to_thread(lambda: wire.dumps_long(reply.whole(outputs)))
        else:
            whole = wire.dumps(reply.whole(outputs))
        await send_json(send, 200, whole, {})


def _long(output: RequestOutput) -> bool:
    """Whether an output's log probabilities take long to write: that is for a thread."""
    counts = [len(each.logprobs or ()) for each in output.outputs]
    return output.prompt_logprobs is not None or sum(counts) > wire.AT_ONCE


def _unavailable(error: EngineUnavailable) -> ApiError:
    return ApiError(503, str(error), headers={"Retry-After": "10"})


async def _stream(reply: Reply, request: Generation, stream: Stream, send: Send) -> None:
    """Server-sent events; an error on the way is the last of them, as OpenAI sends it."""
    options = request.stream_options
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    end = b""
    try:
        async for output in stream:
            if _long(output):
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
    """An output as events; nothing where a client would not notice it."""
    chunks = reply.chunks(output)
    if options is not None and options.continuous_usage_stats:
        chunks = [{**chunk, "usage": reply.usage.as_dict()} for chunk in chunks]
    return b"".join(wire.event(chunk, write) for chunk in chunks)


class TrailingSlash:
    """ASGI middleware: a path means the same with a slash at its end. (A redirect would not bring a POST there with
    every client.)"""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await self._app(scope, receive, send)


def create_app(engine: AsyncEngine, config: ServeConfig) -> FastAPI:
    """The application; `app.state.service` is its Service. Raises UserError where the model's chat format lacks its
    package. The engine is started with the application and closed with it."""
    service = Service(engine, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        service.close()

    # No documentation pages: they would load scripts from elsewhere. No CORS: pages of others stay out.
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
    app.add_exception_handler(Exception, _our_error)

    @app.post("/v1/completions")
    async def completions() -> Response:
        return Answer(service, "completions", service.text_form)

    @app.post("/v1/chat/completions")
    async def chat_completions() -> Response:
        return Answer(service, "chat", service.chat_form)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != service.model:
            error = ApiError(404, f"there is no model {name[:200]!r} here", "model", "model_not_found")
            return JSONResponse(error.body(), error.status)
        return JSONResponse(_model(service))

    @app.get("/health")
    async def health() -> Response:
        if service.admission.draining or engine.unavailable is not None:
            why = str(engine.unavailable or "the server is shutting down")
            return JSONResponse(ApiError(503, why).body(), 503)
        if (seconds := engine.busy) > STUCK_SECONDS:
            return JSONResponse(ApiError(503, f"no step has ended for {seconds:.0f} s").body(), 503)
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


async def _our_error(request: Request, error: Exception) -> Response:
    """Starlette raises it again afterwards, so that its traceback is in the server's log and only there."""
    return JSONResponse(ApiError(500, "an error of the server's own; see its log").body(), 500)
