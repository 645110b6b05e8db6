"""Cases of a client's program: each prints one line of JSON.

A program runs in the environment of its client (tests/clients/requirements*.txt). Its first line names the client's
version, each further line a case: {"case": ..., "ok": ..., "error": ...}. Cases assert on types and names, not on what
a small model writes.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

URL = os.environ["MLAFORGE_URL"]
MODEL = os.environ["MLAFORGE_MODEL"]

# SmolLM2 answers it in a few words: some clients refuse an answer that max_tokens cuts.
QUESTION = "Say only the word yes: is Paris sunny?"
# Enough for each answer that must be complete. One call in an answer: small models would repeat themselves.
MAX_TOKENS = 48
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city.", "parameters": PARAMETERS},
}
Case = Callable[[], Any]
_cases: dict[str, Case] = {}


class Weather(BaseModel):
    """The structured answer that is asked for."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=20)
    sky: Literal["clear", "cloudy"]


def case(function: Case) -> Case:
    """Register a case under its function's name."""
    _cases[function.__name__] = function
    return function


def run(*packages: str) -> None:
    """Run the registered cases of the client that these packages are."""
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    out, sys.stdout = sys.stdout, sys.stderr  # what clients print is no case
    print(json.dumps({"client": versions}), file=out, flush=True)
    # One event loop: clients keep their connections in it.
    with asyncio.Runner() as runner:
        for name, function in _cases.items():
            error = None
            try:
                result = function()
                if inspect.iscoroutine(result):
                    runner.run(result)
            except Exception as exception:
                error = described(exception)
            print(json.dumps({"case": name, "ok": error is None, "error": error}), file=out, flush=True)


def described(exception: Exception) -> str:
    """Return the exception and the line of the program that it comes from."""
    frames = traceback.extract_tb(exception.__traceback__)
    lines = [frame.line for frame in frames if os.path.dirname(frame.filename) == os.path.dirname(__file__)]
    return f"{type(exception).__name__}: {exception} (at: {lines[-1] if lines else '?'})"[:2000]


def check_call(name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """Assert that a call is one of get_weather and return its arguments."""
    assert name == "get_weather", name
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert isinstance(arguments["city"], str), arguments
    return arguments
