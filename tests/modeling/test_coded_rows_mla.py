"""Coded rows: decoded values are the nearest integers within their bits, and rows have the documented bytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlaforge.modeling.coded_layout_mla import ALIGNMENT, CodedLayout
from mlaforge.modeling.coded_rows_mla import LARGEST_CODE, CodedRows

codes = st.lists(st.integers(1, 12), min_size=1, max_size=LARGEST_CODE).map(
    lambda eights: tuple(8 * n for n in sorted(eights, reverse=True))
)


@given(codes, st.sampled_from([0, 2, 6]), st.integers(0, 1 << 30))
def test_decoded_rows(counts, rope, seed):
    code, generator = CodedRows(counts, rope), torch.Generator().manual_seed(seed)
    bits = torch.tensor([sum(i < count for count in counts) for i in range(counts[0])])
    row = torch.randn(2, 3, counts[0] + rope, generator=generator)
    row[..., : counts[0]] *= 2.0**bits
    packed = code.pack(row)
    assert packed.dtype == torch.uint8 and packed.shape == (2, 3, code.layout.row_bytes)
    read = code.unpack(packed)
    latent = row[..., : counts[0]].bfloat16().float()
    nearest = torch.minimum(torch.maximum(latent.round(), -(2.0 ** (bits - 1))), 2.0 ** (bits - 1) - 1)
    assert torch.equal(read[..., : counts[0]], nearest.bfloat16())
    rotary = row[..., counts[0] :]
    assert not rope or ((read[..., counts[0] :] - rotary).abs() <= rotary.abs().amax(-1, keepdim=True) / 80).all()
    # Decoded rows are fixed points, except where bf16 rounds.
    again = code.unpack(code.pack(read))
    assert len(counts) > 8 or torch.equal(again[..., : counts[0]], read[..., : counts[0]])
    assert torch.equal(code.rounded(row), read.to(row.dtype))


@given(codes, st.sampled_from([0, 2, 6, 64]))
def test_segments_cover_every_bit_once(counts, rope):
    """Planes begin at multiples of ALIGNMENT, segments at multiples of 4 bytes, and none overlaps the next."""
    layout = CodedLayout(counts, rope)
    covered = [0] * counts[0]
    end, plane = 0, None
    for part in layout.segments:
        assert part.offset >= end and part.offset % (4 if part.bits == plane else ALIGNMENT) == 0
        end, plane = part.offset + -(-part.coordinates * part.bits // 32) * 4, part.bits
        for i in range(part.first, part.first + part.coordinates):
            bits = (1 << part.bits) - 1 << part.shift
            assert not covered[i] & bits
            covered[i] |= bits
    assert covered == [(1 << sum(i < count for count in counts)) - 1 for i in range(counts[0])]
    assert layout.row_bytes % ALIGNMENT == 0
    assert not rope or (layout.scale_at >= end and layout.rope_at >= layout.scale_at + 2)
    assert layout.row_bytes - ALIGNMENT < max(end, layout.rope_at + rope) <= layout.row_bytes
    assert layout.padding == layout.row_bytes - sum(counts) / 8 - (rope + 2 if rope else 0)


def test_groups_of_32_fill_words():
    """Seven bits of the first 64 coordinates, four of 64, two of 64, one of 128: 32 + 32, 16 + 16 and 8 + 16 bytes."""
    layout = CodedLayout([320, 192, 128, 128, 64, 64, 64])
    assert layout.segments == [
        (4, 0, 0, 64, 0), (4, 0, 64, 64, 32), (2, 4, 0, 64, 64), (2, 0, 128, 64, 80), (1, 6, 0, 64, 96),
        (1, 0, 192, 128, 104),
    ]  # fmt: skip
    assert (layout.padding, layout.row_bytes) == (8, 128)


def test_one_shift_and_one_mask_give_neighbouring_coordinates():
    """A GPU's view of the planes: two halves of a 32-bit word are (word >> shift) & mask."""
    counts = (128, 96, 64, 64, 32, 32, 32)
    code, generator = CodedRows(counts), torch.Generator().manual_seed(0)
    packed = code.pack(torch.randn(1, 128, generator=generator) * 40)[0]
    codes = (code.unpack(packed).int() + code.halves(packed.device)).tolist()
    rebuilt = [0] * 128
    for bits, shift, first, count, offset in code.layout.segments:
        per_word = 32 // bits
        words = packed[offset : offset + count * bits // 8].view(torch.int32).tolist()
        for i in range(0, count, 2):
            word, pair = words[i // per_word] & 0xFFFFFFFF, i % per_word // 2
            halves = word >> (8 * (pair % 2) + pair // 2 * bits) & ((1 << bits) - 1) * 0x00010001
            rebuilt[first + i] |= (halves & 0xFFFF) << shift
            rebuilt[first + i + 1] |= (halves >> 16) << shift
    assert rebuilt == codes


def test_bytes_of_a_row():
    """Three bits for the first eight of 16 coordinates, one for the others."""
    row = torch.tensor([[-4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, -1.0, 0.0, -3.0, 3.0, 0.0, 0.0, 0.0, -1.0]])
    packed = CodedRows((16, 8, 8)).pack(row)[0]
    # Codes 0 to 7: lower bits 0 1 2 3 0 1 2 3, highest ones 0 0 0 0 1 1 1 1; then 0 1 0 1 1 1 1 0. The bytes
    # of a word hold coordinates 4 m, 4 m + 2, 4 m + 1 and 4 m + 3.
    assert packed[:4].tolist() == [0b0000, 0b1010, 0b0101, 0b1111]
    assert packed[16:20].tolist() == [0b10, 0b10, 0b10, 0b10]
    assert packed[20:24].tolist() == [0b10, 0b10, 0b11, 0b01]
    assert len(packed) == 32 and not packed[4:16].any() and not packed[24:].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_becomes_zero(bad):
    """Codes cannot represent NaN; a rotary key can."""
    code = CodedRows((8, 8, 8), 2)
    row = torch.ones(1, 10)
    row[0, 0] = bad
    assert code.unpack(code.pack(row))[0, 0] == {torch.inf: 3, -torch.inf: -4}.get(bad, 0)
    row[0, 0], row[0, 9] = 1.0, bad
    assert not code.unpack(code.pack(row))[0, 8:].isfinite().any()


def test_gradients_pass_straight_through():
    row = torch.randn(4, 8, requires_grad=True)
    CodedRows((8, 8)).rounded(3 * row).sum().backward()
    assert torch.equal(row.grad, torch.full((4, 8), 3.0))
