"""/openapi.json: the document of FastAPI's routes with the requests and the errors, which are not FastAPI's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

_REFERENCE = "#/components/schemas/{model}"
_ERRORS = {
    400: "The request is not valid.", 401: "The API key is missing or wrong.",
    404: "The model, path or object does not exist.", 405: "The path has no such method.",
    408: "The body was not received in time.", 413: "The body is too large.",
    415: "The body is not uncompressed JSON in UTF-8.", 429: "Too many requests are waiting.",
    500: "The model or the server failed.", 503: "The server is starting, shutting down or has failed.",
}  # fmt: skip
# pydantic's names of keywords behind a validator -> those of JSON Schema.
_KEYWORDS = {"ge": "minimum", "le": "maximum"}
_ERROR = {
    "type": "object", "required": ["error"],
    "properties": {"error": {
        "type": "object", "required": ["message", "type"],
        "properties": {
            "message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]},
            "code": {"type": ["string", "null"]},
        },
    }},
}  # fmt: skip


def document(app: FastAPI, requests: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """Return the OpenAPI document of an application.

    requests  path of a POST -> model of its JSON body
    """
    result = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = result.setdefault("components", {}).setdefault("schemas", {})
    schemas["Error"] = _ERROR
    error = {"application/json": {"schema": {"$ref": _REFERENCE.format(model="Error")}}}
    for path, operations in result["paths"].items():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)
            for status, description in _ERRORS.items():
                operation["responses"][str(status)] = {"description": description, "content": error}
            if method == "post" and path in requests:
                model = requests[path]
                schema = model.model_json_schema(ref_template=_REFERENCE)
                schemas |= {name: _open(part) for name, part in schema.pop("$defs", {}).items()}
                schemas[model.__name__] = _open(schema)
                body = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}}
                operation["requestBody"] = {"required": True, "content": body}
    return result


def _open(schema: Any) -> Any:
    """Return a schema of pydantic's whose objects may have more fields, which are ignored."""
    if isinstance(schema, list):
        return [_open(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        _KEYWORDS.get(name, name): _open(value)
        for name, value in schema.items()
        if not (name == "additionalProperties" and value is False)
    }
