"""Fixtures shared by the tests of operations."""

from collections.abc import Iterator

import pytest
import torch

from mlaforge.ops import tuned
from support.paged_steps import DEVICE


@pytest.fixture(scope="module")
def fresh_memory_is_nan() -> Iterator[None]:
    """Make torch.empty return NaN, so that reads of uninitialised memory are detected."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def with_entry(monkeypatch):
    """with_entry(op, configuration, run): run with the default, then with an entry at the shape that it asked for."""
    monkeypatch.setattr(tuned, "_state", tuned._State())
    here = torch.device(DEVICE)

    def both(op, configuration, run):
        tuned.use([], here)
        before = tuned.seen()
        default = run()
        ((_, key),) = (tuned.seen() - before).keys()
        tuned.use([tuned.candidate(op, key, configuration)], here)
        changed = run()
        assert tuned.counts()[op]["hit"] and not tuned.counts()[op]["miss"]
        return default, changed, key

    yield both
    tuned.use([], here)
