"""Bits for the numbers of a latent: a transform code's rates, chosen by measured distortion.

In the basis that conversion finds an error of any number costs the loss the same, whatever the layer, so the best code
of a given size has the least squared error in sum. How far each number can be rounded is measured on calibration
inputs: the squared error of the best uniform code at every width, its range chosen with it. Widths then follow by
handing out bits where they save most (greedy on the lower convex hull, which is reverse water-filling's answer for
measured curves); a number that is given none is cut: rank and bits are one choice. docs/conversion.md, "Bits".

Legend: n samples, m first tokens, R numbers of a full-rank latent, W widths (0 to LARGEST_CODE bits).
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

# Numbers that are given bits together, so that a plane of bits ends with a byte.
BLOCK = 8
# What varies little in the calibration's text varies more in any other: deviations fall with this power less than they
# do there, from the largest twentieth on (measured: docs/notes/conversion.md).
ELSEWHERE = 0.17
# Ranges that are tried, in standard deviations: TRIED of them at every width, the wider the code the further.
TRIED = 7
RANGES = (0.8, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.25, 5.0, 6.0, 7.5, 10.0, 14.0, 20.0, 28.0)
# Steps to a standard deviation at the most: the row that is rounded has 8 significant bits itself. What a wide number
# could have beyond that goes into its range, where text that nobody foresaw may lie.
FINEST = 128
# Room above what the first tokens reach, for those of other texts.
HEADROOM = 1.25
# Of its size a number varies by so much at the least: fp32 says no more of it.
CONSTANT = 1e-6


@dataclasses.dataclass
class Rates:
    """What each number of one layer's full-rank latent costs at every width, fp32.

    All in the order of `order` [R] int64, in which numbers that need more bits come first. `error` [W, R]: mean squared
    error in units of loss (half of it is nats per token). `step` and `centre` [W, R]: those of the code that has it,
    whose numbers n stand for step * (n + 1/2) + centre.
    """

    order: Tensor
    error: Tensor
    step: Tensor
    centre: Tensor

    @classmethod
    def of(cls, samples_nR: Tensor, weight_n: Tensor, first_mR: Tensor, first_weight_m: Tensor) -> Rates:
        """From latents of calibration tokens, and of those that stand first in a text. What stands first lies where no
        other token does, and everything attends to it: it is within every range, and codes are shifted so that the very
        first token, which hardly differs from text to text, falls on one of their levels."""
        total = weight_n.sum() + first_weight_m.sum()
        weight_n, first_weight_m = (weight_n / total).float(), (first_weight_m / total).float()
        mean = samples_nR.mean(0)
        deviation = samples_nR.std(0)
        # What does not vary, as a layer's first input where all text is one token again and again, has a unit too.
        largest = torch.cat((samples_nR, first_mR)).abs().amax(0)
        deviation = deviation.maximum(CONSTANT * largest).clamp_min(1e-30)
        x = (samples_nR - mean) / deviation
        deviation = deviation * (deviation.quantile(0.95) / deviation).clamp_min(1) ** ELSEWHERE
        first = (first_mR - mean) / deviation
        reach = HEADROOM * first.abs().amax(0)
        weights = torch.cat((weight_n, first_weight_m))[:, None]
        x = torch.cat((x, first))
        sink = (first[::FIRST] * first_weight_m[::FIRST, None]).sum(0) / first_weight_m[::FIRST].sum()
        error, step, centre = [(x.square() * weights).sum(0)], [torch.ones_like(mean)], [torch.zeros_like(mean)]
        for width in range(1, LARGEST_CODE + 1):
            best = [torch.full_like(mean, torch.inf), torch.ones_like(mean), torch.zeros_like(mean)]
            for reached in RANGES[width - 1 : width - 1 + TRIED]:
                size = (reach.clamp_min(reached) * 2.0 ** (1 - width)).clamp_min(1 / FINEST)
                for shift in (torch.zeros_like(mean), sink - ((sink / size).floor() + 0.5) * size):
                    own = _error(x, weights, size, shift, width)
                    better = own < best[0]
                    best = [torch.where(better, a, b) for a, b in zip((own, size, shift), best, strict=True)]
            for each, part in zip((error, step, centre), best, strict=True):
                each.append(part)
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
        """Of a layer at its full rank, from what calibration kept of its inputs."""
        kv_a, b_kv_a = latent.kv_a[: latent.rank].float(), latent.b_kv_a[: latent.rank].float()
        samples, first = (x.float() @ kv_a.T + b_kv_a for x in (m.samples, m.first))
        return cls.of(samples, m.sample_weight, first, m.first_weight)

    def tensors(self) -> dict[str, Tensor]:
        """As safetensors can hold it; `Rates(**tensors)` is the same again."""
        return vars(self)


def _error(x_nR: Tensor, weight_n1: Tensor, step_R: Tensor, shift_R: Tensor, width: int) -> Tensor:
    """[R]: weighted squared error of rounding to the middles of 2^width steps about `shift_R`."""
    half = 2.0 ** (width - 1)
    codes = ((x_nR - shift_R) / step_R).floor_().clamp_(-half, half - 1).add_(0.5).mul_(step_R).add_(shift_R)
    return codes.sub_(x_nR).square_().mul_(weight_n1).sum(0)


def room(plan: Plan, bits: float) -> int:
    """Bits of a token for the latents of all converted layers, where `bits` is the mean over the numbers that GQA
    caches there. A rotary key has 8 bits a number, and a scale of 16 bits at an even place."""
    rotary = (plan.layers[i].qk_rope_head_dim for i in plan.converted)
    cached = sum(plan.spec.layers[i].cached for i in plan.converted)
    return int(bits * cached - sum(8 * n + 24 for n in rotary if n))


def allocate_bits(errors: Mapping[int, Tensor], total: int) -> dict[int, Tensor]:
    """Widths [R] int64 of every layer, `total` bits in sum or as many as are of use; a layer has a number at least.
    errors: Rates.error by layer."""
    sums = {i: error.view(len(error), -1, BLOCK).sum(-1).T.tolist() for i, error in errors.items()}
    widths = {i: [1] + [0] * (len(blocks) - 1) for i, blocks in sums.items()}

    def best(i: int, block: int) -> tuple[float, int, int, int]:
        """The step up the hull that saves most for each bit; -saved per bit, layer, block and the new width."""
        curve, now = sums[i][block], widths[i][block]
        saved, width = max(((curve[now] - curve[w]) / (w - now), w) for w in range(now + 1, len(curve)))
        return -saved / BLOCK, i, block, width

    queue = [best(i, block) for i, blocks in sums.items() for block in range(len(blocks))]
    heapq.heapify(queue)
    left = total - BLOCK * len(widths)
    while queue:
        saved, i, block, width = heapq.heappop(queue)
        bits = (width - widths[i][block]) * BLOCK
        if saved >= 0 or bits > left:
            continue
        left -= bits
        widths[i][block] = width
        if width < LARGEST_CODE:
            heapq.heappush(queue, best(i, block))
    return {i: torch.tensor(own).repeat_interleave(BLOCK) for i, own in widths.items()}


def counts(widths: Tensor) -> tuple[int, ...]:
    """How many numbers have at least 1, 2, ... bits."""
    return tuple(int((widths >= bit).sum()) for bit in range(1, int(widths.max()) + 1))


def lost(error: Tensor, widths: Tensor) -> float:
    """The predicted loss of these widths, nats per token; error: Rates.error."""
    return float(error.gather(0, widths[None]).sum()) / 2


def coded(latent: Latent, rates: Rates, widths: Tensor) -> Latent:
    """The full-rank latent in units of its code: the numbers that have bits alone, in falling order of bits.

    A number is then -half to half - 1, standing for itself and a half: latent = step * (number + 1/2) + centre.
    """
    kept = widths.argsort(descending=True, stable=True)[: int((widths > 0).sum())]
    bits = widths[kept]
    at = rates.order[kept]
    step = rates.step[bits, kept].to(latent.kv_a)
    centre = rates.centre[bits, kept].to(latent.kv_a)
    rank, rotary = latent.rank, len(latent.kv_a) - latent.rank
    turned = slice(rank, rank + rotary)
    up = latent.kv_b[:, at]
    return dataclasses.replace(
        latent,
        kv_a=torch.cat((latent.kv_a[at] / step[:, None], latent.kv_a[turned])),
        b_kv_a=torch.cat(((latent.b_kv_a[at] - centre) / step - 0.5, latent.b_kv_a[turned])),
        kv_b=up * step,
        # What is cut stands at its mean.
        centre=(latent.centre[at] - centre) / step - 0.5,
    )
