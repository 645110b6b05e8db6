"""Row formats: decoded rows equal the written ones within the format's error, the bytes match a second implementation
of the format, element by element, and descriptors have the bytes that are allocated."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaforge.engine.cache.kv_cache import LayerCache
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats import (
    common_tokens,
    format_names,
    row_format,
    row_format_type,
    row_format_types,
)
from mlaforge.ops.row_formats.coded import Coded
from mlaforge.ops.row_formats.fp8_ds_mla import Fp8DsMla
from mlaforge.ops.row_formats.int4 import INT4_TOKENS, Int4
from mlaforge.ops.row_formats.int8 import Int8
from mlaforge.ops.row_formats.plain import Plain
from mlaforge.runtime import UserError

FP8 = Plain(12, "float8_e4m3fn")
STEPPED = [Int8((8, 8)), Int8((5,)), Int8((24, 7)), Int8((16,) * 6), Int4(1, 2), Int4(2, 16), Int4(3, 20)]
FORMATS = [*STEPPED, FP8, Fp8DsMla(512), Fp8DsMla(200)]
CODED = [Coded((24, 16, 8)), Coded((24, 16, 8), 6), Coded((8,) * 3, 7)]
PLAIN = [Plain(12, "bfloat16"), Plain(7, "float16"), Plain(7, "float32")]
DESCRIPTORS = [*FORMATS, *CODED, *PLAIN]
CPU = torch.device("cpu")


def bf16(*shape, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def filled(format, row_NW, units=None):
    """Rows of which some units are written and the others are NaN, and the numbers of these units."""
    count = len(row_NW) // format.tokens
    rows = format.empty(count + 3, CPU)
    rows.view(torch.uint8).fill_(255)
    units = torch.randperm(count + 3, generator=torch.Generator().manual_seed(1))[:count] if units is None else units
    format.write(rows, units, row_NW)
    return rows, units


def through(format, row_NW):
    rows, units = filled(format, row_NW)
    return format.read(rows, units)


def steps(format, x_NW):
    """Distance of neighbouring codes at each element, including the rounding of its scale."""
    if isinstance(format, Int8):
        steps = [
            part.abs().amax(1, keepdim=True).expand_as(part) / 127 for part in x_NW.split(format.group_sizes, dim=1)
        ]
        step = torch.cat(steps, dim=1)
    else:
        k, v = x_NW.view(-1, INT4_TOKENS, 2, format.num_kv_heads, format.head_dim).unbind(2)
        steps = [(p.amax(d, keepdim=True) - p.amin(d, keepdim=True)).expand_as(p) for p, d in ((k, 1), (v, 3))]
        step = torch.stack(steps, dim=2).reshape(x_NW.shape) / 15
    return step * (1 + 2**-7)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(STEPPED), st.integers(0, 2**31), st.floats(-18, 18), st.booleans())
def test_decoded_values_are_within_half_a_step(format, seed, magnitude, outlier):
    x = bf16(2 * INT4_TOKENS, format.width, seed=seed, scale=10**magnitude)
    if outlier:
        x[3, 1] *= 3000
    got, x = through(format, x).float(), x.float()
    # Decoded values are rounded to bf16's 8 bits.
    assert ((got - x).abs() <= steps(format, x) / 2 + (got.abs() + steps(format, x)) * 2**-8).all()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_decoded_rows_are_bf16_and_independent(format):
    """For any other rows written in the same call, in any order."""
    x = bf16(4 * format.tokens, format.width)
    rows, units = filled(format, x)
    assert format.read(rows, units).dtype == torch.bfloat16
    assert len(rows[0].view(torch.uint8)) == format.unit_bytes
    one = format.empty(len(rows), CPU)
    for at in (2, 0, 3, 1):
        format.write(one, units[at : at + 1], x[at * format.tokens :][: format.tokens])
    for unit in units:
        assert torch.equal(one[unit].view(torch.uint8), rows[unit].view(torch.uint8))
    others = [unit for unit in range(len(rows)) if unit not in units]
    assert all((rows[unit].view(torch.uint8) == 255).all() for unit in others)
    # Decoding again in another order gives the same rows.
    back = format.read(rows, units.flip(0)).view(4, format.tokens, -1).flip(0).flatten(0, 1)
    assert torch.equal(back, format.read(rows, units))


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_constant_and_zero_groups_are_exact(format):
    for value in (0.0, 1.0, -0.3125, 448.0):
        x = torch.full((INT4_TOKENS, format.width), value).bfloat16()
        exact = isinstance(format, Int4 | Plain | Fp8DsMla) or value == 0.0
        torch.testing.assert_close(through(format, x), x, rtol=0 if exact else 2**-7, atol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_nan_stays_nan(format, bad):
    """Only elements that share the scale are affected."""
    x = bf16(2 * INT4_TOKENS, format.width)
    clean = through(format, x)
    x[5, 0] = bad
    got = through(format, x)
    assert got[5, 0].isnan()
    touched = got.isnan()
    assert torch.equal(got[~touched], clean[~touched])
    assert touched.sum() <= (INT4_TOKENS if isinstance(format, Int4) else format.width)
    assert not touched[INT4_TOKENS:].any()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_unwritten_rows_are_nan(format):
    """A cache filled with 255 decodes to NaN."""
    rows = format.empty(2, CPU)
    rows.view(torch.uint8).fill_(255)
    assert format.read(rows, torch.tensor([0, 1])).isnan().all()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_rows_in_fp32_are_rounded_to_bf16_first(format):
    x = torch.randn(INT4_TOKENS, format.width, generator=torch.Generator().manual_seed(3))
    if format is not FP8:
        assert torch.equal(through(format, x), through(format, x.bfloat16()))


def test_fp8_saturates():
    x = torch.tensor([[1.0, 447.0, 449.0, 1e30, -1e30, 2.0**-9, 2.0**-11, 0, 17, -3, 0.1, 5]]).bfloat16()
    want = [1, 448, 448, 448, -448, 2.0**-9, 0, 0, 16, -3, 0.1015625, 5]
    assert through(FP8, x)[0].tolist() == want


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_plain_rows_are_unchanged(dtype):
    x = torch.randn(4, 6).to(getattr(torch, dtype))
    assert torch.equal(through(Plain(6, dtype), x), x)


# The bytes


def number(pair):
    """A bf16 value from its two bytes."""
    return np.array([(pair[0] | pair[1] << 8) << 16], dtype=np.uint32).view(np.float32)[0]


@pytest.mark.parametrize("parts", [(8, 8), (5,), (24, 7)])
def test_bytes_of_int8(parts):
    format, x = Int8(parts), bf16(1, sum(parts))
    rows, units = filled(format, x)
    data, even = rows[units[0]].tolist(), sum(parts) + sum(parts) % 2
    assert len(data) == even + 2 * len(parts) and data[sum(parts) : even] == [0] * (sum(parts) % 2)
    place, want = 0, []
    for part, width in enumerate(parts):
        scale, values = number(data[even + 2 * part :][:2]), x[0, place : place + width].float().numpy()
        assert np.abs(values).max() / 127 <= scale < np.abs(values).max() / 127 * (1 + 2**-6)
        for i, value in enumerate(values):
            code = data[place + i] - 256 * (data[place + i] > 127)
            assert code == np.rint(np.float32(value) / np.float32(scale))
            want.append(code * scale)
        place += width
    assert torch.equal(format.read(rows, units[:1])[0], torch.tensor(np.array(want)).bfloat16())
    assert format.descriptor == [1, *parts]


def test_bytes_of_int4():
    G, D = 2, 6
    format, x = Int4(G, D), bf16(INT4_TOKENS, 2 * G * D)
    rows, units = filled(format, x)
    data, codes, C = rows[units[0]].tolist(), INT4_TOKENS * G * D // 2, G * D
    key_scales, value_scales = 2 * codes, 2 * codes + 4 * C
    assert len(data) == format.unit_bytes == value_scales + 4 * INT4_TOKENS * G

    def part(begin, index):
        return number(data[begin + 2 * index :][:2])

    want = np.zeros((INT4_TOKENS, 2 * C), dtype=np.float32)
    for t in range(INT4_TOKENS):
        for c in range(C):
            nibbles = [data[which * codes + (t * C + c) // 2] >> 4 * (c % 2) & 15 for which in (0, 1)]
            head = t * G + c // D
            scales = part(key_scales, c), part(value_scales, head)
            least = part(key_scales + 2 * C, c), part(value_scales + 2 * INT4_TOKENS * G, head)
            for which in (0, 1):
                value = np.float32(x[t, which * C + c].item())
                assert nibbles[which] == np.rint((value - least[which]) / scales[which])
                want[t, which * C + c] = np.float32(nibbles[which]) * scales[which] + least[which]
            assert least[0] == x[:, c].min() and least[1] == x[t, C + c // D * D :][:D].min()
    assert torch.equal(format.read(rows, units[:1]), torch.tensor(want).bfloat16())
    assert format.descriptor == [2, G, D]


@pytest.mark.parametrize("rank", [512, 384, 200])
def test_bytes_of_fp8_ds_mla(rank):
    """656 bytes: codes of 8-bit floats, a power of two per 128, the rotary key as it is."""
    format, x = Fp8DsMla(rank), bf16(1, rank + 64)
    x[0, :128] *= 1e-5
    rows, units = filled(format, x)
    data, want = rows[units[0]].tolist(), []
    assert len(data) == 656 and format.descriptor == [4, rank]
    scales = np.array(data[512:528], dtype=np.uint8).view(np.float32)
    for i in range(512):
        value = x[0, i].item() if i < rank else 0.0
        group = x[0, i // 128 * 128 : min(rank, i // 128 * 128 + 128)].abs().float().numpy()
        scale, largest = scales[i // 128], group.max() if len(group) else 0.0
        assert np.frexp(scale)[0] == 0.5 and (scale / 2 < largest / 448 <= scale or not largest)
        sign, exponent, mantissa = data[i] >> 7, data[i] >> 3 & 15, data[i] & 7
        code = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        decoded = (1 - 2 * sign) * code * float(scale)
        assert abs(decoded - value) <= max(abs(value) / 16, float(scale) * 2.0**-10)
        want.append(decoded)
    assert format.read(rows, units[:1])[0, :rank].tolist() == want[:rank]
    assert torch.equal(format.read(rows, units[:1])[0, rank:], x[0, rank:])
    assert [number(data[528 + 2 * i :][:2]) for i in range(64)] == x[0, rank:].tolist()


def test_error_of_fp8_ds_mla():
    """Relative, in the mean square, of a latent of normal numbers; FP8 rows without scales lose small ones."""
    x = bf16(400, 576, scale=0.01)
    errors = [float((through(f, x).float() - x).norm() / x.norm()) for f in (Fp8DsMla(512), Plain(576, FP8.dtype))]
    assert 0.022 < errors[0] < 0.028 < 1.2 * errors[0] < errors[1]


@pytest.mark.parametrize("groups", [(512,), (520, 64), (256, 32), (64, 64, 64, 64)])
def test_rows_that_fp8_ds_mla_cannot_store(groups):
    with pytest.raises(UserError, match=r"at most 512 latent and exactly 64 rotary elements, not "):
        row_format("fp8_ds_mla", groups)


# The descriptors


def test_every_format_is_tested():
    assert {type(format) for format in DESCRIPTORS} == set(row_format_types().values())
    assert set(format_names()) <= {format.name for format in DESCRIPTORS}


@pytest.mark.parametrize("format", DESCRIPTORS, ids=str)
def test_descriptor_has_the_bytes_of_the_tensors(format):
    rows = format.empty(3, CPU)
    assert rows.nbytes == 3 * format.unit_bytes == format.bytes(3 * format.tokens)
    assert rows.nbytes == 3 * format.tokens * format.bytes_per_token
    assert row_format_types()[format.id] is type(format) is row_format_type(format.name)
    row = torch.zeros(format.tokens, format.width)
    format.write(rows, torch.tensor([1]), row)
    assert format.read(rows, torch.tensor([1])).shape == row.shape
    # The parts follow each other without overlap; elements of whole bytes are aligned in every unit.
    assert format.unit_bytes % format.alignment == 0 and common_tokens() % format.tokens == 0
    assert format.parts[0].offset == 0 and format.parts[-1].stop <= format.unit_bytes
    assert all(first.stop <= second.offset for first, second in itertools.pairwise(format.parts))
    for part in format.parts:
        assert part.offset % max(1, part.bits // 8) == 0 and format.alignment % max(1, part.bits // 8) == 0


@pytest.mark.parametrize("format", DESCRIPTORS, ids=str)
def test_blocks_have_the_bytes_of_the_descriptor(format):
    """Packed ones and, where there are any, those whose tokens are not packed yet."""
    size, unquantized = common_tokens(), 2 * format.newest_unquantized
    rows = PagedRows.empty(format, 3 * size, torch.float32, CPU, unquantized * size)
    layer = LayerCache("gqa", format, 0)
    nbytes = sum(tensor.nbytes for tensor in rows.tensors)
    assert nbytes == 3 * layer.block_bytes(size) + unquantized * layer.unquantized_block_bytes(size)
    assert layer.block_bytes(size) == format.bytes(size)
    assert layer.unquantized_block_bytes(size) == format.unquantized_bytes(size)


def test_the_newest_tokens_of_int4_are_in_bf16():
    format = Int4(2, 16)
    assert [format.bytes(tokens) for tokens in (31, 32, 33)] == [31 * 128, format.unit_bytes, format.unit_bytes + 128]


def test_formats_by_name():
    groups = (16,) * 4
    others = [name for name in format_names() if not row_format_type(name).latent_rope_only]
    names = {name: row_format(name, groups, counts=(16,)) for name in ("fp32", "fp16", *others)}
    assert row_format("fp8_ds_mla", (448, 64)) == Fp8DsMla(448)
    assert all(format.name == name for name, format in names.items())
    assert names["int8"] == Int8(groups) and names["int4"] == Int4(2, 16) and names["fp8"] == Plain(64, FP8.dtype)
    assert row_format("auto", groups, "float32") == Plain(64, "float32")
    assert row_format("auto", (24, 6), "float32", (24, 16, 8)) == Coded((24, 16, 8), 6) == CODED[1]
    with pytest.raises(AssertionError, match="'int3' is the name of 0 row formats"):
        row_format("int3", groups)
    with pytest.raises(AssertionError, match=r"'torch\.bfloat16' is not one of float32, float16, bfloat16"):
        Plain(12, "torch.bfloat16")


def test_descriptors_load_no_torch():
    code = (
        "import sys\n"
        "from mlaforge.ops.row_formats import format_names, row_format\n"
        "import mlaforge.planning.plan, mlaforge.engine.config\n"
        "formats = [row_format(name, (64, 64), counts=(64, 8)) for name in format_names()]\n"
        "assert all(format.bytes(32) and format.parts and format.descriptor for format in formats)\n"
        "assert 'torch' not in sys.modules"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
