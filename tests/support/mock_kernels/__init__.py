"""Stand-ins for other libraries' kernels on CPU tensors: the exact signatures and checks of the version that each
module names, and attention in fp64. Written from the libraries' public interfaces."""

from __future__ import annotations

import importlib
import sys

import torch

# Name under which a library is imported -> its stand-in here.
MODULES = {
    "flash_mla": "flash_mla", "flashinfer": "flashinfer", "flashinfer.mla": "flashinfer_mla", "vllm": "vllm",
    "vllm.v1.attention.ops.triton_decode_attention": "vllm_decode",
    "vllm.v1.attention.ops.triton_unified_attention": "vllm_unified", "deep_gemm": "deep_gemm",
}  # fmt: skip


def install(monkeypatch) -> None:
    """Make the stand-ins importable under the libraries' names, and let adapters take CPU tensors."""
    from mlaforge.ops.external import library

    for name, module in MODULES.items():
        monkeypatch.setitem(sys.modules, name, importlib.import_module(f"{__name__}.{module}"))
    monkeypatch.setattr(library, "DEVICES", ("cuda", "cpu"))


def attention(q_THD, k_PGD, v_PGV, seen_TP, scale):
    """Attention of query tokens to some rows, in fp64: out [T, H, V], natural lse [T, H]; 0 and -inf where a token sees
    none. Rows that no token sees may be NaN."""
    H, G = q_THD.shape[1], k_PGD.shape[1]
    used_P = seen_TP.any(0)
    k, v = (x[used_P].double().repeat_interleave(H // G, dim=1) for x in (k_PGD, v_PGV))
    scores = torch.einsum("thd,phd->thp", q_THD.double(), k) * scale
    scores = scores.masked_fill(~seen_TP[:, None, used_P], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse.isinf(), 0)[..., None]).exp()
    return torch.einsum("thp,phv->thv", weights, v), lse


def causal(T, P, window=None):
    """Visibility of P rows for the last T of their tokens: bool [T, P]."""
    distance = torch.arange(P - T, P)[:, None] - torch.arange(P)
    return (distance >= 0) & (distance < (window or P + T))


def check(condition, message):
    """Raise as a library's own check does."""
    if not condition:
        raise RuntimeError(message)
