"""What would make the host wait for a device, counted on the CPU: readings, and indices that are host lists."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

# Not `numpy`, which torch refuses of a device's tensor.
READINGS = ("tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__")


@contextlib.contextmanager
def host_reads() -> Iterator[list[str]]:
    """The names of readings so far; `list` is an index that is a host list."""
    reads: list[str] = []
    index = torch.Tensor.__getitem__

    def indexed(tensor: torch.Tensor, at: Any) -> torch.Tensor:
        if any(isinstance(each, list) for each in (at if isinstance(at, tuple) else (at,))):
            reads.append("list")
        return index(tensor, at)

    with pytest.MonkeyPatch.context() as patched:
        for name in READINGS:
            former = getattr(torch.Tensor, name)
            patched.setattr(
                torch.Tensor, name,
                lambda tensor, *rest, name=name, former=former: reads.append(name) or former(tensor, *rest),
            )  # fmt: skip
        patched.setattr(torch.Tensor, "__getitem__", indexed)
        # It reads whether its distribution is one.
        patched.setattr(torch, "multinomial", lambda *_, **__: pytest.fail("multinomial waits"))
        yield reads
