"""Entries of tuned tables change the launches of Triton's kernels, and not their results."""

import pytest
import torch

from mlaforge.bench.layer_operations import experts_inputs
from mlaforge.ops import tuned
from mlaforge.ops.gpu_properties import GpuProperties
from support.paged_steps import DEVICE, SHAPES, assert_right, make_step, needs_triton

pytestmark = [pytest.mark.gpu, needs_triton, pytest.mark.usefixtures("fresh_memory_is_nan")]
HERE = torch.device(DEVICE)


@pytest.mark.parametrize("shape", ["group-3", "mla"])
@pytest.mark.parametrize("window", [None, 9])
def test_attention(with_entry, shape, window):
    from mlaforge.ops import paged_attention_triton as attention

    step = make_step(SHAPES[shape], [(70, 2), (23, 1)], window=window)
    launches = []

    def run():
        launches.append(attention.make_launch(*step.inputs))
        return attention.run(launches[-1])

    configuration = {"BLOCK_N": 32, "num_warps": 8, "num_stages": 5, "waves": 16}
    default, changed, key = with_entry("attention", configuration, run)
    for result in (default, changed):
        assert_right(step, result)
    first, second = launches
    assert first.arguments["BLOCK_N"] == 16 and second.arguments["BLOCK_N"] == 32
    assert second.options == {"num_warps": 8, "num_stages": 5} != first.options
    if window is None:
        assert second.grid[0] > first.grid[0]
    # Kind, widths, heads, format, two query tokens, four sequences, span.
    sizes = SHAPES[shape]
    assert key[:5] == ("mla" if sizes.aliased else "gqa", sizes.key, sizes.value, sizes.heads, sizes.key_heads)
    assert key[5:] == ("float32", 2, 4, 128 if window is None else 16, "dense")


def test_another_gpus_launch_takes_no_entry(monkeypatch):
    from mlaforge.ops import paged_attention_triton as attention

    monkeypatch.setattr(tuned, "_state", tuned._State())
    step = make_step(SHAPES["mla"], [(70, 2)])
    attention.make_launch(*step.inputs, gpu=GpuProperties.of_capability(9, 0))
    assert not tuned.seen()


def test_experts(with_entry):
    from mlaforge.ops import mxfp4_experts_triton as experts

    sizes = (4, 2, 64, 96)
    inputs = experts_inputs(5, sizes, torch.float32, HERE)
    launched = []
    original = experts.make_launch

    def recorded(*arguments, **options):
        launched.append(original(*arguments, **options))
        return launched[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "make_launch", recorded)
        configuration = {"BLOCK_M": 64, "BLOCK_O": 32, "programs": 1}
        default, changed, key = with_entry("experts", configuration, lambda: experts.mixture(*inputs))
    assert key == tuned.experts_key(*sizes, 5)
    torch.testing.assert_close(changed, default, rtol=1e-4, atol=1e-4)
    assert [launch.arguments["BLOCK_M"] for launch in launched] == [16, 16, 64, 64]
    assert [launch.options["num_warps"] for launch in launched] == [1, 1, 2, 2]
    assert launched[2].programs == min(4, launched[2].programs)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_candidates_fit_into_shared_memory(capability):
    from mlaforge.ops import attention_tiles

    gpu = GpuProperties.of_capability(*capability, multiprocessors=100)
    for rows, keys, values, v_in_k in ((8, 64, 64, False), (64, 576, 512, True), (2048, 128, 128, False)):
        candidates = attention_tiles.candidates(rows, keys, values, v_in_k, 2, gpu)
        default = attention_tiles.tile_sizes(rows, keys, values, v_in_k, 2, gpu)
        assert (default is None) == (not candidates)
        if default is not None:
            tuples = {(one["BLOCK_N"], one["num_warps"], one["num_stages"]) for one in candidates}
            assert default[1:] in tuples
