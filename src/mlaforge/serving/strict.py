"""pydantic models for JSON objects without coercion, and validation errors with the path in the client's request."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, PrivateAttr, ValidationError, model_validator

from mlaforge.runtime import log
from mlaforge.serving.wire import ApiError

# Whether unknown fields are errors; otherwise they are dropped.
_STRICT_FIELDS = contextvars.ContextVar("strict_fields", default=False)
# Unknown fields that a log line has named, at most MAX_LOGGED: clients choose the names.
_LOGGED: set[str] = set()
MAX_LOGGED = 100


@contextlib.contextmanager
def strict_fields(enabled: bool) -> Iterator[None]:
    """Within this context unknown fields of a request are errors, if `enabled`."""
    token = _STRICT_FIELDS.set(enabled)
    try:
        yield
    finally:
        _STRICT_FIELDS.reset(token)


def are_fields_strict() -> bool:
    """Return whether unknown fields are errors."""
    return _STRICT_FIELDS.get()


def log_ignored(owner: str, name: str) -> None:
    """Log once that a field of a request has no effect."""
    line = f"ignored in requests: {name[:100]!r} in {owner}"
    if line not in _LOGGED and len(_LOGGED) < MAX_LOGGED:
        _LOGGED.add(line)
        log(line)


def _whole(value: Any) -> Any:
    """Convert 3.0 to 3: clients in JavaScript and JSON libraries do not distinguish the two."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# An int that may be written as 3.0.
Whole = Annotated[int, BeforeValidator(_whole)]


class Strict(BaseModel):
    """Base model without coercion and infinite numbers. Fields that are null count as missing, and those among
    `harmless` are dropped. Other unknown fields are dropped with a log line; under `strict_fields` they are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    # Fields that clients are known to send and that change nothing about the answer.
    harmless: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        # pydantic records every error: a million of them would take gigabytes.
        if len(value) > 100:
            raise ValueError("an object with more than 100 fields")
        present = {name: field for name, field in value.items() if field is not None and name not in cls.harmless}
        if are_fields_strict():
            return present
        known = {info.alias or name for name, info in cls.model_fields.items()}
        for name in present.keys() - known:
            log_ignored(cls.__name__, name)
        return {name: field for name, field in present.items() if name in known}


class RequestModel(Strict):
    """Base model of the request of an endpoint. `warnings` name its parts that have no effect."""

    _warnings: list[str] = PrivateAttr(default_factory=list)

    @property
    def warnings(self) -> list[str]:
        return self._warnings


def api_error(error: ValidationError, payload: Any) -> ApiError:
    """Return one of pydantic's errors with its path in the client's request: the deepest path, because of several
    members of a union the one that matched furthest was meant."""
    details = error.errors(include_url=False, include_context=False, include_input=False)[:100]
    paths = [_path(detail["loc"], detail["type"] == "missing", payload) for detail in details]
    path, detail = max(zip(paths, details, strict=True), key=lambda pair: len(pair[0]))
    param = ".".join(path) or None
    message = detail["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param}: {message}" if param else message, param)


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
