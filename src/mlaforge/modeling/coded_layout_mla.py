"""Byte layout of a coded row (coded_rows_mla.py): which bytes hold which bits of which coordinates.

Copied into checkpoints; requires only the standard library, so that plans are computed without torch.
"""

from collections.abc import Sequence


class CodedLayout:
    """Layout of one layer's coded rows.

    counts    coordinates of the latent with at least 1, 2, ... bits, multiples of 8
    rope_dim  elements of the rotary key, 8 bits each with one bf16 scale; 0 for none
    """

    def __init__(self, counts: Sequence[int], rope_dim: int = 0):
        self.counts, self.rope_dim = tuple(counts), rope_dim
        self.rank = self.counts[0]
        self.plane_bytes = sum(self.counts) // 8
        # The scale is 2-byte aligned.
        self.rope_at = self.plane_bytes + (self.plane_bytes + rope_dim) % 2 if rope_dim else self.plane_bytes
        self.row_bytes = self.rope_at + (rope_dim + 2 if rope_dim else 0)
