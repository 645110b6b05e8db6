"""ASGI middleware of the server."""

from __future__ import annotations

import re
import uuid

from mlaforge.serving.admission import App, Message, Receive, Scope, Send

# Ids that clients may choose: they appear in headers and in logs of proxies.
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class TrailingSlash:
    """Ignores a slash at the end of a path. (Not every client follows a redirect with a POST.)"""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await self._app(scope, receive, send)


class RequestId:
    """Answers every request with an `x-request-id`, the client's or a new one."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = sent if _REQUEST_ID.fullmatch(sent) else f"req_{uuid.uuid4().hex}".encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id)]}
            await send(message)

        await self._app(scope, receive, send_with_id)


class Options:
    """Answers OPTIONS with the methods of the path, and HEAD as GET without a body.

    Without `--allowed-origins` the answer to OPTIONS permits no other origin anything.
    """

    def __init__(self, app: App, methods: dict[str, str]) -> None:
        """methods: path -> value of the header Allow."""
        self._app, self._methods = app, methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS" and (allow := self._methods.get(scope["path"])):
            await send({"type": "http.response.start", "status": 204, "headers": [(b"allow", allow.encode())]})
            await send({"type": "http.response.body", "body": b""})
            return
        if scope["type"] != "http" or scope["method"] != "HEAD" or "GET" not in self._methods.get(scope["path"], ""):
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_head)
