"""The HTTP application: the endpoints over one AsyncEngine."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from mlaforge import runtime
from mlaforge.serving.admission import ApiKey, App, Receive, Scope, Send
from mlaforge.serving.anthropic_reply import messages_reply
from mlaforge.serving.async_engine import AsyncEngine
from mlaforge.serving.config import ServeConfig
from mlaforge.serving.generation import CountResponse, Endpoint, GenerationResponse
from mlaforge.serving.responses import add_responses
from mlaforge.serving.service import Service
from mlaforge.serving.wire import ApiError

# /health fails if the engine has work and finishes no step for this many seconds. The first steps on a GPU may compile
# kernels.
STUCK_SECONDS = 120.0


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

    completions_endpoint = Endpoint("completions", service.text_reply, "prompt")
    chat_endpoint = Endpoint("chat", service.chat_reply)
    read_messages = functools.partial(messages_reply, service)
    messages_endpoint = Endpoint("messages", read_messages, error_body=ApiError.anthropic_body)
    count_endpoint = Endpoint("count_tokens", read_messages, error_body=ApiError.anthropic_body)

    @app.post("/v1/completions")
    async def completions() -> Response:
        return GenerationResponse(service, completions_endpoint)

    @app.post("/v1/chat/completions")
    async def chat_completions() -> Response:
        return GenerationResponse(service, chat_endpoint)

    add_responses(app, service)
    @app.post("/v1/messages")
    async def messages() -> Response:
        return GenerationResponse(service, messages_endpoint)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens() -> Response:
        return CountResponse(service, count_endpoint)

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
    return JSONResponse(api_error.body_at(request.url.path), api_error.status, headers=error.headers)


async def _internal_error(request: Request, exception: Exception) -> Response:
    """Starlette raises the error again afterwards, so that its traceback appears in the server's log alone."""
    error = ApiError(500, "internal server error; see the server's log")
    return JSONResponse(error.body_at(request.url.path), 500)
