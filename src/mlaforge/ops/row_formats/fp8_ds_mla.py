"""Rows of 656 bytes, the cache of FlashMLA's sparse kernels and vLLM's kv_cache_dtype of this name: a latent in 8-bit
floats with scales, and a rotary key in bf16."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Self

from mlaforge.ops.row_formats.format import Part, RowFormat, as_bytes, consecutive
from mlaforge.ops.row_formats.plain import LARGEST_FP8
from mlaforge.runtime import UserError

if TYPE_CHECKING:
    from torch import Tensor

# Elements of the latent, of a group with one scale, and of the rotary key.
RANK, GROUP, ROPE = 512, 128, 64
# A scale of zeros.
SMALLEST_SCALE = 2.0**-100


@dataclasses.dataclass(frozen=True)
class Fp8DsMla(RowFormat):
    """A token's bytes: 512 latent elements in float8_e4m3fn, a smaller rank filled up with zeros; one fp32 scale per
    128 of them; 64 rotary elements in bf16. (FlashMLA's README, "FP8 KV Cache".)

    A scale is the least power of two by which no element exceeds 448, so that decoded elements are exact in bf16. An
    element of the latent is rounded to 4 significant bits: a relative error of at most 1/16, 2.6 % in the mean square.
    """

    rank: int

    id: ClassVar = 4
    names: ClassVar = ("fp8_ds_mla",)
    latent_rope_only: ClassVar = True
    devices: ClassVar = ("cpu", "cuda")

    @classmethod
    def make(cls, name: str, group_sizes: tuple[int, ...], counts: tuple[int, ...]) -> Self:
        if len(group_sizes) != 2 or group_sizes[0] > RANK or group_sizes[1] != ROPE:
            raise UserError(
                f"kv_cache_dtype {name} stores at most {RANK} latent and exactly {ROPE} rotary elements, not "
                f"{' + '.join(map(str, group_sizes))}; convert with --layout latent_rope and {ROPE} rotary dimensions, "
                "or use bf16"
            )
        return cls(group_sizes[0])

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.rank,)

    @property
    def width(self) -> int:
        return self.rank + ROPE

    @property
    def parts(self) -> tuple[Part, ...]:
        return consecutive(("latent", 8, RANK), ("scales", 32, RANK // GROUP), ("rotary", 16, ROPE))

    def write(self, rows_UB: Tensor, units_U: Tensor, row_NW: Tensor) -> None:
        import torch

        x = row_NW.bfloat16()
        latent = torch.nn.functional.pad(x[:, : self.rank].float(), (0, RANK - self.rank)).unflatten(1, (-1, GROUP))
        codes, scale_NP = fp8_codes(latent)
        parts = (as_bytes(codes.flatten(1)), as_bytes(scale_NP), as_bytes(x[:, self.rank :]))
        rows_UB.index_copy_(0, units_U, torch.cat(parts, dim=1))

    def read(self, rows_UB: Tensor, units_U: Tensor) -> Tensor:
        import torch

        latent, scales, rotary = (rows_UB[units_U][:, part.range].contiguous() for part in self.parts)
        codes = latent.view(torch.float8_e4m3fn).float().unflatten(1, (-1, GROUP))
        decoded = (codes * scales.view(torch.float32)[..., None]).flatten(1)[:, : self.rank]
        return torch.cat((decoded.bfloat16(), rotary.view(torch.bfloat16)), dim=1)


def fp8_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round fp32 groups [..., n] to float8_e4m3fn. Returns the codes, and the scales [...] in fp32: powers of two. NaN
    or an infinity makes its group NaN."""
    import torch

    largest = x.abs().amax(-1)
    mantissa, exponent = torch.frexp((largest / LARGEST_FP8).clamp_min(SMALLEST_SCALE))
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    scale = scale.where(largest.isfinite(), torch.nan)
    return (x / scale[..., None]).to(torch.float8_e4m3fn), scale
