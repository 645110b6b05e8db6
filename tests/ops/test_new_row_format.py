"""A row format that mlaforge does not know is one Python file and one header: compiled attention over its rows equals
attention over the decoded rows, bitwise.

The kernels are compiled for this test alone, without optimization, and with scratch memory that begins as NaN.
"""

import shutil
import sys

import pytest
import torch

from mlaforge.ops import native, row_formats
from mlaforge.ops.kernel_library import FOLDER, KernelLibrary, cache_folder

# bf16 with the bytes of an element swapped, after a byte that has no meaning.
FORMAT = '''"""Elements of bf16, the high byte first."""

import dataclasses
from typing import ClassVar

from mlaforge.ops.row_formats.format import RowFormat, as_bytes, consecutive


@dataclasses.dataclass(frozen=True)
class Toy(RowFormat):
    width: int

    id: ClassVar = 99
    names: ClassVar = ("toy",)

    @classmethod
    def make(cls, name, group_sizes, counts):
        return cls(sum(group_sizes))

    @property
    def sizes(self):
        return (self.width,)

    @property
    def parts(self):
        return consecutive(("seven", 8, 1), ("elements", 8, 2 * self.width))

    def write(self, rows_UB, units_U, row_NW):
        import torch

        swapped = as_bytes(row_NW.bfloat16()).unflatten(1, (-1, 2)).flip(2).flatten(1)
        rows_UB.index_copy_(0, units_U, torch.nn.functional.pad(swapped, (1, 0), value=7))

    def read(self, rows_UB, units_U):
        import torch

        return rows_UB[units_U][:, 1:].unflatten(1, (-1, 2)).flip(2).flatten(1).contiguous().view(torch.bfloat16)
'''
HEADER = """\
#pragma once
#include "simd/vectors.h"

struct ToyRows {
  static constexpr int64_t ID = 99, TOKENS = 1;

  int64_t width;

  explicit ToyRows(at::IntArrayRef sizes) : width(sizes[0]) {}

  int64_t unit_bytes() const { return 1 + 2 * width; }

  void write(const bf16* row, uint8_t* unit) const {
    unit[0] = 7;
    for (int64_t i = 0; i < width; ++i) unit[1 + 2 * i] = row[i].x >> 8, unit[2 + 2 * i] = row[i].x & 255;
  }

  void read(Units units, const int32_t* slots, int64_t count, int64_t first, int64_t last, bf16* rows,
            int64_t stride) const {
    for (int64_t t = 0; t < count; ++t)
      for (int64_t i = first; i < last; ++i) {
        const uint8_t* bytes = units.at(slots[t]) + 1 + 2 * i;
        rows[t * stride + i] = bf16(uint16_t(bytes[0] << 8 | bytes[1]), bf16::from_bits());
      }
  }

  void prefetch(Units units, int64_t slot, int64_t, int64_t) const { prefetch_bytes(units.at(slot), unit_bytes()); }
};
"""
FLAGS = tuple("-O0" if flag == "-O3" else flag for flag in native.FLAGS)
H, G, D, BLOCK = 6, 2, 20, 16
LENGTHS = [5, 300, 700]


@pytest.fixture(scope="module")
def toy_kernels(tmp_path_factory):
    """Kernels with the toy's header, compiled into the cache of libraries: once until a source changes."""
    form = native.form()
    if form is None or native.compiler() is None:
        pytest.skip("no compiler, or a processor without kernels")
    source = tmp_path_factory.mktemp("toy") / "cpu"
    shutil.copytree(FOLDER, source)
    (source / "rows/toy_rows.h").write_text(HEADER)
    library = KernelLibrary("toy", native.FORMS[form], source, (*FLAGS, "-DPOISONED_SCRATCH"))
    torch.ops.load_library(library.find() or library.build(cache_folder()))
    return native.operations("toy")


@pytest.fixture(scope="module")
def toy_format(tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats")
    (folder / "toy.py").write_text(FORMAT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_formats, "__path__", [*row_formats.__path__, str(folder)])
        row_formats.row_format_types.cache_clear()
        yield lambda width: row_formats.row_format("toy", (width,))
    row_formats.row_format_types.cache_clear()
    sys.modules.pop("mlaforge.ops.row_formats.toy", None)


def test_attention_over_a_new_format(toy_kernels, toy_format):
    """In the last block of every sequence rows are unquantized or packed."""
    generator = torch.Generator().manual_seed(0)
    columns = [-(-length // BLOCK) for length in LENGTHS]
    order = torch.randperm(sum(columns), generator=generator).to(torch.int32)
    table = torch.zeros(len(LENGTHS), max(columns), dtype=torch.int32)
    for s, blocks in enumerate(order.split(columns)):
        table[s, : len(blocks)] = blocks
    decoded = torch.randn(len(order) * BLOCK, 2 * G * D, generator=generator).bfloat16()
    # One query token of the first sequences, and a prompt of the last.
    queries = [1, 2, 40]
    q = torch.randn(sum(queries), H, D, generator=generator).bfloat16()
    starts = torch.tensor([0, *queries]).cumsum(0)
    numbers = [x.to(torch.int32) for x in (torch.tensor(LENGTHS), torch.zeros(len(LENGTHS)), starts)]
    step = (G, D, G * D, table, *numbers, BLOCK, 0, 0.3, None)
    expected = toy_kernels.decode(q, decoded, None, [0], *step)
    format = toy_format(2 * G * D)
    assert all(bool(part.isfinite().all()) for part in expected)
    for packed_blocks in (len(order), len(order) // 2):
        count = packed_blocks * BLOCK
        unquantized = decoded[count:].contiguous() if count < len(decoded) else None
        packed = format.empty(count, torch.device("cpu"))
        format.write(packed, torch.arange(count), decoded[:count])
        assert torch.equal(format.read(packed, torch.arange(count)), decoded[:count])
        actual = toy_kernels.decode(q, packed, unquantized, format.descriptor, *step)
        assert all(map(torch.equal, actual, expected))


def test_rows_are_written(toy_kernels, toy_format):
    format, x, slots = toy_format(8), torch.randn(3, 8).bfloat16(), torch.tensor([4, 0, 8])
    rows = format.empty(9, torch.device("cpu")).zero_()
    expected, turn = rows.clone(), torch.ones(3, 1, 4, dtype=torch.complex64)
    toy_kernels.rope_and_store(x.clone(), turn, rows, None, format.descriptor, slots, 0, 8)
    format.write(expected, slots, x)
    assert torch.equal(rows, expected)


def test_the_size_of_a_row_is_checked(toy_kernels):
    with pytest.raises(RuntimeError, match=r"1 rows in format \[99, 8\] have 17 bytes, these have 16"):
        toy_kernels.rope_and_store(
            torch.zeros(1, 8).bfloat16(), torch.ones(1, 1, 4, dtype=torch.complex64),
            torch.zeros(9, 16, dtype=torch.uint8), None, [99, 8], torch.zeros(1).long(), 0, 8,
        )  # fmt: skip
