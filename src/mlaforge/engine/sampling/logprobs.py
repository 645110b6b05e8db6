"""Log probabilities of tokens that were drawn or read, with the likeliest beside them.

Legend: N rows (a token each), V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from mlaforge.runtime import on_device

# fp32 numbers that log probabilities of a long prompt may take at once (256 MiB).
LOGPROBS_AT_ONCE = 2**26


@dataclasses.dataclass(frozen=True)
class Logprobs:
    """One position: the token that stands there, its natural log probability, and the likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs_of(
    logits_NV: Tensor, token_ids: Tensor | Sequence[int], counts: Sequence[int | None]
) -> list[Logprobs | None]:
    """Natural log probabilities of the raw logits, in fp32, of one token per row and of its counts[n] likeliest.

    None for a row whose count is None, NaN where a row's logits are not all finite. Also right for a prompt: row n are
    the logits that precede token_ids[n].
    """
    logprobs: list[Logprobs | None] = [None] * len(counts)
    rows = [n for n, count in enumerate(counts) if count is not None]
    if not rows:
        return logprobs
    device, vocabulary = logits_NV.device, logits_NV.shape[1]
    ids_N = token_ids if isinstance(token_ids, Tensor) else on_device(list(token_ids), torch.int64, device)
    most = min(max(counts[n] or 0 for n in rows), vocabulary)
    step = max(1, LOGPROBS_AT_ONCE // vocabulary)
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step]
        index = on_device(chunk, torch.int64, device)
        logits_chunk_NV = logits_NV.index_select(0, index).float()
        # torch's log_softmax in fp32 is off by 1e-5 per token at 49,152 entries, always upwards: texts add that up.
        logprobs_NV = logits_chunk_NV - logits_chunk_NV.logsumexp(-1, keepdim=True)
        # NO_TOKEN is the token of a row that is not finite.
        own_N = ids_N.index_select(0, index).clamp_min(0)
        top = logprobs_NV.topk(most, dim=-1)
        own_logprobs_N = logprobs_NV.gather(1, own_N[:, None])[:, 0]
        finite_N = logits_chunk_NV.sum(-1).abs() < torch.inf
        own_logprobs = torch.where(finite_N, own_logprobs_N, torch.nan).tolist()
        columns = zip(chunk, own_N.tolist(), own_logprobs, top.indices.tolist(), top.values.tolist(), strict=True)
        for n, token, logprob, ids, values in columns:
            likeliest = list(zip(ids, values, strict=True))[: counts[n]]
            # Among equals topk picks any; the one that was chosen belongs among them.
            if likeliest and logprob >= likeliest[-1][1] and token not in dict(likeliest):
                likeliest[-1] = (token, logprob)
            likeliest.sort(key=lambda pair: (-pair[1], pair[0]))
            logprobs[n] = Logprobs(token, logprob, tuple(likeliest))
    return logprobs
