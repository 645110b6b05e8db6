"""Strict pydantic models for JSON objects, and validation errors with the path in the client's request."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from mlaforge.serving.wire import ApiError


class Strict(BaseModel):
    """Base model without coercion, infinite numbers and unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _not_crowded(cls, value: Any) -> Any:
        # pydantic records every error: a million of them would take gigabytes.
        if isinstance(value, dict) and len(value) > 100:
            raise ValueError("an object with more than 100 fields")
        return value


def api_error(error: ValidationError, payload: Any) -> ApiError:
    """Return one of pydantic's errors with its path in the client's request: the deepest path, because of several
    members of a union the one that matched furthest was meant."""
    details = error.errors(include_url=False, include_context=False, include_input=False)[:100]
    paths = [_path(detail["loc"], detail["type"] == "missing", payload) for detail in details]
    path, detail = max(zip(paths, details, strict=True), key=lambda pair: len(pair[0]))
    param = ".".join(path) or None
    return ApiError(400, f"{param}: {detail['msg']}" if param else detail["msg"], param)


def _path(location: tuple[int | str, ...], missing: bool, value: Any) -> list[str]:
    """Return the keys of an error's location that exist in the request, and the last one if that is the missing field:
    pydantic inserts the names of union members."""
    path: list[str] = []
    for remaining, key in zip(reversed(range(len(location))), location, strict=True):
        if isinstance(value, dict) and (key in value or (missing and not remaining)):
            path.append(str(key)[:100])
            value = value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            path.append(str(key))
            value = value[key]
    return path
