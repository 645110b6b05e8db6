"""Fixtures shared by the tests of operations."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def fresh_memory_is_nan() -> Iterator[None]:
    """Make torch.empty return NaN, so that reads of uninitialised memory are detected."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
