"""The model of a kernel's time: published figures, occupancy and waves, and the packaged loops."""

import dataclasses
import json

import pytest

from mlaforge.planning import kernel_loops
from mlaforge.planning.costs import GPUS
from mlaforge.planning.kernel_loops import Loop
from mlaforge.planning.kernel_time import Work, cycle_seconds, describe, predict, resident
from mlaforge.planning.published_kernels import HOPPER, published_kernels

LOOP = Loop(instructions=400, exponentials=16, outside=0, warps=4, registers=96, shared=50 << 10)
WORK = Work(programs=132, iterations=100, flops=1e6, memory=0.0, l2=0.0, asynchronous=True)


@pytest.mark.parametrize("kernel", published_kernels(), ids=lambda kernel: kernel.name)
def test_published_figures_are_reproduced(kernel):
    """Within 25 % in time, as in rate."""
    assert 1 / 1.25 < kernel.predicted / kernel.figure < 1.25


def test_streams_overlap_as_customers_of_a_closed_network_do():
    """Bounds of every closed network, and the balanced one, whose throughput has a closed form."""
    demands = (3.0, 2.0, 1.0)
    assert cycle_seconds(demands, 1) == sum(demands)
    for streams in (2, 4, 100):
        seconds = cycle_seconds(demands, streams)
        assert max(streams * max(demands), sum(demands)) <= seconds < streams * sum(demands)
        assert cycle_seconds((1.0, 1.0, 1.0), streams) == pytest.approx(streams + 2)
    assert cycle_seconds(demands, 100) == pytest.approx(300, rel=0.01)


def test_programs_fill_multiprocessors_in_rounds():
    one, more = predict(LOOP, WORK, HOPPER), predict(LOOP, dataclasses.replace(WORK, programs=133), HOPPER)
    assert resident(LOOP, HOPPER) == 4, "51 of 228 KiB each"
    assert one.overlap == pytest.approx(one.tensor + one.issue + one.special)
    # Two programs of one multiprocessor overlap; a fifth starts a second round.
    assert one.overlap < more.overlap < 2 * one.overlap
    five = predict(LOOP, dataclasses.replace(WORK, programs=5 * 132), HOPPER)
    four = predict(LOOP, dataclasses.replace(WORK, programs=4 * 132), HOPPER)
    assert five.overlap == pytest.approx(four.overlap + one.overlap)
    assert resident(dataclasses.replace(LOOP, registers=255), HOPPER) == 2
    assert resident(dataclasses.replace(LOOP, shared=227 << 10), HOPPER) == 1


def test_limits_have_names():
    assert predict(LOOP, dataclasses.replace(WORK, memory=1e9), HOPPER).limit == "memory"
    assert predict(LOOP, dataclasses.replace(WORK, l2=1e9), HOPPER).limit == "L2"
    assert predict(LOOP, WORK, HOPPER).limit == "issue slots+"
    assert predict(LOOP, dataclasses.replace(WORK, iterations=1), HOPPER).limit == "latency"
    time = predict(LOOP, WORK, HOPPER)
    assert time.total == pytest.approx(time.overlap + time.latency + time.launch)


def test_chips_follow_their_datasheets():
    assert HOPPER.clock == pytest.approx(1.83e9, rel=0.01) and HOPPER.l2 == pytest.approx(6.65e12, rel=0.01)
    assert describe(GPUS["a100"], 80, 108).clock == pytest.approx(1.41e9, rel=0.01)
    # A measured bandwidth replaces the datasheet's; Hopper's mma.sync is slower than its wgmma.
    assert describe(GPUS["h200"], 90, 132, 4e12).memory == 4e12
    assert HOPPER.product_rate(False) == pytest.approx(0.65 * HOPPER.product_rate(True), rel=0.01)


def test_packaged_loops_load():
    launch = next(launch for launch in kernel_loops.compiled() if (launch.name, launch.capability) == ("gqa-64", 90))
    loop = kernel_loops.find(launch.kernel, 90, launch.constants)
    assert loop == launch.loop and loop.outside == launch.instructions - launch.loop_instructions > 0
    # The closest capability that is not newer; no loop of another tile or of an older GPU.
    assert kernel_loops.find(launch.kernel, 91, launch.constants) == loop
    assert kernel_loops.find(launch.kernel, 90, {**launch.constants, "BLOCK_N": 7}) is None
    assert kernel_loops.find(launch.kernel, 70, launch.constants) is None


def test_the_file_holds_every_launch():
    body = json.loads(kernel_loops.FILE.read_text())
    assert json.loads(json.dumps(kernel_loops.encode(kernel_loops.compiled()))).items() <= body.items()
    assert len(kernel_loops.FILE.read_text().splitlines()) < 200
