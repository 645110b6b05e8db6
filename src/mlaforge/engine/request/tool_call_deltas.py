"""OpenAI's streamed pieces of tool calls: the first has the name, and all add to the arguments, which are JSON text."""

from __future__ import annotations

import uuid
from typing import Any


def new_call(index: int, name: str) -> dict[str, Any]:
    """Return the first piece of a call, without arguments."""
    function = {"name": name, "arguments": ""}
    return {"index": index, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def add_arguments(calls: list[dict[str, Any]], index: int, text: str) -> None:
    """Add to the arguments of the call `index`, the last: to its piece in `calls`, or to a new piece."""
    if not calls or calls[-1]["index"] != index:
        calls.append({"index": index, "function": {"arguments": ""}})
    calls[-1]["function"]["arguments"] += text
