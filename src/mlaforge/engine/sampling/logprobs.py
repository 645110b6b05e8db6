"""Log probabilities of tokens that were drawn or read, and of the likeliest alternatives.

Legend: N rows (a token each), V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from mlaforge.runtime import on_device

# Most fp32 elements of log probabilities computed at once for a long prompt (256 MiB).
MAX_LOGPROBS = 2**26


@dataclasses.dataclass(frozen=True)
class Logprobs:
    """One position: its token, the token's natural log probability, and the likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs_of(
    logits_NV: Tensor, token_ids: Tensor | Sequence[int], counts: Sequence[int | None]
) -> list[Logprobs | None]:
    """Return natural log probabilities of the raw logits, in fp32, of one token per row and of its counts[n] likeliest
    tokens.

    None for a row whose count is None, NaN where a row's logits are not all finite. For a prompt, row n has the logits
    that precede token_ids[n].
    """
    logprobs: list[Logprobs | None] = [None] * len(counts)
    rows = [n for n, count in enumerate(counts) if count is not None]
    if not rows:
        return logprobs
    device, vocabulary = logits_NV.device, logits_NV.shape[1]
    ids_N = token_ids if isinstance(token_ids, Tensor) else on_device(list(token_ids), torch.int64, device)
    top_k = min(max(counts[n] or 0 for n in rows), vocabulary)
    step = max(1, MAX_LOGPROBS // vocabulary)
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step]
        index = on_device(chunk, torch.int64, device)
        logits_chunk_NV = logits_NV.index_select(0, index).float()
        # torch's log_softmax in fp32 is off by 1e-5 per token at 49,152 entries, always upwards: texts add that up.
        logprobs_NV = logits_chunk_NV - logits_chunk_NV.logsumexp(-1, keepdim=True)
        # NO_TOKEN is the token of a row that is not finite.
        token_N = ids_N.index_select(0, index).clamp_min(0)
        top = logprobs_NV.topk(top_k, dim=-1)
        token_logprob_N = logprobs_NV.gather(1, token_N[:, None])[:, 0]
        finite_N = logits_chunk_NV.sum(-1).abs() < torch.inf
        token_logprobs = torch.where(finite_N, token_logprob_N, torch.nan).tolist()
        columns = zip(chunk, token_N.tolist(), token_logprobs, top.indices.tolist(), top.values.tolist(), strict=True)
        for n, token, logprob, ids, values in columns:
            likeliest = list(zip(ids, values, strict=True))[: counts[n]]
            # Of equal ones topk returns any; the token itself must be among them.
            if likeliest and logprob >= likeliest[-1][1] and token not in dict(likeliest):
                likeliest[-1] = (token, logprob)
            likeliest.sort(key=lambda pair: (-pair[1], pair[0]))
            logprobs[n] = Logprobs(token, logprob, tuple(likeliest))
    return logprobs
