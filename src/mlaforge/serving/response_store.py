"""A bounded store of responses in memory: what previous_response_id and item_reference refer to."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from mlaforge.serving import wire

MAX_RESPONSES = 1000
MAX_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class StoredResponse:
    """A response and its input, that of earlier turns included, as JSON."""

    response: bytes
    input_items: bytes

    @property
    def size(self) -> int:
        """Number of bytes."""
        return len(self.response) + len(self.input_items)

    def output(self) -> list[dict[str, Any]]:
        """Return the response's items."""
        return list(json.loads(self.response)["output"])

    def conversation(self) -> list[dict[str, Any]]:
        """Return the items of all turns up to this response's."""
        return [*json.loads(self.input_items), *self.output()]


class ResponseStore:
    """Responses by id, at most `max_responses` of together at most `max_bytes`; the least recently used go first.
    Thread-safe."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._lock = threading.Lock()
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._size = 0
        # Id of an output item -> id of its response.
        self._response_ids: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def size(self) -> int:
        """Number of bytes of all responses."""
        return self._size

    def put(self, response: Mapping[str, Any], input_items: bytes) -> None:
        """Store a response with its input, a JSON list of items."""
        entry = StoredResponse(wire.dumps(response), input_items)
        with self._lock:
            self._responses[response["id"]] = entry
            self._size += entry.size
            self._response_ids |= {item["id"]: response["id"] for item in response["output"]}
            while len(self._responses) > self._max_responses or self._size > self._max_bytes:
                self._forget(next(iter(self._responses)))

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response, or None if it is not, or no longer, in the store."""
        with self._lock:
            if response_id in self._responses:
                self._responses.move_to_end(response_id)
            return self._responses.get(response_id)

    def item(self, item_id: str) -> dict[str, Any] | None:
        """Return an output item of a response in the store."""
        response = self.get(self._response_ids.get(item_id, ""))
        return next((item for item in response.output() if item["id"] == item_id), None) if response else None

    def remove(self, response_id: str) -> bool:
        """Remove a response; return whether it was in the store."""
        with self._lock:
            if response_id not in self._responses:
                return False
            self._forget(response_id)
            return True

    def _forget(self, response_id: str) -> None:
        entry = self._responses.pop(response_id)
        self._size -= entry.size
        for item in entry.output():
            self._response_ids.pop(item["id"], None)
