"""Limits on the size of a grammar, checked before its content (docs/serving.md has the numbers)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlaforge.runtime import UserError

# Of a regex, and of a schema as JSON text. Fits a socket's buffer, so that sending it does not block.
MAX_BYTES = 128 * 1024
# Nesting of lists and objects in a schema; the outermost has depth 1.
MAX_DEPTH = 64
# Totals of a schema.
MAX_PROPERTIES, MAX_ENUM_VALUES = 5_000, 10_000


def check_size(name: str, text: str) -> None:
    """Raise UserError where the text of a grammar is too long."""
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise UserError(f"{name} is longer than {MAX_BYTES // 1024} KiB; make it shorter")


def check_schema(schema: Any) -> None:
    """Raise UserError where a schema is nested too deep or too large. Visits no more of it than is allowed."""
    size = properties = values = depth = 0
    level = [schema]
    while level := [node for node in level if isinstance(node, Mapping | list | tuple)]:
        depth += 1
        below: list[Any] = []
        for node in level:
            if isinstance(node, Mapping):
                properties += sum(len(node[name]) for name in ("properties", "patternProperties") if _has(node, name))
                values += len(node["enum"]) if isinstance(node.get("enum"), list | tuple) else 0
                below += node.values()
            else:
                below += node
            # A lower bound of the text: an item's value and comma, or a key.
            size += 2 * len(node)
            for what, count, limit in (
                ("levels of nesting", depth, MAX_DEPTH), ("properties", properties, MAX_PROPERTIES),
                ("enum values", values, MAX_ENUM_VALUES), ("bytes", size, MAX_BYTES),
            ):  # fmt: skip
                if count > limit:
                    raise UserError(f"json_schema has more than {limit} {what}; make it simpler")
        level = below


def _has(node: Mapping[str, Any], name: str) -> bool:
    return isinstance(node.get(name), Mapping)
