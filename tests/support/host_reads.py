"""Counts on the CPU what would make the host wait for a device: reads of values, and indices that are host lists."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

# Not `numpy`, which torch refuses of a device's tensor.
READINGS = ("tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__")


@contextlib.contextmanager
def host_reads() -> Iterator[list[str]]:
    """Yield the names of the reads so far; `list` is an index that is a host list."""
    reads: list[str] = []
    getitem = torch.Tensor.__getitem__

    def counted_getitem(tensor: torch.Tensor, index: Any) -> torch.Tensor:
        if any(isinstance(item, list) for item in (index if isinstance(index, tuple) else (index,))):
            reads.append("list")
        return getitem(tensor, index)

    with pytest.MonkeyPatch.context() as patched:
        for name in READINGS:
            former = getattr(torch.Tensor, name)
            patched.setattr(
                torch.Tensor, name,
                lambda tensor, *rest, name=name, former=former: reads.append(name) or former(tensor, *rest),
            )  # fmt: skip
        patched.setattr(torch.Tensor, "__getitem__", counted_getitem)
        # multinomial checks its distribution on the host.
        patched.setattr(torch, "multinomial", lambda *_, **__: pytest.fail("multinomial waits"))
        yield reads


@contextlib.contextmanager
def reads_of(*methods: tuple[Any, str]) -> Iterator[dict[str, list[list[str]]]]:
    """Yield, by name, the reads of every call of some objects' methods, without those of methods that it calls."""
    calls: dict[str, list[list[str]]] = {name: [] for _, name in methods}
    with host_reads() as reads, pytest.MonkeyPatch.context() as patched:

        def counted(call: Any, name: str) -> Any:
            def counting(*inputs: Any) -> Any:
                before = len(reads)
                returned = call(*inputs)
                calls[name].append(reads[before:])
                del reads[before:]
                return returned

            return counting

        for owner, name in methods:
            patched.setattr(owner, name, counted(getattr(owner, name), name))
        yield calls
