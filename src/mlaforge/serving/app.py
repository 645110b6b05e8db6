"""The HTTP application: the endpoints over one AsyncEngine."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from mlaforge import runtime
from mlaforge.serving.admission import ApiKey
from mlaforge.serving.anthropic_reply import messages_reply
from mlaforge.serving.anthropic_request import MessagesRequest
from mlaforge.serving.async_engine import AsyncEngine
from mlaforge.serving.config import ServeConfig
from mlaforge.serving.generation import ComputedResponse, Endpoint, GenerationResponse
from mlaforge.serving.middleware import Options, RequestId, TrailingSlash
from mlaforge.serving.openapi import document
from mlaforge.serving.protocol import ChatRequest, CompletionRequest
from mlaforge.serving.responses import add_responses
from mlaforge.serving.responses_request import ResponsesRequest
from mlaforge.serving.service import Service
from mlaforge.serving.tokenization import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from mlaforge.serving.wire import ApiError

# /health fails if the engine has work and finishes no step for this many seconds. The first steps on a GPU may compile
# kernels.
STUCK_SECONDS = 120.0


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
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(Exception, _internal_error)
    _add_json_endpoints(app, service)
    add_responses(app, service)
    _add_pages(app, service)
    _add_middleware(app, config)
    return app


# Bodies of the paths with a JSON request.
REQUESTS: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest, "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest, "/v1/messages/count_tokens": MessagesRequest, "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}  # fmt: skip


def _add_json_endpoints(app: FastAPI, service: Service) -> None:
    """Add the paths whose requests are JSON and are limited by the admission control."""
    read_messages = functools.partial(messages_reply, service)

    def count_tokens(payload: dict[str, Any]) -> dict[str, Any]:
        return {"input_tokens": read_messages(payload).usage.prompt_tokens}

    for path, kind, endpoint in (
        ("/v1/completions", GenerationResponse, Endpoint("completions", service.text_reply, "prompt")),
        ("/v1/chat/completions", GenerationResponse, Endpoint("chat", service.chat_reply)),
        ("/v1/messages", GenerationResponse, Endpoint("messages", read_messages, error_body=ApiError.anthropic_body)),
        (
            "/v1/messages/count_tokens", ComputedResponse,
            Endpoint("count_tokens", count_tokens, error_body=ApiError.anthropic_body),
        ),
        ("/tokenize", ComputedResponse, Endpoint("tokenize", functools.partial(tokenize, service), "prompt")),
        ("/detokenize", ComputedResponse, Endpoint("detokenize", functools.partial(detokenize, service), "tokens")),
    ):  # fmt: skip
        app.add_api_route(path, _responder(kind, service, endpoint), methods=["POST"], name=endpoint.name)


def _responder(
    kind: type[GenerationResponse], service: Service, endpoint: Endpoint
) -> Callable[[], Awaitable[Response]]:
    async def respond() -> Response:
        return kind(service, endpoint)

    return respond


def _add_pages(app: FastAPI, service: Service) -> None:
    """Add the paths that are read: models, health, metrics, version."""
    engine = service.engine

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return JSONResponse(document(app, REQUESTS))

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
    @app.get("/ping")
    @app.post("/ping")
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


def _add_middleware(app: FastAPI, config: ServeConfig) -> None:
    """Add the middleware; the last one added is the outermost."""
    methods: dict[str, set[str]] = {}
    for route in app.routes:
        if isinstance(route, APIRoute):
            names = route.methods or set()
            methods.setdefault(route.path, {"OPTIONS"}).update(names, {"HEAD"} if "GET" in names else set())
    app.add_middleware(Options, methods={path: ", ".join(sorted(names)) for path, names in methods.items()})
    if config.api_key:
        public = ("/health", "/ping", *(("/metrics",) if config.public_metrics else ()))
        app.add_middleware(ApiKey, key=config.api_key, public=public)
    if origins := [origin.strip() for origin in config.allowed_origins.split(",") if origin.strip()]:
        # Outside of the key check: a browser's preflight carries no key.
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"],
            expose_headers=["x-request-id", "x-mlaforge-warning"],
        )  # fmt: skip
    app.add_middleware(TrailingSlash)
    app.add_middleware(RequestId)


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model, "object": "model", "created": service.created, "owned_by": "mlaforge",
        "max_model_len": service.engine.engine.max_model_len,
    }  # fmt: skip


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    known = {route.path for route in request.app.routes if isinstance(route, APIRoute)}
    hint = f"; the path is /v1{path}, so the base URL ends with /v1" if f"/v1{path}" in known else ""
    hint = hint or (f"; the path is {path[3:]}" if path.startswith("/v1/v1/") and path[3:] in known else "")
    api_error = ApiError(error.status_code, f"{request.method} {path[:200]}: {error.detail}{hint}")
    return JSONResponse(api_error.body_at(request.url.path), api_error.status, headers=error.headers)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body_at(request.url.path), error.status, headers=error.headers)


async def _internal_error(request: Request, exception: Exception) -> Response:
    """Starlette raises the error again afterwards, so that its traceback appears in the server's log alone."""
    error = ApiError(500, "internal server error; see the server's log")
    return JSONResponse(error.body_at(request.url.path), 500)
