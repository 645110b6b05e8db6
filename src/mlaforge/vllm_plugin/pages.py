"""Equal page sizes for layer groups with different row widths, as vLLM's block pool requires."""

from __future__ import annotations

from collections.abc import Sequence

from mlaforge.runtime import UserError


def even_pages(
    row_bytes: Sequence[int], block_size: int, drafted: int = 0, alignment: int = 1
) -> tuple[list[int], list[int]]:
    """Compute block sizes and row bytes of groups whose rows need `row_bytes`, so that all pages have one size.

    The first group (the layers with full attention, if any) keeps `block_size` and its row. A longer row gets smaller
    blocks, a shorter one larger blocks, and the rest becomes unused bytes. With several groups, the page of a draft
    head, `drafted` bytes per token, must divide, or be divided by, theirs: the first group's rows grow accordingly.
    All are multiples of `alignment` bytes.
    """
    assert not any(size % alignment for size in (*row_bytes, drafted)), (row_bytes, drafted, alignment)
    widths, drafted = [size // alignment for size in row_bytes], drafted // alignment
    first = widths[0]
    if len(widths) > 1 and drafted:
        divisors = [d for d in range(first, drafted + 1) if drafted % d == 0]
        first = divisors[0] if divisors else -(-first // drafted) * drafted
    sizes, filled = [block_size], [first]
    for width in widths[1:]:
        if width > first:
            parts = next((k for k in range(1, block_size + 1) if block_size % k == 0 and k * first >= width), None)
            if parts is None:
                raise UserError(
                    f"a block of {block_size} tokens is too small for this model's windows; increase --block-size"
                )
            sizes.append(block_size // parts)
            filled.append(first * parts)
        else:
            times = max(k for k in range(1, first // width + 1) if first % k == 0)
            sizes.append(block_size * times)
            filled.append(first // times)
    return sizes, [width * alignment for width in filled]
