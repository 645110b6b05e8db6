"""What an adapter of a library's attention must know about a call of ops.paged_attention, and its interface."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor

from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.external.library import Library, needs_gpu
from mlaforge.ops.gpu_properties import capability_name, gpu_properties


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """A call of attention as far as kernels differ in what they support.

    latent       the value is the first part of the key (absorbed MLA); `rope` of the key's columns follow it
    dtype, rows  of the queries and of the cached rows
    page         tokens of a block; 1 for a selection
    window       None, or the tokens that a query sees
    lengths      whether the host knows the sequences' lengths; a captured step does not
    """

    heads: int
    kv_heads: int
    key: int
    value: int
    latent: bool
    dtype: torch.dtype
    rows: torch.dtype
    page: int
    capability: tuple[int, int]
    window: int | None = None
    tree: bool = False
    lengths: bool = True

    @property
    def rope(self) -> int:
        """Columns of a latent row after the latent."""
        return self.key - self.value

    @classmethod
    def of(cls, q_NHD: Tensor, k_LGD: Tensor, v_LGV: Tensor, view: CacheView) -> AttentionCase:
        """Describe the inputs of a call."""
        latent = k_LGD.shape[1] == 1 and (k_LGD.data_ptr(), k_LGD.stride()) == (v_LGV.data_ptr(), v_LGV.stride())
        return cls(
            q_NHD.shape[1], k_LGD.shape[1], k_LGD.shape[2], v_LGV.shape[2], latent, q_NHD.dtype, k_LGD.dtype,
            view.block_size, gpu_properties(q_NHD.device).capability, view.window, view.tree_Tn is not None,
            bool(view.lengths),
        )  # fmt: skip


HALVES = (torch.bfloat16, torch.float16)


def ampere_refusal(case: AttentionCase) -> str | None:
    """Return the reason why no kernel for Ampere and later GPUs, with 16-bit queries, supports the case, or None."""
    if case.capability < (8, 0):
        return f"it needs compute capability 8.0, this GPU has {capability_name(case.capability)}"
    if case.dtype not in HALVES:
        return f"queries must be bfloat16 or float16, they are {case.dtype}"
    return "its MLA has no sliding window" if case.latent and case.window is not None else None


class AttentionLibrary(abc.ABC):
    """An implementation of ops.paged_attention by a library. Sinks are applied to its result."""

    library: Library

    @abc.abstractmethod
    def refusal(self, case: AttentionCase) -> str | None:
        """Return the reason why the kernels do not compute a case, in one line, or None."""

    @abc.abstractmethod
    def attend(
        self, q_NHD: Tensor, k_LGD: Tensor, v_LGV: Tensor, view: CacheView, scale: float
    ) -> tuple[Tensor, Tensor]:
        """As ops.paged_attention without sinks, for inputs that are supported."""

    def supports(
        self, q_NHD: Tensor, k_LGD: Tensor, v_LGV: Tensor, view: CacheView, *others: Any
    ) -> Literal[True] | str:  # fmt: skip
        """Return True, or the reason why the library cannot compute these inputs here."""
        if reason := self.library.missing() or needs_gpu(q_NHD.device):
            return reason
        if q_NHD.stride(2) != 1 or k_LGD.stride(2) != 1 or v_LGV.stride(2) != 1:
            return "rows must be contiguous"
        case = AttentionCase.of(q_NHD, k_LGD, v_LGV, view)
        return self.refusal(case) or _view_refusal(case) or True


def _view_refusal(case: AttentionCase) -> str | None:
    """Return what no adapter computes of a view."""
    if case.tree:
        return "it does not compute trees"
    return None if case.lengths else "the host does not know the lengths of a captured step"


class PerView:
    """A value, such as a plan, that layers with the same view of the cache share."""

    def __init__(self) -> None:
        self.view: CacheView | None = None
        self.values: dict[Any, Any] = {}

    def get(self, view: CacheView, key: Any, make: Any) -> Any:
        """Return the value of `key` for a view, computed by `make` if it is not the last view's."""
        if self.view is not view:
            self.view, self.values = view, {}
        if key not in self.values:
            self.values[key] = make()
        return self.values[key]
