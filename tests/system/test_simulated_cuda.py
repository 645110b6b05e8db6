"""The simulated CUDA device (tests/support/simulated_cuda.py): values, devices, and host synchronisations."""

import warnings

import pytest
import torch

from mlaforge.bench.host_waits import count_host_waits
from mlaforge.checkpoint.reader import is_finite
from mlaforge.runtime import on_device
from support.simulated_cuda import SimulatedTensor, simulated_cuda

CUDA = torch.device("cuda")
READS = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x[0] > 0),
    "int": lambda x: int(x.max()),
    "slice bound": lambda x: x[: x[1].int()],
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu", non_blocking=True),
    "copy_": lambda x: torch.empty(3).copy_(x),
    "numpy": lambda x: x.numpy(force=True),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 1),
    "mask": lambda x: x[x > 1],
    "mask_put": lambda x: x.index_put_((x > 0,), x[1:] + 1),
    "masked_select": lambda x: x.masked_select(x > 1),
    "unique": lambda x: x.unique(),
    "bincount": lambda x: x.long().bincount(),
    "equal": lambda x: torch.equal(x, x + 1),
    "synchronize": lambda x: torch.cuda.synchronize(),
}
UPLOADS = {
    "pageable": lambda x: torch.ones(3).to(CUDA),
    "pageable, not blocking": lambda x: torch.ones(3).to("cuda", non_blocking=True),
    "cuda": lambda x: torch.ones(3).cuda(),
    "blocking": lambda x: torch.ones(3).pin_memory().to(CUDA),
    "cast": lambda x: torch.ones(3).pin_memory().to(CUDA, torch.float64, non_blocking=True),
    "list": lambda x: torch.tensor([1.0, 2.0, 3.0], device="cuda"),
    "as_tensor": lambda x: torch.as_tensor([1.0, 2.0, 3.0], device=CUDA),
    "new_tensor": lambda x: x.new_tensor([1.0, 2.0, 3.0]),
    "index": lambda x: x[[0, 2]],
    "host index": lambda x: x[torch.tensor([0, 2])],
    "copy_": lambda x: x.copy_(torch.ones(3)),
    "item assignment": lambda x: x.__setitem__(slice(0, 2), torch.ones(2)),
}
NO_WAIT = {
    "pinned": lambda x: torch.ones(3).pin_memory().to(CUDA, non_blocking=True),
    "on_device": lambda x: on_device([1, 2, 3], torch.int64, CUDA),
    "factories": lambda x: torch.arange(3, device=CUDA) + torch.zeros(3, device="cuda") + x.new_ones(3),
    "masked fill": lambda x: x.masked_fill_(~(x > 1), 0.0).__setitem__(x > 1, 5.0),
    "scalars": lambda x: (x * 2 + torch.tensor(3.0)).__setitem__(0, 7.0),
    "index on the device": lambda x: x[torch.arange(2, device=CUDA)],
    "where": lambda x: torch.where(x > 1, x, 0.0),
    "shapes": lambda x: (len(x), x.shape, x.stride(), x.data_ptr(), x.view(1, 3).T.reshape(3)),
    "to where it is": lambda x: x.to("cuda"),
    "other dtype": lambda x: x.to(torch.float64),
    "products": lambda x: torch.nn.functional.linear(x[None], torch.ones(2, 3, device=CUDA)).softmax(-1),
}


@pytest.fixture
def simulation():
    with simulated_cuda() as device:
        yield device


@pytest.fixture(params=[False, True], ids=["grad", "inference"])
def x(simulation, request):
    """[0, 1, 2] on the device."""
    with torch.inference_mode(request.param):
        values = torch.arange(3, device=CUDA).float()
        assert values.device == torch.device("cuda", 0) and values.is_cuda and not simulation.waits
        yield values


@pytest.mark.parametrize("name", READS)
def test_a_value_that_the_host_reads_is_a_wait(simulation, x, name):
    READS[name](x)
    assert len(simulation.waits) == 1 and not simulation.uploaded, list(map(str, simulation.waits))
    assert "test_simulated_cuda.py" in simulation.waits[0].line


@pytest.mark.parametrize("name", UPLOADS)
def test_a_copy_of_pageable_memory_is_a_wait(simulation, x, name):
    UPLOADS[name](x)
    assert len(simulation.waits) == 1 and simulation.uploaded in (8, 12, 16, 24), list(map(str, simulation.waits))


@pytest.mark.parametrize("name", NO_WAIT)
def test_operations_without_values_are_no_wait(simulation, x, name):
    NO_WAIT[name](x)
    assert not simulation.waits, list(map(str, simulation.waits))
    assert simulation.uploaded == {"pinned": 12, "on_device": 24}.get(name, 0)


def test_values_and_views_are_those_of_the_cpu(x):
    x[1:] += 5
    x[0] = 4
    assert isinstance(x, SimulatedTensor) and x.tolist() == [4, 6, 7]
    assert (x.view(3, 1) @ x.view(1, 3)).tolist() == [[16, 24, 28], [24, 36, 42], [28, 42, 49]]
    module = torch.nn.Linear(3, 2).requires_grad_(False).to(CUDA)
    assert module.weight.device.type == "cuda" and module(x).device.type == "cuda"


def test_tensors_of_two_devices_do_not_mix(x):
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()


def test_host_waits_are_counted_with_their_lines(simulation, x):
    with count_host_waits(CUDA) as waits:
        is_finite(x)
        x.tolist()
        x + 1
        on_device([1.0], torch.float32, CUDA)
        with pytest.warns(UserWarning, match="of something else"):
            warnings.warn("of something else", stacklevel=1)
    # is_finite reads the minimum and the maximum.
    assert [line.partition(":")[0] for line in waits.lines[:2]] == ["checkpoint/reader.py"] * 2
    assert waits.count == len(simulation.waits) == 3
    assert not torch.cuda.get_sync_debug_mode()
    x.tolist()
    assert waits.count == 3


def test_a_wait_is_reported_as_pytorch_reports_it(simulation, x):
    torch.cuda.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning, match="synchronizing CUDA operation"):
        x.tolist()
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        x.tolist()
