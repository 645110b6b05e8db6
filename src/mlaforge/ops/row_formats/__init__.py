"""Storage formats of a layer's cached rows, one file each: their bytes, their parts and their codec.

The formats are the classes that the modules of this package define, so a new format is one new file
(docs/adding-a-row-format.md). Importing them loads no torch: planning asks the same descriptors as the cache.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import pkgutil
from collections.abc import Sequence

from mlaforge.ops.row_formats.format import RowFormat
from mlaforge.ops.row_formats.plain import plain_name


@functools.cache
def row_format_types() -> dict[int, type[RowFormat]]:
    """Return every format by its `id`, in this order."""
    types: dict[int, type[RowFormat]] = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        for _, member in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(member, RowFormat) and member.__module__ == module.name and not inspect.isabstract(member):
                assert member.id not in types, f"{member} and {types[member.id]} have the same id"
                types[member.id] = member
    return dict(sorted(types.items()))


def format_names() -> tuple[str, ...]:
    """Return the names by which users choose a format (kv_cache_dtype)."""
    return tuple(name for type in row_format_types().values() for name in type.names)


def row_format_type(name: str) -> type[RowFormat]:
    """Return the class of the format called `name`, one of RowFormat.names or RowFormat.compute_names."""
    types = [type for type in row_format_types().values() if name in (*type.names, *type.compute_names)]
    assert len(types) == 1, f"{name!r} is the name of {len(types)} row formats: {types}"
    return types[0]


def row_format(name: str, group_sizes: Sequence[int], dtype: str = "bfloat16", counts: Sequence[int] = ()) -> RowFormat:
    """Return the format called `name` for one layer.

    name         `auto`: coded rows if the layer has a code, else plain rows in the model's dtype
    group_sizes  elements of each group with its own scale: the keys, then the values of each KV head; or a latent,
                 then a rotary key
    dtype        the model's
    counts       the layer's code (RowFormat.make); empty without one
    """
    if name == "auto":
        name = "coded" if counts else plain_name(dtype)
    return row_format_type(name).make(name, tuple(group_sizes), tuple(counts))


def common_tokens() -> int:
    """Return the smallest number of tokens that are whole units of every format."""
    return math.lcm(*(type.tokens for type in row_format_types().values()))
