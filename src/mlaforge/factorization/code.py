"""Bit allocation for the coordinates of latents: rates of a transform code from measured distortion.

In the basis of the conversion an error of any coordinate of any layer has the same effect on the loss, so that the best
code of a given size minimises the total squared error. The distortion of each coordinate is measured on calibration
inputs: the squared error of the best uniform quantizer at every width, including its range. Groups of coordinates have
equal widths, because they are stored as whole words. Within a layer the best widths for every length of a row follow by
dynamic programming, which counts the padding; bytes are then allocated to layers where they save most (greedily on the
lower convex hull: reverse water-filling for measured curves). A coordinate with zero bits is cut, so that ranks and
bits are chosen together. docs/conversion.md, "Bits".

Legend: n samples, m first tokens, R coordinates of a full-rank latent, W widths (0 to LARGEST_CODE bits), B groups of
coordinates, T words of a row and one more, L row lengths in units of ALIGNMENT.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from mlaforge.factorization.latent import Latent
from mlaforge.factorization.moments import FIRST, LayerMoments
from mlaforge.modeling.coded_layout_mla import ALIGNMENT, GROUP, round_up
from mlaforge.modeling.coded_rows_mla import LARGEST_CODE
from mlaforge.planning.plan import Plan

# Ranks of coded latents are multiples of this.
RANK_MULTIPLE = 8
# Coordinates with a small deviation on the calibration text vary more on other texts: deviations below the 95th
# percentile are multiplied by this power of the percentile over the deviation (measured: docs/notes/conversion.md).
SHRINKAGE = 0.17
# Candidate ranges in standard deviations: NUM_RANGES of them at every width, larger ones for wider codes.
NUM_RANGES = 7
RANGES = (0.8, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.25, 5.0, 6.0, 7.5, 10.0, 14.0, 20.0, 28.0)
# Maximum number of quantization steps per standard deviation: the rounded row has 8 significant bits. Further bits of a
# wide code extend its range instead, for values that the calibration text does not contain.
MAX_RESOLUTION = 128
# Margin of the range above the values of first tokens, for other texts.
HEADROOM = 1.25
# Minimum deviation of a coordinate, relative to its magnitude: the precision of fp32.
MIN_DEVIATION = 1e-6


@dataclasses.dataclass
class Rates:
    """Rate-distortion data of one layer's full-rank latent, fp32.

    `order` [R] int64: permutation of the coordinates by which the others are sorted, those that need more bits first.
    `error` [W, R]: mean squared error at every width, in units of loss (half of it is nats per token). `step` and
    `centre` [W, R]: of the quantizer with that error, whose level n represents step * (n + 1/2) + centre.
    """

    order: Tensor
    error: Tensor
    step: Tensor
    centre: Tensor

    @classmethod
    def of(cls, samples_nR: Tensor, weight_n: Tensor, first_mR: Tensor, first_weight_m: Tensor) -> Rates:
        """Measure the rates on latents of calibration tokens and of first tokens of a text. First tokens are outliers
        that all others attend to: every range includes them, and quantizers are shifted such that the very first token,
        which is nearly the same in all texts, falls on a level."""
        total = weight_n.sum() + first_weight_m.sum()
        weight_n, first_weight_m = (weight_n / total).float(), (first_weight_m / total).float()
        mean = samples_nR.mean(0)
        deviation = samples_nR.std(0)
        # Constant coordinates need a unit, too (such as the first layer's inputs for a text of one repeated token).
        largest = torch.cat((samples_nR, first_mR)).abs().amax(0)
        deviation = deviation.maximum(MIN_DEVIATION * largest).clamp_min(1e-30)
        x = (samples_nR - mean) / deviation
        deviation = deviation * (deviation.quantile(0.95) / deviation).clamp_min(1) ** SHRINKAGE
        first = (first_mR - mean) / deviation
        reach = HEADROOM * first.abs().amax(0)
        weights = torch.cat((weight_n, first_weight_m))[:, None]
        x = torch.cat((x, first))
        sink = (first[::FIRST] * first_weight_m[::FIRST, None]).sum(0) / first_weight_m[::FIRST].sum()
        error, step, centre = [(x.square() * weights).sum(0)], [torch.ones_like(mean)], [torch.zeros_like(mean)]
        for width in range(1, LARGEST_CODE + 1):
            best = [torch.full_like(mean, torch.inf), torch.ones_like(mean), torch.zeros_like(mean)]
            for candidate in RANGES[width - 1 : width - 1 + NUM_RANGES]:
                size = (reach.clamp_min(candidate) * 2.0 ** (1 - width)).clamp_min(1 / MAX_RESOLUTION)
                for shift in (torch.zeros_like(mean), sink - ((sink / size).floor() + 0.5) * size):
                    squared_error = _error(x, weights, size, shift, width)
                    better = squared_error < best[0]
                    best = [torch.where(better, a, b) for a, b in zip((squared_error, size, shift), best, strict=True)]
            for values, value in zip((error, step, centre), best, strict=True):
                values.append(value)
        errors = torch.stack(error) * deviation.square()
        order = errors[LARGEST_CODE // 2].argsort(descending=True, stable=True)
        order = order[: len(order) // RANK_MULTIPLE * RANK_MULTIPLE]
        return cls(
            order,
            errors[:, order],
            (torch.stack(step) * deviation)[:, order],
            (torch.stack(centre) * deviation + mean)[:, order],
        )

    @classmethod
    def of_layer(cls, latent: Latent, m: LayerMoments) -> Rates:
        """Measure the rates of a layer at its full rank on the input samples of its calibration moments."""
        kv_a, b_kv_a = latent.kv_a[: latent.rank].float(), latent.b_kv_a[: latent.rank].float()
        samples, first = (x.float() @ kv_a.T + b_kv_a for x in (m.samples, m.first))
        return cls.of(samples, m.sample_weight, first, m.first_weight)

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields as tensors for safetensors; `Rates(**tensors)` restores them."""
        return vars(self)


