"""How large a grammar may be, checked before anything looks at what it means (docs/serving.md has the numbers)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlaforge.runtime import UserError

# Of a regex, and of a schema as JSON text. It fits into a socket's buffer: sending it waits for nobody.
MAX_BYTES = 128 * 1024
# Of lists and objects in a schema, from the outermost, which is 1.
MAX_DEPTH = 64
# In the whole schema.
MAX_PROPERTIES, MAX_ENUM_VALUES = 5_000, 10_000


def check_size(name: str, text: str) -> None:
    """UserError where the text of a grammar is too long."""
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise UserError(f"{name} is longer than {MAX_BYTES // 1024} KiB; make it shorter")


def check_schema(schema: Any) -> None:
    """UserError where a schema is nested too deep or has too much in it. Looks at no more of it than is allowed."""
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
            # An item's value and comma, and a key: less than its text takes.
            size += 2 * len(node)
            for what, count, most in (
                ("levels of nesting", depth, MAX_DEPTH), ("properties", properties, MAX_PROPERTIES),
                ("enum values", values, MAX_ENUM_VALUES), ("bytes", size, MAX_BYTES),
            ):  # fmt: skip
                if count > most:
                    raise UserError(f"json_schema has more than {most} {what}; make it simpler")
        level = below


def _has(node: Mapping[str, Any], name: str) -> bool:
    return isinstance(node.get(name), Mapping)
