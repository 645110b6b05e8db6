"""Coded rows: decoded values are the nearest integers within their bits, and rows have the expected bytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
    rotary_bytes = (sum(counts) // 8 + rope) % 2 + rope + 2 if rope else 0
    assert code.layout.row_bytes == sum(counts) // 8 + rotary_bytes
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


def test_bit_planes_cover_all_coordinates():
    """Two bits for the first eight of 16 coordinates, one for the others: -1 or 0."""
    row = torch.tensor([[-2.0, -1.0, 0.0, 1.0, -2.4, 5.0, 0.6, -9.0, -1.0, 0.0, -3.0, 3.0, 0.0, 0.0, 0.0, -1.0]])
    packed = CodedRows((16, 8)).pack(row)
    # Codes 0 1 2 3 0 3 3 0 and 0 1 0 1 1 1 1 0, the first coordinate in the lowest bit.
    assert packed.tolist() == [[0b01101010, 0b01111010, 0b01101100]]


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
