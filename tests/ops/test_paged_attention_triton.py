"""The Triton kernel of paged attention: its tiling, its unsupported inputs, and its compilation for GPUs."""

import ast
import dataclasses
import inspect
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaforge import ops, runtime
from mlaforge.ops.gpu_properties import GpuProperties
from mlaforge.ops.paged_attention import paged_attention
from support.paged_steps import SHAPES, assert_right, make_step, needs_triton, steps

pytestmark = [pytest.mark.gpu, needs_triton, pytest.mark.usefixtures("fresh_memory_is_nan")]


def is_kernel(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(part) for part in node.decorator_list)


@given(steps(max_length=150), st.sampled_from([None, 1, 3]))
@settings(max_examples=12)
def test_triton_against_dense_attention(step, splits):
    from mlaforge.ops import paged_attention_triton

    assert_right(step, paged_attention_triton.attend(*step.inputs, splits=splits))


@pytest.mark.parametrize("splits", [1, 3])
def test_sinks_are_applied_to_the_merged_output(splits):
    from mlaforge.ops import paged_attention_triton

    step = make_step(SHAPES["group-3"], [(40, 1), (23, 4), (5, 5)])
    sinks = torch.linspace(-2, 3, 6, device=step.q.device)
    out, lse = paged_attention_triton.attend(*step.inputs, splits=splits)
    actual, same_lse = paged_attention_triton.attend(*step.inputs, sinks, splits=splits)
    expected = paged_attention(*step.inputs, sinks, implementation="reference")[0]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(lse, same_lse) and not torch.allclose(actual, out, atol=1e-2)


def test_many_sequences_are_found_and_splits_merged():
    """More sequences than one search step covers, most of them with an empty second split."""
    from mlaforge.ops import paged_attention_triton

    step = make_step(SHAPES["mha"], [(1, 1), (7, 2)] * 3 + [(64, 60), (3, 2), (1, 1)])
    launch = paged_attention_triton.make_launch(*step.inputs, splits=2)
    assert launch.arguments["tiles"] == 0
    launch.arguments["SEARCHED"] = 4
    assert_right(step, paged_attention_triton.run(launch))


def test_kernels_read_no_globals_of_their_modules():
    """A compiled kernel fails once a global that it read has changed."""
    import importlib

    for path in Path(ops.__path__[0]).glob("*_triton.py"):
        name = path.stem
        module = importlib.import_module(f"mlaforge.ops.{name}")
        kernels = {node.name: node for node in ast.parse(inspect.getsource(module)).body if is_kernel(node)}
        assert kernels, name
        for kernel in kernels.values():
            names = [node for node in ast.walk(kernel) if isinstance(node, ast.Name)]
            local = {node.id for node in names if isinstance(node.ctx, ast.Store)}
            local |= {argument.arg for argument in kernel.args.args}
            read = {node.id for node in names} & set(vars(module)) - local - {"tl", "triton", *kernels}
            # Functions of Triton in other modules are compiled into the kernel.
            read = {name for name in read if not hasattr(getattr(module, name), "fn")}
            assert not read, f"{name}.{kernel.name} reads {read}"


@given(st.integers(1, 3000), st.integers(1, 400), st.integers(1, 264))
def test_splits_keep_the_machine_busy(programs, most, room):
    from mlaforge.ops.paged_attention_triton import choose_splits

    splits = choose_splits(programs, most, room)
    assert 1 <= splits <= min(most, 128)
    if most >= room > 10 * programs:
        assert splits * programs >= 0.8 * min(room, 128 * programs)


@given(st.integers(1, 600), st.integers(0, 200), st.booleans())
def test_pieces_cover_a_row(value, more, in_key):
    from mlaforge.ops.paged_attention_triton import cut

    keys, values = cut(value + more, value, in_key)
    for width in (*keys, *values):
        assert width == 0 or (width >= 16 and width & (width - 1) == 0)
    assert sum(values) >= value and sum(values) - value < max(16, value)
    if in_key:
        assert keys[:2] == values and keys[2] >= more
    else:
        assert sum(keys) >= value + more


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"k": torch.float16}, "differ in dtype"),
        ({"v": 700}, "values of 700 elements do not fit into registers"),
        ({"strided": True}, "contiguous"),
    ],
)
def test_rejects_unsupported_inputs(change, words):
    step = make_step(SHAPES["mha"], [(5, 1)])
    q, k, v, view, scale = step.inputs
    if "dtype" in change:
        q, k, v = (x.to(change["dtype"]) for x in (q, k, v))
    if "k" in change:
        k = k.to(change["k"])
    if "v" in change:
        v = k.new_zeros(*k.shape[:2], change["v"])
    if "strided" in change:
        k = k.new_zeros(*k.shape[:2], 2 * k.shape[2])[..., ::2]
    with pytest.raises(runtime.UserError, match=words):
        paged_attention(q, k, v, view, scale, implementation="triton")


