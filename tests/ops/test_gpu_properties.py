"""GPU properties, with a mocked GPU."""

from types import SimpleNamespace

import pytest
import torch

from mlaforge.ops.gpu_properties import SHARED_MEMORY, gpu_properties


@pytest.fixture(autouse=True)
def forgotten():
    """Clear the cache, so that mocked properties do not leak."""
    yield
    gpu_properties.cache_clear()


@pytest.mark.parametrize("optin", [{"shared_memory_per_block_optin": 101376}, {}])
def test_device_properties_are_cached(optin, monkeypatch):
    calls = []
    ada = SimpleNamespace(major=8, minor=9, multi_processor_count=142, **optin)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: (calls.append(device), ada)[1])
    for _ in range(2):
        gpu = gpu_properties(torch.device("cuda", 7))
    assert (gpu.capability, gpu.multiprocessors, gpu.shared_memory) == ((8, 9), 142, 99 * 1024)
    assert gpu.why_no_fp8() is None and calls == [torch.device("cuda", 7)]


def test_interpreted_kernels_are_cut_as_on_hopper():
    for device in ("cpu", "meta"):
        gpu = gpu_properties(torch.device(device))
        assert gpu.capability == (9, 0) and gpu.shared_memory == SHARED_MEMORY[9, 0] == 227 * 1024
