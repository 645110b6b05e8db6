"""From logits to tokens: bias, penalties, constraint, temperature, min-p, top-k, top-p, and the draw.

Formulas and order are vLLM's. Every filter is a threshold, and keeps the tokens that are as likely as the last one:
which tokens survive does not depend on a sorting order. A draw takes one random number of the row's generator, so that
the tokens of a request do not depend on the other requests of its batch.

The host waits for the device only in `logprobs_of`, for rows with log probabilities.

Legend: N rows (a token to draw each), V vocabulary, K the likeliest tokens of a row in falling order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from mlaforge.engine.sampling.logprobs import Logprobs, logprobs_of
from mlaforge.engine.sampling.state import SamplingState
from mlaforge.runtime import on_device

# The token of a row whose logits are not all finite.
NO_TOKEN = -1
# On a CPU top-p first tries this many of the likeliest tokens: sorting all of them takes ten times as long.
TOP_P_WIDTHS = (128, 2048)


@dataclasses.dataclass
class Sampled:
    """One token per row, or NO_TOKEN: int64 [N] on the logits' device. `logprobs` reads the logits when it is
    called."""

    token_ids: Tensor
    _logits_NV: Tensor
    _counts: list[int | None]

    def logprobs(self) -> list[Logprobs | None]:
        """Return per row what its parameters request; None where they request nothing. Waits for the device if any row
        does."""
        return logprobs_of(self._logits_NV, self.token_ids, self._counts)


def _penalise(logits_NV: Tensor, states: Sequence[SamplingState]) -> None:
    """In place: repetition penalty over prompt and output, then frequency and presence over the output."""
    seen = [(n, state.params, state.seen) for n, state in enumerate(states) if state.seen is not None]
    if not seen:
        return
    index = on_device([n for n, _, _ in seen], torch.int64, logits_NV.device)
    factors = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for _, p, _ in seen]
    factors_N3 = on_device([f for row in factors for f in row], torch.float32, logits_NV.device).view(-1, 3)
    repetition_N1, frequency_N1, presence_N1 = factors_N3.split(1, dim=1)
    counts_NV = torch.stack([tokens.counts_V for _, _, tokens in seen])
    generated_NV = counts_NV > 0
    anywhere_NV = torch.stack([tokens.in_prompt_V for _, _, tokens in seen]) | generated_NV
    part_NV = logits_NV.index_select(0, index)
    repeated_NV = torch.where(part_NV > 0, part_NV / repetition_N1, part_NV * repetition_N1)
    part_NV = torch.where(anywhere_NV, repeated_NV, part_NV)
    part_NV -= frequency_N1 * counts_NV + presence_N1 * generated_NV
    logits_NV.index_copy_(0, index, part_NV)


def _constrain(logits_NV: Tensor, states: Sequence[SamplingState]) -> None:
    """In place: -inf for tokens that a grammar forbids, and for ends of text before min_tokens."""
    for n, state in enumerate(states):
        if state.constraint is None and state.too_short and state.stop_ids is not None:
            logits_NV[n].index_fill_(0, state.stop_ids, -torch.inf)
    allowed = {n: mask_V for n, state in enumerate(states) if (mask_V := state.allowed()) is not None}
    if not allowed:
        return
    index = on_device(list(allowed), torch.int64, logits_NV.device)
    mask_NV = torch.stack(list(allowed.values()))
    if logits_NV.is_cuda:
        mask_NV = mask_NV.pin_memory()
    mask_NV = mask_NV.to(logits_NV.device, non_blocking=True)
    part_NV = logits_NV.index_select(0, index)
    logits_NV.index_copy_(0, index, part_NV.masked_fill_(~mask_NV, -torch.inf))


def _top_p(logits_NV: Tensor, top_p_N1: Tensor) -> Tensor:
    """The logits with -inf for tokens less likely than the last one that has less than top_p before it."""
    probabilities_NV = logits_NV.softmax(-1)
    vocabulary = logits_NV.shape[1]
    widths = TOP_P_WIDTHS if logits_NV.device.type == "cpu" else ()
    threshold_N1 = torch.empty_like(probabilities_NV[:, :1])
    # Rows that do not reach top_p within a width are computed again with the next one.
    remaining, rows_NV = torch.arange(len(logits_NV), device=logits_NV.device), probabilities_NV
    for width in (*(width for width in widths if width < vocabulary), vocabulary):
        if width < vocabulary:
            likeliest_NK = rows_NV.topk(width, dim=-1).values
        else:
            likeliest_NK = rows_NV.sort(dim=-1, descending=True).values
        before_NK = likeliest_NK.cumsum(-1).roll(1, -1)
        before_NK[:, 0] = 0
        inside_NK = before_NK < top_p_N1[remaining]
        last_N1 = inside_NK.sum(-1, keepdim=True) - 1
        threshold_N1.index_copy_(0, remaining, likeliest_NK.gather(1, last_N1))
        # On a GPU this test would wait for the device; there is only one width.
        if width == vocabulary or not len(remaining := remaining[inside_NK[:, -1]]):
            break
        rows_NV = probabilities_NV[remaining]
    return logits_NV.masked_fill(probabilities_NV < threshold_N1, -torch.inf)


def _filter(logits_NV: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """The logits with -inf for the tokens that min-p, then top-k, then top-p remove."""
    device, vocabulary = logits_NV.device, logits_NV.shape[1]
    params = [state.params for state in states]
    if any(p.min_p for p in params):
        # log(0) is -inf: no threshold.
        min_p_N1 = on_device([p.min_p for p in params], torch.float32, device)[:, None]
        floor_N1 = logits_NV.amax(-1, keepdim=True) + min_p_N1.log()
        logits_NV = logits_NV.masked_fill(logits_NV < floor_N1, -torch.inf)
    if rows := [n for n, p in enumerate(params) if 0 < p.top_k < vocabulary]:
        index = on_device(rows, torch.int64, device)
        last = [params[n].top_k - 1 for n in rows]
        part_NV = logits_NV.index_select(0, index)
        likeliest_NK = part_NV.topk(max(last) + 1, dim=-1).values
        kth_N1 = likeliest_NK.gather(1, on_device(last, torch.int64, device)[:, None])
        logits_NV = logits_NV.index_copy(0, index, part_NV.masked_fill_(part_NV < kth_N1, -torch.inf))
    if rows := [n for n, p in enumerate(params) if p.top_p < 1]:
        index = on_device(rows, torch.int64, device)
        top_p_N1 = on_device([params[n].top_p for n in rows], torch.float32, device)[:, None]
        logits_NV = logits_NV.index_copy(0, index, _top_p(logits_NV.index_select(0, index), top_p_N1))
    return logits_NV


def _distribution(adjusted_NV: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """Distributions of rows that are not greedy; overwrites the logits."""
    temperatures = on_device([state.params.temperature for state in states], torch.float32, adjusted_NV.device)
    return _filter(adjusted_NV.div_(temperatures[:, None]), states).softmax(-1)


def _draw(probabilities_NV: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """int64 [N]: token v with probability p_v, the first whose cumulated probability exceeds a uniform number."""
    # In fp64: the rounding errors of fp32 sums exceed the probabilities of many tokens.
    sums_NV = probabilities_NV.double().cumsum_(-1)
    uniform_N1 = torch.empty_like(sums_NV[:, :1])
    unseeded = [state for state in states if state.params.seed is None]
    if unseeded:
        # Rows without a seed may share one stream of random numbers.
        uniform_N1.uniform_(generator=unseeded[0].generator)
    for n, state in enumerate(states):
        if state.params.seed is not None:
            uniform_N1[n].uniform_(generator=state.generator)
    # The sum need not be 1. The scaled number is below it, except where it is NaN.
    token_ids = torch.searchsorted(sums_NV, uniform_N1 * sums_NV[:, -1:], right=True)[:, 0]
    return token_ids.clamp_(max=probabilities_NV.shape[1] - 1)


def rejection_sampled(
    p_NV: Tensor, states: Sequence[SamplingState], drafted: Sequence[tuple[int, Tensor] | None]
) -> Tensor:
    """Return a token of each row's distribution p, int64 [N]. Where `drafted` has a token and the q [V] that it was
    drawn from, accept it with probability min(1, p / q), else draw from max(0, p - q) (lossless rejection, Leviathan et
    al. 2023). Where q is NaN, draw from p."""
    accepted: dict[int, int] = {}
    p_NV = p_NV.clone()
    for n, (state, draft) in enumerate(zip(states, drafted, strict=True)):
        if draft is None:
            continue
        token, q_V = draft
        uniform = torch.rand((), generator=state.generator, dtype=torch.float64, device=p_NV.device)
        # One transfer, because each one waits for the device.
        accept, finite = torch.stack((uniform * q_V[token] < p_NV[n, token], q_V[token].isfinite())).tolist()
        if accept:
            accepted[n] = token
        if accept or not finite:
            continue
        residual_V = (p_NV[n] - q_V).clamp_min_(0)
        # The residual is empty where p and q are equal but for rounding.
        if bool(residual_V.any()):
            p_NV[n] = residual_V / residual_V.sum()
    token_ids = _draw(p_NV, states)
    for n, token in accepted.items():
        token_ids[n] = token
    return token_ids


def likeliest(logits_NV: Tensor) -> Tensor:
    """Return each row's largest logit, of equal ones the lowest id: int64 [N]. torch's argmax promises the same but
    takes three to five times as long on a CPU."""
    return logits_NV.max(-1).indices


def checked(token_ids_N: Tensor, logits_NV: Tensor) -> Tensor:
    """Return the tokens that were sampled from these raw logits, NO_TOKEN where a row has NaN or infinity: int64 [N]. A
    reader of the tokens needs no second wait for the device."""
    # One pass: a sum is finite where all its terms are. NaN compares false.
    return torch.where(logits_NV.sum(-1, dtype=torch.float32).abs() < torch.inf, token_ids_N, NO_TOKEN)


class Sampler:
    """Draws one token per row, NO_TOKEN where the row's logits are not finite. Row n belongs to states[n]. Has no state
    of its own."""

    def __call__(
        self, logits_NV: Tensor, states: Sequence[SamplingState],
        drafted: Sequence[tuple[int, Tensor] | None] = (),
    ) -> Sampled:  # fmt: skip
        """Greedy rows get the argmax, of equal logits the lowest id. `logits_NV` may have any float dtype and is not
        changed.

        `drafted`: for each row a token that was drawn from q [V] for its place, or None. It is accepted with
        probability min(1, p / q); either way the row's token has the distribution p.
        """
        counts = [state.params.logprobs for state in states]
        if any(drafted):
            token_ids = rejection_sampled(self.probabilities(logits_NV, states), states, drafted)
        elif all(state.plain for state in states):
            token_ids = likeliest(logits_NV)
        else:
            token_ids = self._sample(logits_NV, states)
        return Sampled(checked(token_ids, logits_NV), logits_NV, counts)

    def _sample(self, logits_NV: Tensor, states: Sequence[SamplingState]) -> Tensor:
        """int64 [N], without drafts."""
        adjusted_NV = self.adjust(logits_NV, states)
        rows = [n for n, state in enumerate(states) if not state.params.greedy]
        drawing = [states[n] for n in rows]
        if len(rows) == len(states):
            return _draw(_distribution(adjusted_NV, drawing), drawing)
        token_ids = likeliest(adjusted_NV)
        if rows:
            index = on_device(rows, torch.int64, logits_NV.device)
            distribution_NV = _distribution(adjusted_NV.index_select(0, index), drawing)
            token_ids.index_copy_(0, index, _draw(distribution_NV, drawing))
        return token_ids

    def adjust(self, logits_NV: Tensor, states: Sequence[SamplingState]) -> Tensor:
        """Return a copy, fp32 [N, V]: after bias, penalties, min_tokens and constraint, before temperature."""
        assert len(states) == logits_NV.shape[0], (len(states), logits_NV.shape)
        adjusted_NV = logits_NV.to(torch.float32, copy=True)
        for n, state in enumerate(states):
            if state.bias is not None:
                adjusted_NV[n].index_add_(0, *state.bias)
        _penalise(adjusted_NV, states)
        _constrain(adjusted_NV, states)
        return adjusted_NV

    def probabilities(self, logits_NV: Tensor, states: Sequence[SamplingState]) -> Tensor:
        """Return the distribution of each row's token, fp32 [N, V]; for a greedy row all of it on one token."""
        adjusted_NV = self.adjust(logits_NV, states)
        rows = [n for n, state in enumerate(states) if not state.params.greedy]
        if len(rows) == len(states):
            return _distribution(adjusted_NV, states)
        probabilities_NV = torch.zeros_like(adjusted_NV).scatter_(1, likeliest(adjusted_NV)[:, None], 1.0)
        if rows:
            index = on_device(rows, torch.int64, logits_NV.device)
            drawing = [states[n] for n in rows]
            probabilities_NV.index_copy_(0, index, _distribution(adjusted_NV.index_select(0, index), drawing))
        return probabilities_NV