def _error(x_nR: Tensor, weight_n1: Tensor, step_R: Tensor, shift_R: Tensor, width: int) -> Tensor:
    """Return the weighted squared error [R] of rounding to the midpoints of 2^width steps around `shift_R`."""
    half = 2.0 ** (width - 1)
    codes = ((x_nR - shift_R) / step_R).floor_().clamp_(-half, half - 1).add_(0.5).mul_(step_R).add_(shift_R)
    return codes.sub_(x_nR).square_().mul_(weight_n1).sum(0)


def bit_budget(plan: Plan, bits: float) -> int:
    """Return the bits per token for the rows of all converted layers, given the mean `bits` per element of GQA's
    cache."""
    return int(bits * sum(plan.spec.layers[i].cached for i in plan.converted))


def rotary_widths(plan: Plan) -> dict[int, int]:
    """Return the elements of the rotary key of every converted layer."""
    return {i: plan.layers[i].qk_rope_head_dim for i in plan.converted}


class RowCurve:
    """Least error of a layer for every length of its rows.

    A group of b bits takes b words of 32 bits, and the plane of two bits, of which a group takes two words, is padded
    to ALIGNMENT. The state after each group is therefore the number of words and the parity of the groups in that
    plane. A last group with fewer than GROUP coordinates is counted as a full one.

    error: Rates.error. rope_dim: elements of the rotary key. `least` [L]: least error of rows of at most l * ALIGNMENT
    bytes, infinite where none fits.
    """

    def __init__(self, error: Tensor, rope_dim: int = 0):
        self.coordinates = error.shape[1]
        padded = torch.nn.functional.pad(error.double().cpu(), (0, -self.coordinates % GROUP))
        sums_WB = padded.unflatten(1, (-1, GROUP)).sum(-1)
        W, B = sums_WB.shape
        state_T2 = torch.full((B * (W - 1) + 1, 2), torch.inf, dtype=torch.float64)
        state_T2[0, 0] = 0
        self.choices: list[Tensor] = []
        for group in range(B):
            before, choice = state_T2, torch.zeros(state_T2.shape, dtype=torch.uint8)
            state_T2 = torch.full_like(before, torch.inf)
            for width in range(W):
                reached = before[: len(before) - width] + sums_WB[width, group]
                reached = reached.flip(1) if width & 2 else reached
                better = reached < state_T2[width:]
                state_T2[width:][better] = reached[better]
                choice[width:][better] = width
            self.choices.append(choice)
        # At least one group has bits.
        state_T2[0] = torch.inf
        words, odd = torch.meshgrid(torch.arange(len(state_T2)), torch.arange(2), indexing="ij")
        planes = 4 * words + 8 * odd + (2 if rope_dim else 0)
        self.lengths_T2 = -(-planes // ALIGNMENT) + round_up(rope_dim, ALIGNMENT) // ALIGNMENT
        self.state_T2 = state_T2
        least = torch.full((int(self.lengths_T2.max()) + 1,), torch.inf, dtype=torch.float64)
        least.scatter_reduce_(0, self.lengths_T2.flatten(), state_T2.flatten(), "amin")
        self.least = least.cummin(0).values.tolist()

    def shortest(self) -> int:
        """Return the length of the shortest possible row, in units of ALIGNMENT."""
        return next(length for length, error in enumerate(self.least) if math.isfinite(error))

    def step(self, length: int, most: int) -> tuple[float, int]:
        """Return the extension of a row by at most `most` units of ALIGNMENT that saves most per unit, the shortest
        such one: (saving per unit, units)."""
        steps = range(1, min(most, len(self.least) - 1 - length) + 1)
        saved = {units: (self.least[length] - self.least[length + units]) / units for units in steps}
        units = max(saved, key=saved.__getitem__, default=0)
        return saved.get(units, 0.0), units

    def widths(self, length: int) -> Tensor:
        """Return the widths [R] int64 of the least error for this length."""
        errors = torch.where(self.lengths_T2 <= length, self.state_T2, torch.inf)
        words, odd = divmod(int(errors.argmin()), 2)
        groups = []
        for choice in reversed(self.choices):
            width = int(choice[words, odd])
            groups.append(width)
            words, odd = words - width, odd ^ (width >> 1 & 1)
        return torch.tensor(groups[::-1]).repeat_interleave(GROUP)[: self.coordinates]


def allocate_bits(
    errors: Mapping[int, Tensor], total: int, rope_dims: Mapping[int, int] | None = None
) -> dict[int, Tensor]:
    """Return the widths [R] int64 of every layer, with rows of at most `total` bits in sum; every layer has at least
    one group of coordinates. errors: Rates.error by layer. rope_dims: elements of each layer's rotary key, if any."""
    curves = {i: RowCurve(error, (rope_dims or {}).get(i, 0)) for i, error in errors.items()}
    lengths = {i: curve.shortest() for i, curve in curves.items()}
    remaining = total // (8 * ALIGNMENT) - sum(lengths.values())

    def step(i: int) -> tuple[float, int, int]:
        """Return the best extension of a layer's rows: -saving per unit, layer, units."""
        saved, units = curves[i].step(lengths[i], remaining)
        return -saved, i, units

    queue = [step(i) for i in lengths]
    heapq.heapify(queue)
    while queue:
        saved, i, units = heapq.heappop(queue)
        if saved >= 0:
            continue
        if units <= remaining:
            remaining -= units
            lengths[i] += units
        heapq.heappush(queue, step(i))
    return {i: curve.widths(lengths[i]) for i, curve in curves.items()}


def counts(widths: Tensor) -> tuple[int, ...]:
    """Return the numbers of coordinates with at least 1, 2, ... bits."""
    return tuple(int((widths >= bit).sum()) for bit in range(1, int(widths.max()) + 1))


def predicted_loss(error: Tensor, widths: Tensor) -> float:
    """Return the predicted loss of these widths, nats per token; error: Rates.error."""
    return float(error.gather(0, widths[None]).sum()) / 2


def encode(latent: Latent, rates: Rates, widths: Tensor) -> Latent:
    """Return the full-rank latent in units of its code: the coordinates with nonzero width, in descending order of
    bits.

    A level n is in [-half, half - 1]; latent = step * (n + 1/2) + centre.
    """
    retained = widths.argsort(descending=True, stable=True)[: int((widths > 0).sum())]
    bits = widths[retained]
    index = rates.order[retained]
    step = rates.step[bits, retained].to(latent.kv_a)
    centre = rates.centre[bits, retained].to(latent.kv_a)
    rank, rotary_width = latent.rank, len(latent.kv_a) - latent.rank
    rotary = slice(rank, rank + rotary_width)
    up = latent.kv_b[:, index]
    return dataclasses.replace(
        latent,
        kv_a=torch.cat((latent.kv_a[index] / step[:, None], latent.kv_a[rotary])),
        b_kv_a=torch.cat(((latent.b_kv_a[index] - centre) / step - 0.5, latent.b_kv_a[rotary])),
        kv_b=up * step,
        # Cut coordinates are replaced by their mean.
        centre=(latent.centre[index] - centre) / step - 0.5,
    )
