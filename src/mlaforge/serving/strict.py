"""JSON objects as strictly typed ones; a mistake is told with the path to it as the client wrote it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from mlaforge.serving.wire import ApiError


class Strict(BaseModel):
    """No coercion, no infinite number, no unknown field."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _not_crowded(cls, value: Any) -> Any:
        # pydantic writes down every single mistake: a million of them would take gigabytes.
        if isinstance(value, dict) and len(value) > 100:
            raise ValueError("an object with more fields than there are")
        return value


def explained(error: ValidationError, payload: Any) -> ApiError:
    """One of pydantic's complaints, with the path to what it complains about as the client wrote it: the deepest path,
    because where alternatives were tried, the one that came furthest is the one that was meant."""
    details = error.errors(include_url=False, include_context=False, include_input=False)[:100]
    paths = [_path(each["loc"], each["type"] == "missing", payload) for each in details]
    path, detail = max(zip(paths, details, strict=True), key=lambda pair: len(pair[0]))
    param = ".".join(path) or None
    return ApiError(400, f"{param}: {detail['msg']}" if param else detail["msg"], param)


def _path(location: tuple[int | str, ...], missing: bool, value: Any) -> list[str]:
    """The steps of an error's location that exist in the request, and the last where that is what is missing: names of
    a union's arms stand among them."""
    path: list[str] = []
    for left, step in zip(reversed(range(len(location))), location, strict=True):
        if isinstance(value, dict) and (step in value or (missing and not left)):
            path.append(str(step)[:100])
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            path.append(str(step))
            value = value[step]
    return path