GPUS = {"sm_80": (8, 0), "sm_89": (8, 9), "sm_90": (9, 0), "sm_100": (10, 0), "sm_120": (12, 0)}


@pytest.mark.parametrize("capability", GPUS.values(), ids=GPUS)
def test_tiles_fit_into_the_gpus_shared_memory(capability, monkeypatch):
    from mlaforge.gpu_verification.kernel_launches import ATTENTION, attend
    from mlaforge.ops import paged_attention_triton as kernels

    gpu = GpuProperties.of_capability(*capability)
    monkeypatch.setattr(kernels, "gpu_properties", lambda device: gpu)
    # Gigabytes, of which only the shapes are read.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    for name, rows in itertools.product(ATTENTION, (torch.float16, torch.float8_e4m3fn)):
        chosen = attend(name, torch.float16, rows, gpu)
        q, k, v = (chosen.arguments[tensor] for tensor in "qkv")
        reason = kernels.supports(q, k, v)
        if rows == torch.float8_e4m3fn and capability < (8, 9):
            assert reason == "float8_e4m3fn needs compute capability 8.9, this GPU has 8.0"
            continue
        assert reason is True, name
        sizes = chosen.arguments
        width = sizes["D0"] + sizes["D1"] + sizes["D2"] + (0 if sizes["V_IN_K"] else sizes["V0"] + sizes["V1"])
        tiles = (chosen.options["num_stages"] - 1) // 2
        query = sizes["BLOCK_M"] * (sizes["D0"] + sizes["D1"] + sizes["D2"])
        assert 2 * (query + tiles * sizes["BLOCK_N"] * width) <= gpu.shared_memory - 5 * 1024, name


def test_rows_that_fit_no_tile_name_the_shared_memory(monkeypatch):
    from mlaforge.ops import paged_attention_triton as kernels

    gpu = dataclasses.replace(GpuProperties.of_capability(8, 9), shared_memory=48 * 1024)
    q, rows = torch.zeros(1, 16, 576, dtype=torch.float16), torch.zeros(16, 1, 576, dtype=torch.float16)
    assert kernels.supports(q, rows, rows[..., :512]) is True
    monkeypatch.setattr(kernels, "gpu_properties", lambda device: gpu)
    assert kernels.supports(q, rows, rows[..., :512]) == (
        "rows of 576 and 512 elements do not fit into 48 KiB of shared memory"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "kibibytes"), [(80, 163), (89, 99), (120, 99)])
def test_kernels_compile_for_smaller_gpus_and_fit(capability, kibibytes, monkeypatch):
    """On real shapes, without a GPU, each in a process where nothing is interpreted."""
    from mlaforge.gpu_verification.compilation import compile_in_subprocess
    from mlaforge.gpu_verification.kernel_launches import LAUNCHES

    gpu = GpuProperties.of_capability(*divmod(capability, 10))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    names = [
        "gqa-64", "gqa-64-verify", "gqa-64-mixed", "gqa-128-prefill", "mla-512-64", "mla-256-64", "mla-384-64",
        "mla-512-64 fp32", "merge", "selection score", "experts 20b gate",
    ]  # fmt: skip
    for name in names + ["gqa-128-prefill fp8 rows", "mla-512-64 fp8 rows"] * (capability >= 89):
        line = compile_in_subprocess(name, capability)
        assert "error" not in line and line["shared"] <= kibibytes * 1024, line
        assert line["spilled"] <= LAUNCHES[name](gpu).spilled and not line["wgmma"], line


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper_and_fits(monkeypatch):
    from mlaforge.gpu_verification.compilation import compile_in_subprocess
    from mlaforge.gpu_verification.kernel_launches import LAUNCHES

    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for name, make in LAUNCHES.items():
        line = compile_in_subprocess(name, 90)
        assert "error" not in line and line["shared"] <= 227 * 1024, line
        assert line["spilled"] <= make(GpuProperties.of_capability(9, 0)).spilled, line
        assert line["wgmma"] or (line["tile"] or [0])[0] < 64, f"{name} does not use the asynchronous tensor cores"
