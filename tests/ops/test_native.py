"""Compiled CPU kernels against torch in fp64, and behaviour if they cannot be compiled."""

import importlib
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from mlaforge import runtime
from mlaforge.ops import native
from mlaforge.ops.dispatch import MODULES, OPS
from mlaforge.ops.kernel_library import KernelLibrary
from mlaforge.ops.native import kernels, pack
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats.int8 import Int8

for module in set(MODULES.values()):
    importlib.import_module(f"mlaforge.ops.{module}")

# Half a unit in the last place of bf16's 8 bits.
ROUNDED = 2**-8


def near(actual, expected, scale):
    """Assert closeness within the rounding of the result, whose fp32 sums have terms as large as `scale`."""
    error = (actual.double() - expected).abs()
    assert bool((error <= ROUNDED * expected.abs() + 1e-5 * scale).all()), float(error.max())


@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 40), st.booleans(), st.booleans(), st.integers(0, 9))
def test_linear(compiled, N, M, half, with_bias, with_plus, seed):
    torch.manual_seed(seed)
    x, w, b, plus = (torch.randn(*s).bfloat16() for s in ((N, 2 * half), (M, 2 * half), (M,), (N, M)))
    packed = pack(w)
    actual = compiled.linear(x, packed, M, b if with_bias else None, plus if with_plus else None)
    expected = x.double() @ w.double().T + (b.double() if with_bias else 0) + (plus.double() if with_plus else 0)
    assert actual.dtype == torch.bfloat16
    near(actual, expected, 2 * half)


