"""Attention over packed rows: every implementation equals attention over the decoded rows, bitwise except for int8, and
mismatching inputs can be replayed. All forms of the compiled kernels: test_packed_rows.py."""

import pytest
import torch

from mlaforge.engine.cache.block_tables import CacheGroup
from mlaforge.engine.cache.view import make_views
from mlaforge.ops import packed_attention as op
from mlaforge.ops.check import TOLERANCES
from mlaforge.ops.dispatch import replay
from mlaforge.ops.native import kernels
from mlaforge.ops.paged_attention import paged_attention
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats.int4 import Int4
from mlaforge.ops.row_formats.int8 import Int8
from mlaforge.ops.row_formats.plain import Plain
from mlaforge.runtime import UserError
from support.paged_steps import needs_triton

CPU = torch.device("cpu")
H, G, D, SIZE, BLOCKS = 4, 2, 8, 32, 12


class Tables:
    """Block tables of two sequences; if the newest blocks are unquantized, these are blocks 10 and 11."""

    block_size = SIZE

    def __init__(self, whole):
        self.groups = [CacheGroup("rows", BLOCKS - 2 * whole, None, whole, 2 * whole)]
        self.whole = whole

    def table(self, seq, group):
        return 0, ([3, 1, 2, 10], [5, 11])[seq] if self.whole else ([3, 1, 2, 7], [5, 6])[seq]

    def written(self, seq, group):
        return {3: 10} if seq == 0 else {1: 11}


def problem(form, dtype):
    """Queries, rows that are all written, a view of two sequences, and the decoded rows."""
    generator = torch.Generator().manual_seed(0)
    whole = form.newest_unquantized
    row = torch.randn(BLOCKS * SIZE, form.width, generator=generator)
    packed = (BLOCKS - 2 * whole) * SIZE
    rows = PagedRows.empty(form, packed, dtype, CPU, 2 * SIZE * whole)
    form.write(rows.packed, torch.arange(len(rows.packed)), row[:packed])
    numbers = form.read(rows.packed, torch.arange(len(rows.packed)))
    if rows.unquantized is not None:
        rows.write(torch.arange(packed, len(row)), row[packed:])
        numbers = torch.cat((numbers, rows.unquantized))
    (view,) = make_views([(0, 97, 101), (1, 40, 41)], Tables(whole), CPU)
    q = torch.randn(5, H, D, generator=generator).to(dtype)
    return q, rows, view, numbers.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [Int8((D,) * 2 * G), Int4(G, D), Plain(2 * G * D, "float8_e4m3fn")], ids=str)
def test_packed_attention_equals_attention_over_decoded_rows(form, dtype):
    q, rows, view, numbers = problem(form, dtype)
    expected = paged_attention(q, *numbers.view(-1, 2, G, D).unbind(1), view, 0.3)
    actual = op.packed_attention(q, rows, view, 0.3, implementation="reference")
    if dtype == torch.float32:
        torch.testing.assert_close(actual, expected)
    elif kernels() is not None:
        again = op.packed_attention(q, rows, view, 0.3)
        assert all(map(torch.equal, expected, actual))
        tolerance = dict(zip(("atol", "rtol"), TOLERANCES[dtype] if isinstance(form, Int8) else (0, 0), strict=True))
        torch.testing.assert_close(again, actual, **tolerance)


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="the rows are on the CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sinks", [False, True])
def test_int8_rows_in_triton(dtype, sinks):
    q, rows, view, _ = problem(Int8((D,) * 2 * G), dtype)
    sinks_H = torch.linspace(-2.0, 2.0, H).to(dtype) if sinks else None
    actual, expected = (
        op.packed_attention(q, rows, view, 0.3, sinks_H, implementation=name) for name in ("triton", "reference")
    )
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, atol=5e-3, rtol=5e-3)


def test_triton_rejects_blocks_of_int4():
    q, rows, view, _ = problem(Int4(G, D), torch.float32)
    with pytest.raises(UserError, match="it reads int8 rows of one scale per head, not int4"):
        op.packed_attention(q, rows, view, 0.3, implementation="triton")


@pytest.mark.skipif(kernels() is None, reason="there is nothing to be compared")
def test_a_mismatch_is_saved_for_replay(monkeypatch, tmp_path):
    monkeypatch.setenv("MLAFORGE_HOME", str(tmp_path))
    monkeypatch.setenv("MLAFORGE_OPS", "check")
    q, rows, view, _ = problem(Int4(G, D), torch.bfloat16)
    expected = op.packed_attention(q, rows, view, 0.3)
    monkeypatch.setattr(op.OP, "reference", lambda *inputs: [x + 1 for x in op.reference(*inputs)])
    with pytest.raises(AssertionError, match="packed_attention native, output 0"):
        op.packed_attention(q, rows, view, 0.3)
    (path,) = (tmp_path / "mismatches").iterdir()
    monkeypatch.setenv("MLAFORGE_OPS", "")
    for name in (None, "native"):
        assert torch.equal(replay(path, name)[0], expected[0])
