"""Bit allocation for the coordinates of latents: rates of a transform code from measured distortion.

In the basis of the conversion an error of any coordinate of any layer has the same effect on the loss, so that the best
code of a given size minimises the total squared error. The distortion of each coordinate is measured on calibration
inputs: the squared error of the best uniform quantizer at every width, including its range. Bits are then allocated
where they save most (greedily on the lower convex hull: reverse water-filling for measured curves). A coordinate with
zero bits is cut, so that ranks and bits are chosen together. docs/conversion.md, "Bits".

Legend: n samples, m first tokens, R coordinates of a full-rank latent, W widths (0 to LARGEST_CODE bits).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping

import torch
from torch import Tensor

from mlaforge.factorization.latent import Latent
from mlaforge.factorization.moments import FIRST, LayerMoments
from mlaforge.modeling.coded_rows_mla import LARGEST_CODE
from mlaforge.planning.plan import Plan

# Coordinates with a common width, so that a bit plane ends with a byte.
BLOCK = 8
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
        order = order[: len(order) // BLOCK * BLOCK]
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
    """Return the bits per token for the latents of all converted layers, given the mean `bits` per element of GQA's
    cache. A rotary key takes 8 bits per element and 24 bits for its scale (16) and alignment."""
    rotary = (plan.layers[i].qk_rope_head_dim for i in plan.converted)
    cached = sum(plan.spec.layers[i].cached for i in plan.converted)
    return int(bits * cached - sum(8 * n + 24 for n in rotary if n))


def allocate_bits(errors: Mapping[int, Tensor], total: int) -> dict[int, Tensor]:
    """Return the widths [R] int64 of every layer, with at most `total` bits in sum; every layer has at least one block
    of coordinates. errors: Rates.error by layer."""
    sums = {i: error.view(len(error), -1, BLOCK).sum(-1).T.tolist() for i, error in errors.items()}
    widths = {i: [1] + [0] * (len(blocks) - 1) for i, blocks in sums.items()}

    def best(i: int, block: int) -> tuple[float, int, int, int]:
        """Return the next vertex of the hull: -savings per bit, layer, block and the new width."""
        curve, now = sums[i][block], widths[i][block]
        saved, width = max(((curve[now] - curve[w]) / (w - now), w) for w in range(now + 1, len(curve)))
        return -saved / BLOCK, i, block, width

    queue = [best(i, block) for i, blocks in sums.items() for block in range(len(blocks))]
    heapq.heapify(queue)
    remaining = total - BLOCK * len(widths)
    while queue:
        saved, i, block, width = heapq.heappop(queue)
        bits = (width - widths[i][block]) * BLOCK
        if saved >= 0 or bits > remaining:
            continue
        remaining -= bits
        widths[i][block] = width
        if width < LARGEST_CODE:
            heapq.heappush(queue, best(i, block))
    return {i: torch.tensor(block_widths).repeat_interleave(BLOCK) for i, block_widths in widths.items()}


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