def test_sums_in_fp32(compiled):
    torch.manual_seed(0)
    x, w, b, plus = (torch.randn(*shape).bfloat16() for shape in ((5, 96), (33, 96), (33,), (5, 33)))
    actual = compiled.linear(x, pack(w), 33, b, plus, fp32_out=True)
    assert actual.dtype == torch.float32
    assert torch.equal(actual.bfloat16(), compiled.linear(x, pack(w), 33, b, plus))
    torch.testing.assert_close(actual.double(), x.double() @ w.double().T + b + plus, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("K", [32, 250, 576])
def test_products_are_batch_invariant(compiled, K):
    torch.manual_seed(0)
    x, packed = torch.randn(70, K).bfloat16(), pack(torch.randn(100, K))
    whole = compiled.linear(x, packed, 100, None, None)
    for first, last in ((0, 1), (1, 3), (5, 9), (16, 33), (3, 70)):
        assert torch.equal(compiled.linear(x[first:last], packed, 100, None, None), whole[first:last])


def test_linear_accepts_strided_rows(compiled):
    torch.manual_seed(0)
    wide, w, plus = torch.randn(5, 96).bfloat16(), torch.randn(33, 64).bfloat16(), torch.randn(33, 5).bfloat16().T
    actual = compiled.linear(wide[:, 16:80], pack(w), 33, None, plus)
    near(actual, wide[:, 16:80].double() @ w.double().T + plus.double(), 64)


@given(st.integers(1, 20), st.integers(1, 100), st.floats(1e-3, 1e3), st.integers(0, 9))
def test_rms_norm(compiled, N, C, size, seed):
    torch.manual_seed(seed)
    x, w = (size * torch.randn(N, C)).bfloat16(), torch.randn(C).bfloat16()
    near(compiled.rms_norm(x, w, 1e-5), F.rms_norm(x.double(), (C,), w.double(), 1e-5), 1)


@given(st.integers(1, 20), st.integers(1, 100), st.sampled_from([0.1, 1.0, 30.0, 1e4]), st.integers(0, 9))
def test_silu_mul(compiled, N, width, size, seed):
    torch.manual_seed(seed)
    x = (size * torch.randn(N, 2 * width)).bfloat16()
    gate, up = x.double().chunk(2, dim=-1)
    near(compiled.silu_mul(x), F.silu(gate) * up, size * size)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("N", [1, 40])
def test_fused_norms_and_mlps_equal_their_parts(N, biased, compiled):
    torch.manual_seed(N)
    C, intermediate = 48, 70
    x, norm = torch.randn(N, C).bfloat16(), torch.randn(C).bfloat16()
    up, down = pack(torch.randn(2 * intermediate, C).bfloat16()), pack(torch.randn(C, intermediate).bfloat16())
    up_bias, down_bias = (torch.randn(M).bfloat16() if biased else None for M in (2 * intermediate, C))
    gate_up = compiled.linear(compiled.rms_norm(x, norm, 1e-5), up, 2 * intermediate, up_bias, None)
    assert torch.equal(compiled.linear(x, up, 2 * intermediate, up_bias, None, False, norm, 1e-5), gate_up)
    expected = compiled.linear(compiled.silu_mul(gate_up), down, C, down_bias, x)
    assert torch.equal(compiled.gated_mlp(x, up, up_bias, down, down_bias, x, intermediate, norm, 1e-5), expected)


@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 4), st.sampled_from([2, 6, 64]), st.integers(0, 9))
def test_rope_and_store(compiled, N, heads, kv_heads, head_dim, seed):
    torch.manual_seed(seed)
    width = 2 * kv_heads * head_dim
    x = torch.randn(N, heads * head_dim + width).bfloat16()
    angles = torch.rand(N, 1, head_dim // 2) * 7
    turn = torch.complex(angles.cos(), angles.sin())
    slots = torch.randperm(50)[:N]
    rows = torch.full((50, width), torch.nan).bfloat16()
    turned = (heads + kv_heads) * head_dim
    pairs = torch.view_as_complex(x[:, :turned].double().view(N, heads + kv_heads, -1, 2)) * turn.to(torch.complex128)
    expected = torch.cat((torch.view_as_real(pairs).view(N, -1), x[:, turned:].double()), dim=1)
    compiled.rope_and_store(x, turn, rows, None, [0], slots, heads + kv_heads, head_dim)
    near(x, expected, 1)
    assert torch.equal(rows[slots], x[:, -width:])
    others = torch.ones(50, dtype=torch.bool).index_fill(0, slots, False)
    assert bool(rows[others].isnan().all())


def test_without_a_compiler_the_reason_is_logged_and_torch_is_used(monkeypatch, capsys, tmp_path):
    kernels.cache_clear()
    monkeypatch.setenv("MLAFORGE_HOME", str(tmp_path))
    monkeypatch.delenv("MLAFORGE_KERNELS", raising=False)
    monkeypatch.setattr(native, "compiler", lambda: None)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    try:
        assert kernels() is None
    finally:
        kernels.cache_clear()
    assert "no C++ compiler" in capsys.readouterr().err


@pytest.mark.skipif(native.form() is None or native.compiler() is None, reason="no compiler")
def test_a_form_is_loaded_once_wherever_its_library_is(monkeypatch, tmp_path):
    """Loading a copy from another folder would abort the process."""
    assert native.load(native.form()) is None
    library = KernelLibrary.of(native.form()).find()
    shutil.copytree(library.parent, tmp_path / "native", ignore=lambda _, names: {*names} - {library.name})
    for variable, folder in (("MLAFORGE_KERNELS", tmp_path / "native"), ("MLAFORGE_HOME", tmp_path)):
        kernels.cache_clear()
        with monkeypatch.context() as patch:
            patch.setenv(variable, str(folder))
            assert KernelLibrary.of(native.form()).find() == tmp_path / "native" / library.name
            assert kernels() is not None


def test_a_failing_compiler_leaves_nothing_behind(monkeypatch, capsys, tmp_path):
    kernels.cache_clear()
    monkeypatch.setattr(native, "_loaded", set())
    broken = tmp_path / "broken-g++"
    broken.write_text("#!/bin/sh\necho 'error: out of paper' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("MLAFORGE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLAFORGE_KERNELS", raising=False)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    try:
        assert kernels() is None
    finally:
        kernels.cache_clear()
    assert "out of paper" in capsys.readouterr().err
    assert list((runtime.cache_home() / "native").iterdir()) == []


def test_kernels_can_be_disabled(monkeypatch, capsys):
    kernels.cache_clear()
    monkeypatch.setenv("MLAFORGE_NATIVE", "0")
    try:
        assert kernels() is None
    finally:
        kernels.cache_clear()
    assert "MLAFORGE_NATIVE is 0" in capsys.readouterr().err


def test_fastest_supported_form_is_used(monkeypatch):
    """AMX also needs permission from the operating system."""
    for amx, allowed, avx512, avx2, best in (
        (True, True, True, True, "amx"), (True, False, True, True, "avx512"), (False, False, True, True, "avx512"),
        (False, False, False, True, "avx2"), (False, False, False, False, None),
    ):  # fmt: skip
        for name, answer in {
            "_is_amx_tile_supported": amx, "_init_amx": allowed, "_is_avx512_bf16_supported": avx512,
            "_is_vnni_supported": avx512, "_is_avx2_supported": avx2,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cpu, name, lambda answer=answer: answer)
        monkeypatch.delenv("MLAFORGE_NATIVE", raising=False)
        assert native.form() == best
        monkeypatch.setenv("MLAFORGE_NATIVE", "avx2")
        assert native.form() == ("avx2" if avx2 else None)


def test_rejects_unknown_forms(monkeypatch):
    monkeypatch.setenv("MLAFORGE_NATIVE", "avx1024")
    with pytest.raises(runtime.UserError, match=r"^MLAFORGE_NATIVE='avx1024' is not known; use 0, 1, amx, avx512 or"):
        native.form()


@pytest.mark.parametrize("name", [name for name in MODULES if "native" in OPS[name].implementations])
def test_kernels_for_cpus_name_the_device_of_other_tensors(name, monkeypatch):
    with torch.device("meta"):
        x, packed = torch.empty(1, 2, 16, dtype=torch.bfloat16), torch.empty(16, 32, dtype=torch.uint8)
    rows = PagedRows(Int8((16,)), packed, torch.bfloat16)
    experts = (packed, packed, x, packed, packed, x, 1.0, 1.0)
    inputs = {
        "attention_mass": (x, rows, 1, None, 1.0, ()), "mxfp4_experts": (x[:, 0], packed, x, *experts),
        "pack_blocks": (rows, None, 16), "packed_attention": (x, rows, None, 1.0),
        "paged_attention": (x, x, x, None, 1.0), "unpack_mxfp4": (packed, packed),
    }.get(name, (x, None, rows, rows, rows))  # fmt: skip
    monkeypatch.setenv("MLAFORGE_OPS", "native")
    message = f"^{name}: native cannot run here: it needs CPU tensors, the inputs are on meta$"
    with pytest.raises(runtime.UserError, match=message):
        OPS[name].choose(*inputs, implementation="native")
    with pytest.raises(runtime.UserError, match=message):
        OPS[name](*inputs)
