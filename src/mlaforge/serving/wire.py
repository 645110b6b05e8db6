"""Serialisation of requests and responses: JSON, server-sent events, and errors in OpenAI's and Anthropic's shapes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

# Far deeper than requests and JSON schemas in practice, far below Python's recursion limit.
MAX_DEPTH = 100
# Maximum number of lists, objects and fields in a body: parsing blocks all other threads for microseconds per part.
MAX_PARTS = 100_000
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# List items serialised per call: json.dumps blocks all other Python threads.
SLICE = 256
# Line ends of Python's splitlines, with which some clients split a stream of events; JSON has escapes for them.
_LINE_ENDS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}
_TYPES = {
    401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error",
    503: "service_unavailable_error",
}  # fmt: skip
# Types of Anthropic's errors: https://docs.anthropic.com/en/api/errors
_ANTHROPIC_TYPES = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    500: "api_error", 503: "overloaded_error",
}  # fmt: skip


class ApiError(Exception):
    """Error response: HTTP status, and message, param and code in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """Return the body in the shape of Anthropic's API. Its clients recognise a prompt that is too long by the
        wording and shorten the conversation."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        prefix = "prompt is too long: " if self.code == "context_length_exceeded" else ""
        details = {"details": {"error_code": self.code}} if self.code else {}
        return {"type": "error", "error": {"type": kind, "message": prefix + self.message, **details}}

    def body_at(self, path: str) -> dict[str, Any]:
        """Return the body in the shape of the API that has this path."""
        return self.anthropic_body() if f"{path}/".startswith("/v1/messages/") else self.body()


def dumps(value: Any) -> bytes:
    """Serialise to compact JSON in UTF-8. A lone surrogate becomes a question mark."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_LINE_ENDS).encode("utf-8", errors="replace")


def dumps_long(value: Any) -> bytes:
    """Same as `dumps`, but serialise long lists in slices, so that other threads can run in between."""
    return b"".join(_pieces(value))


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict) and value:
        for index, (name, field) in enumerate(value.items()):
            yield (b"," if index else b"{") + dumps(name) + b":"
            yield from _pieces(field)
        yield b"}"
    elif isinstance(value, list) and len(value) > SLICE:
        for start in range(0, len(value), SLICE):
            yield (b"," if start else b"[") + dumps(value[start : start + SLICE])[1:-1]
        yield b"]"
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield b"," if index else b"["
            yield from _pieces(item)
        yield b"]"
    else:
        yield dumps(value)


def event(value: Any, write: Callable[[Any], bytes] = dumps) -> bytes:
    """Return one server-sent event."""
    return b"data: " + write(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]} is too large")
    return number


def depth(value: Any) -> int:
    """Return the nesting depth of lists and objects in a JSON value; 0 for a scalar."""
    deepest, level = 0, [value]
    while level := [child for child in level if isinstance(child, dict | list)]:
        deepest += 1
        level = [c for node in level for c in (node.values() if isinstance(node, dict) else node)]
    return deepest


def check_headers(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises ApiError (415) unless these headers of a request say that its body is uncompressed JSON in UTF-8, the
    encoding required by RFC 8259."""
    fields = {name: value.decode("latin-1").lower().strip() for name, value in headers}
    if (encoding := fields.get(b"content-encoding", "identity")) != "identity":
        reason = f"Content-Encoding {encoding[:40]!r} is not supported; send the body uncompressed"
        raise ApiError(415, reason, code="unsupported_encoding")
    media, *parameters = fields.get(b"content-type", "").split(";")
    # This also excludes web pages: a browser needs a CORS preflight to send this type to another origin.
    if media.strip() != "application/json":
        raise ApiError(415, "Content-Type must be application/json")
    for name, _, value in (parameter.partition("=") for parameter in parameters):
        charset = value.strip().strip('"')
        if name.strip() == "charset" and charset not in ("utf-8", "utf8", "us-ascii"):
            raise ApiError(415, f"charset {charset[:40]!r} is not supported; encode the body in UTF-8")


def _parts(text: str) -> int:
    """Return an upper bound of the number of lists, objects and fields of a JSON text."""
    marks = "[{:"
    count = sum(map(text.count, marks))
    if count > MAX_PARTS:
        # Do not count marks inside strings, which are every other part between quotation marks.
        outside = "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])
        count = sum(map(outside.count, marks))
    return count


def parse(text: str) -> Any:
    """Parse a JSON value. Raises ValueError if the text is not JSON, too large or nested too deeply."""
    if _parts(text) > MAX_PARTS:
        raise ValueError(f"it has more than {MAX_PARTS} lists, objects and fields")
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from error
    if text.count("[") + text.count("{") > MAX_DEPTH and depth(value) > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    return value


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse the JSON object of a request's body. Raises ApiError (400) for any other body."""
    try:
        value = parse(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start}") from error
    except ValueError as error:
        raise ApiError(400, f"the body cannot be read as JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(value).__name__}")
    if _SURROGATE.search(body):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise ApiError(400, "the body contains half a surrogate pair (\\ud800 to \\udfff)") from error
    return value
