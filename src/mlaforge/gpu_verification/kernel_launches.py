"""Launches of every Triton kernel with real shapes, for compilation without a run: name -> GPU -> KernelLaunch.

Every kernel in ops/ needs entries here with the shapes that models use; a test compares this table with ops/. No memory
of the real sizes is allocated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from mlaforge.engine.execution.bucket import QUERIES
from mlaforge.ops import absorbed_latents_triton as latents
from mlaforge.ops import coded_rows_triton as coded
from mlaforge.ops import elementwise_triton as elementwise
from mlaforge.ops import index_projection_triton as projection
from mlaforge.ops import integer_rows_triton as integers
from mlaforge.ops import latent_attention_gpu as latent
from mlaforge.ops import latent_attention_triton as latent_kernels
from mlaforge.ops import mxfp4_experts_triton as experts
from mlaforge.ops import paged_attention_triton as attention
from mlaforge.ops import rope_and_store_triton as rope
from mlaforge.ops import token_selection_triton as selection
from mlaforge.ops import vector_product_triton as vector
from mlaforge.ops.absorbed_latents import AbsorbedWeights
from mlaforge.ops.cache_view import CacheView
from mlaforge.ops.gpu_properties import GpuProperties
from mlaforge.ops.integer_rows import integer_columns
from mlaforge.ops.latent_weights_gpu import GpuLatentWeights
from mlaforge.ops.paged_rows import PagedRows
from mlaforge.ops.row_formats.coded import Coded
from mlaforge.ops.row_formats.int8 import Int8
from mlaforge.ops.row_formats.plain import Plain
from mlaforge.ops.token_selection import TokenIndex

# Maximum spilled bytes per thread, of planning/kernel_loops.json: a few are harmless. Values of more than 256 elements
# and tiles of 64 or more pairs of experts spill more. The rotation of keys spills behind the loop.
SPILLED, SPILLED_WIDE, SPILLED_PAIRS, SPILLED_LATENT = 96, 720, 240, 1800


@dataclasses.dataclass(frozen=True)
class KernelLaunch:
    """A kernel, its arguments by name (tensors of any size, dtypes and strides as launched) and compiler options. tile:
    of the product, outputs x rows. spilled: maximum spilled bytes per thread."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]
    tile: tuple[int, int] | None = None
    spilled: int = SPILLED


# Name -> query heads, key heads, key width, value width (negative: the value is the key's first part), query tokens.
ATTENTION = {
    "gqa-64": (64, 8, 64, 64, 1),
    "gqa-64-verify": (64, 8, 64, 64, 4),
    "gqa-64-prefill": (64, 8, 64, 64, 2048),
    "gqa-64-mixed": (64, 8, 64, 64, 2048),
    "gqa-64-tree": (64, 8, 64, 64, 17),
    "gqa-96": (32, 32, 96, 96, 1),
    "gqa-128": (64, 8, 128, 128, 1),
    "gqa-128, 32 heads": (32, 8, 128, 128, 1),
    "gqa-128, 28 heads": (28, 4, 128, 128, 1),
    "gqa-128-prefill": (64, 8, 128, 128, 2048),
    "mla-512-64": (64, 1, 576, -512, 1),
    "mla-512-64-verify": (64, 1, 576, -512, 4),
    "mla-512-64-prefill": (64, 1, 576, -512, 2048),
    "mla-512-64-tree": (64, 1, 576, -512, 17),
    "mla-256-64": (64, 1, 320, -256, 1),
    "mla-320-32": (64, 1, 352, -320, 1),
    "mla-384-64": (64, 1, 448, -384, 1),
    "mla-360-64": (64, 1, 424, -360, 1),
    "mla-small": (9, 1, 224, -192, 1),
}
# Experts, experts per token, hidden size, intermediate size.
EXPERTS = {"20b": (32, 4, 2880, 2880), "120b": (128, 4, 2880, 2880), "small": (4, 2, 576, 1536)}
FP8 = ("gqa-64", "gqa-64-verify", "gqa-128-prefill", "mla-512-64", "mla-small")


def attend_launch(name: str, dtype: torch.dtype, rows: torch.dtype, gpu: GpuProperties) -> attention.Launch:
    """Launch of attention with a shape of ATTENTION. dtype: of the queries; rows: of the cached rows."""
    H, G, D, V, T = ATTENTION[name]
    k = torch.empty(32, G, D, dtype=rows)
    v = k[..., :-V] if V < 0 else torch.empty(32, G, V, dtype=rows)
    S = 8
    # Mixed: the prompt of one sequence, and decoding of the others.
    N = S + T - 1 if name.endswith("mixed") else S * T
    zeros = torch.zeros(S + 1, dtype=torch.int32)
    table = torch.zeros(S, 512, dtype=torch.int32)
    tree = torch.zeros(T, T, dtype=torch.int32) if name.endswith("tree") else None
    S = 1 if tree is not None else S
    view = CacheView(
        table[:S], zeros[:S], zeros[:S], zeros[: S + 1], zeros.long(), 16, T, 8192, lengths=(8192,) * S, tree_Tn=tree
    )  # fmt: skip
    q = torch.empty(N, H, D, dtype=dtype)
    sinks = torch.empty(H, dtype=dtype) if name.startswith("gqa-64") else None
    return attention.make_launch(q, k, v, view, 0.1, gpu=gpu, sinks_H=sinks)


def attend(name: str, dtype: torch.dtype, rows: torch.dtype, gpu: GpuProperties) -> KernelLaunch:
    """Attention kernel with a shape of ATTENTION."""
    launch = attend_launch(name, dtype, rows, gpu)
    tile = launch.arguments["BLOCK_M"], launch.arguments["BLOCK_N"]
    # The masks of a tree need more registers.
    spilled = (SPILLED_WIDE if abs(ATTENTION[name][3]) > 256 else SPILLED) * (1 + name.endswith("tree"))
    return KernelLaunch(attention.attend_kernel, launch.arguments, launch.options, tile, spilled)


def attend_int8(name: str, gpu: GpuProperties) -> KernelLaunch:
    """Attention kernel over int8 rows with a shape of ATTENTION."""
    H, G, D, _, T = ATTENTION[name]
    rows = PagedRows.empty(Int8((D,) * 2 * G), 32, torch.bfloat16, torch.device("cpu"))
    zeros = torch.zeros(9, dtype=torch.int32)
    view = CacheView(
        torch.zeros(8, 512, dtype=torch.int32), zeros[:8], zeros[:8], zeros, zeros.long(), 16, T, 8192,
        lengths=(8192,) * 8,
    )  # fmt: skip
    launch = attention.int8_launch(torch.empty(8 * T, H, D, dtype=torch.bfloat16), rows, view, 0.1, None, gpu)
    tile = launch.arguments["BLOCK_M"], launch.arguments["BLOCK_N"]
    return KernelLaunch(attention.attend_kernel, launch.arguments, launch.options, tile)


def merge(name: str, gpu: GpuProperties) -> KernelLaunch:
    """Merge of the splits of a shape of ATTENTION."""
    bf16 = torch.bfloat16
    return KernelLaunch(
        attention.merge_kernel, attention.merge_launch(attend_launch(name, bf16, bf16, gpu))[1], {"num_warps": 4}
    )


def select(kernel: str, gpu: GpuProperties) -> KernelLaunch:
    """Kernel `write`, `query`, `lse`, `score` or `select` of an index of width 64, 64 heads and 8 KV heads of 64."""
    S, H, W, L, E = 8, 64, 64, 8192, 64
    zeros = torch.zeros(S, dtype=torch.int32)
    key, query = torch.zeros(W, 8 * E), torch.zeros(8, W, E)
    index = TokenIndex(key, key[:, 0].clone(), query, torch.zeros(W // 2, dtype=torch.int64), H, sink=4, window=128)
    q, rotation = torch.zeros(S, H * E, dtype=torch.bfloat16), torch.zeros(S, 1, E // 2, dtype=torch.complex64)
    keys = torch.zeros(512, 16, W, dtype=torch.int8).transpose(1, 2)
    if kernel == "write":
        _, arguments = projection.write_launch(q[:, : 8 * E], index, rotation, keys, zeros.long())
        return KernelLaunch(projection.write_kernel, arguments, {"num_warps": 4})
    view = CacheView(torch.zeros(S, 512, dtype=torch.int32), zeros, zeros, zeros, zeros.long(), 16, 1, L)
    if kernel == "query":
        return KernelLaunch(
            projection.query_kernel, projection.query_launch(q, index, rotation, view)[1], {"num_warps": 4}
        )  # fmt: skip
    if kernel == "select":
        arguments = selection.select_launch(torch.zeros(S, L), (1024,) * S, view, 1024)
        # With Triton 3.6; none with 3.9.
        return KernelLaunch(selection.select_kernel, arguments, {"num_warps": 16}, None, 2 * SPILLED)
    _, arguments = selection.launches(keys, torch.zeros(S, 2, H, W, dtype=torch.float16), torch.zeros(S, H), view, gpu)
    out = torch.zeros(S, L)
    if kernel == "lse":
        return KernelLaunch(selection.lse_kernel, arguments | {"out": out}, {})
    lse = torch.zeros(S, 32, H)
    outputs = {
        "lse": lse, "sinks": lse[0, 0], "out": out, "width": L, "sink": 4, "window": 128, "stride": 0, "SINKS": True,
    }  # fmt: skip
    # Without wgmma the three parts of the product exceed the registers.
    return KernelLaunch(selection.score_kernel, arguments | outputs, {}, None, SPILLED if gpu.asynchronous else 600)


def mix(shape: str, part: str, dtype: torch.dtype, gpu: GpuProperties, N: int = 8) -> KernelLaunch:
    """Kernel `gate`, `down` or `sum` with a shape of EXPERTS and N tokens; weights are meta tensors."""
    E, K, C, I = EXPERTS[shape]  # noqa: E741
    if part == "sum":
        out = torch.empty(16, dtype=dtype)
        arguments = {
            "parts": torch.empty(16),
            "weights": out,
            "out": out,
            "K": K,
            "C": C,
            "SUM_BLOCK": experts.SUM_BLOCK,
        }
        return KernelLaunch(experts.sum_kernel, arguments, {"num_warps": 4})
    inputs, outputs, gated = (C, I, True) if part == "gate" else (I, C, False)
    with torch.device("meta"):
        blocks = torch.empty(E, outputs * (1 + gated), inputs // 32, 16, dtype=torch.uint8)
        x = torch.empty(N if gated else N * K, inputs, dtype=dtype)
        out = torch.empty(N * K, outputs, dtype=dtype if gated else torch.float32)
        order, offsets = torch.empty(N * K, dtype=torch.int64), torch.empty(E + 1, dtype=torch.int32)
        bias = torch.empty(E, blocks.shape[1], dtype=dtype)
    launch = experts.make_launch(x, order, offsets, blocks, blocks[..., 0], bias, out, K, 1.702, 7.0, gated, gpu)
    tile = launch.arguments["BLOCK_O"], launch.arguments["BLOCK_M"]
    spilled = SPILLED_PAIRS if launch.arguments["BLOCK_M"] >= 64 else SPILLED
    return KernelLaunch(experts.product_kernel, launch.arguments, launch.options, tile, spilled)


def norm(width: int, gpu: GpuProperties) -> KernelLaunch:
    """Norm of a sum."""
    x = torch.empty(1, width, dtype=torch.bfloat16)
    _, arguments, options = elementwise.norm_launch(x, x, x[0], 1e-5)
    return KernelLaunch(elementwise.add_rms_norm_kernel, arguments, options)


def gate(gpu: GpuProperties) -> KernelLaunch:
    """Gate of an MLP."""
    x = torch.empty(1, 2 * 14336, dtype=torch.bfloat16)
    arguments = {"gate_up": x, "out": x.clone(), "WIDTH": 14336, "GATE_BLOCK": elementwise.GATE_BLOCK}
    return KernelLaunch(elementwise.silu_mul_kernel, arguments, {"num_warps": 4})


def rope_and_store(H: int, G: int, D: int, norms: bool, cached: torch.dtype, gpu: GpuProperties) -> KernelLaunch:
    """Norm, rotation and the write to the cache of grouped-query attention."""
    qkv, slots = torch.empty(1, (H + 2 * G) * D, dtype=torch.bfloat16), torch.empty(1, dtype=torch.int64)
    rotation = torch.empty(1, 1, D // 2, dtype=torch.complex64)
    weights = (qkv[0, :D], qkv[0, :D], 1e-5) if norms else None
    rows = _rows(2 * G * D, cached)
    _, arguments = rope.make_launch(qkv, rotation, rows, slots, H + G, D, weights)
    return KernelLaunch(rope.rope_and_store_kernel, arguments, {"num_warps": 4})


def absorbed(part: str, N: int, gpu: GpuProperties) -> KernelLaunch:
    """Kernel `absorb` or `up-project` of 64 heads, 8 KV heads of 64, rank 512 and 64 rotary elements, for N tokens."""
    H, G, D, R, E = 64, 8, 64, 512, 64
    x = torch.empty(N, H * (D + E) + R + E, dtype=torch.bfloat16)
    w_uk, w_uv = torch.empty(G, 2 * D, R, dtype=torch.bfloat16).split(D, dim=1)
    bias, sinks, index = torch.empty(G, D, dtype=torch.bfloat16), x[0, :H], torch.empty(E // 2, dtype=torch.int64)
    weights = AbsorbedWeights(w_uk, w_uv, bias, bias, sinks, index)
    if part == "absorb":
        rotation, slots = torch.empty(N, 1, D // 2, dtype=torch.complex64), torch.empty(N, dtype=torch.int64)
        _, arguments = latents.absorb_launch(x, rotation, weights, _rows(R + E, torch.bfloat16), slots, 0.1)
        return KernelLaunch(latents.absorb_kernel, arguments, {"num_warps": 4})
    lse = torch.empty(N, H)
    _, arguments = latents.up_project_launch(
        torch.empty(N, H, R, dtype=torch.bfloat16), lse, lse, w_uv, bias, sinks, torch.bfloat16
    )
    return KernelLaunch(latents.up_project_kernel, arguments, {"num_warps": 4})


def unpack(counts: tuple[int, ...], rope_dim: int, gpu: GpuProperties) -> KernelLaunch:
    """Unpacking of coded rows."""
    format, units = Coded(counts, rope_dim), torch.empty(1, dtype=torch.int64)
    rows = torch.empty(1, format.unit_bytes, dtype=torch.uint8)
    return KernelLaunch(coded.unpack_kernel, coded.make_launch(rows, format, units)[1], {"num_warps": 4})


CODED_832 = (832, 832, 832, 640, 448, 256, 128, 96, 32)


@dataclasses.dataclass(frozen=True)
class LatentShape:
    """Latent attention of S sequences of T tokens that read P rows each. code: counts of coded rows, or the rank of
    plain ones in `stored`. selected: the rows are a selection."""

    heads: int
    kv_heads: int
    head_dim: int
    code: tuple[int, ...] | int
    stored: str = "bfloat16"
    T: int = 1
    S: int = 8
    P: int = 32768
    selected: bool = False

    @property
    def format(self) -> Plain | Coded:
        return Plain(self.code, self.stored) if isinstance(self.code, int) else Coded(self.code)

    def launches(self, gpu: GpuProperties) -> latent.Launches:
        """The launches that ops/ chooses; tensors of the real sizes are meta tensors."""
        H, G, D, S, P, T = self.heads, self.kv_heads, self.head_dim, self.S, self.P, self.T
        bf16 = torch.bfloat16
        with torch.device("meta"):
            columns, format = None, self.format
            weight = value = torch.empty(G, D, format.width, dtype=bf16)
            if isinstance(format, Coded):
                columns = integer_columns(format.counts)
                weight = torch.empty(G, D, columns.width, dtype=torch.int8)
                value = weight.half()
            bias = torch.empty(G, D)
            weights = GpuLatentWeights(weight, value, bias, bias, bias, bias, None, None, None, 0.0, bias, columns)
            rows = PagedRows(format, format.empty(64, torch.device("meta")), bf16)
            zeros = torch.zeros(S + 1, dtype=torch.int32)
            view = CacheView(
                torch.zeros(S, P, dtype=torch.int32), zeros[:S], zeros[:S], zeros, zeros.long(),
                1 if self.selected else 16, T, P, queries=(T,) * S,
                positions_SK=torch.zeros(S, P, dtype=torch.int32) if self.selected else None,
                tree_Tn=torch.zeros(T, T, dtype=torch.int32) if QUERIES[-1] < T else None,
            )  # fmt: skip
            q = torch.empty(S * T, H * D + format.width, dtype=bf16)
            results = torch.empty(S * T, H, weight.shape[2], dtype=value.dtype), torch.empty(S * T, H)
            tables = torch.empty(P, D // 2), torch.empty(P, D // 2)
            return latent.make_launches(q, tables, weights, rows, view, slice(0, S), results, 0.1, gpu)


LATENT = {
    "latent 832": LatentShape(64, 8, 64, 832),
    "latent 832 fp8 rows": LatentShape(64, 8, 64, 832, "float8_e4m3fn"),
    "latent coded": LatentShape(64, 8, 64, CODED_832),
    "latent coded verify": LatentShape(64, 8, 64, CODED_832, T=4),
    "latent coded tree": LatentShape(64, 8, 64, CODED_832, T=17, S=1),
    "latent coded sparse": LatentShape(64, 8, 64, CODED_832, S=64, P=1024, selected=True),
    "latent coded sparse, 8 sequences": LatentShape(64, 8, 64, CODED_832, S=8, P=1024, selected=True),
    "latent coded sparse, 1 sequence": LatentShape(64, 8, 64, CODED_832, S=1, P=1024, selected=True),
    "latent coded 128": LatentShape(32, 8, 128, (1024, 1024, 1024, 1024, 512, 256, 128)),
    "latent small": LatentShape(9, 3, 64, 192, P=8192),
}


def latent_part(name: str, part: str, gpu: GpuProperties) -> KernelLaunch:
    """Kernel `integers`, `logits` or `sum` with a shape of LATENT."""
    launches = LATENT[name].launches(gpu)
    if part == "integers":
        assert launches.integers is not None
        return KernelLaunch(integers.integers_kernel, launches.integers[1], {"num_warps": 4})
    kernel, launch = (
        (latent_kernels.logits_kernel, launches.logits) if part == "logits"
        else (latent_kernels.latent_sum_kernel, launches.sum)
    )  # fmt: skip
    return KernelLaunch(kernel, launch[1], launch[2], None, SPILLED_LATENT if part == "logits" else SPILLED)


def pack(counts: tuple[int, ...], gpu: GpuProperties) -> KernelLaunch:
    """Writing of coded rows."""
    format, units = Coded(counts), torch.empty(1, dtype=torch.int64)
    rows = torch.empty(1, format.unit_bytes, dtype=torch.uint8)
    x = torch.empty(1, counts[0], dtype=torch.bfloat16)
    return KernelLaunch(coded.pack_kernel, coded.pack_launch(x, format, rows, units)[1], {"num_warps": 4})


def routing(shape: str, N: int, gpu: GpuProperties) -> KernelLaunch:
    """Routing of N tokens with a shape of EXPERTS."""
    E, K, *_ = EXPERTS[shape]
    return KernelLaunch(experts.route_kernel, *experts.route_launch(torch.empty(N, E, dtype=torch.bfloat16), K))


def few_rows(splits: int, outputs: int, part: str, gpu: GpuProperties) -> KernelLaunch:
    """Kernel `product` or `sum` of 4 rows times weights [5120, 2880], by tiles of so many outputs."""
    with torch.device("meta"):
        x, weight = torch.empty(4, 2880, dtype=torch.bfloat16), torch.empty(5120, 2880, dtype=torch.bfloat16)
        launch = vector.make_launch(x, weight, weight[:, 0], False, {"splits": splits, "BLOCK_O": outputs})
    if part == "sum":
        assert launch.sum is not None
        return KernelLaunch(vector.split_sum_kernel, launch.sum[1], {"num_warps": 4})
    return KernelLaunch(vector.vector_product_kernel, launch.arguments, launch.options, (outputs, 16))


def _rows(width: int, cached: torch.dtype) -> PagedRows:
    format = Plain(width, str(cached).removeprefix("torch."))
    return PagedRows.empty(format, 16, torch.bfloat16, torch.device("cpu"))


def _launches() -> dict[str, Callable[[GpuProperties], KernelLaunch]]:
    bf16, fp16, fp32, fp8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
    table: dict[str, Callable[[GpuProperties], KernelLaunch]] = {}
    for name in ATTENTION:
        table[name] = functools.partial(attend, name, bf16, bf16)
    for name in FP8:
        table[f"{name} fp8 rows"] = functools.partial(attend, name, bf16, fp8)
    table["gqa-128 fp16"] = functools.partial(attend, "gqa-128", fp16, fp16)
    for name in ("gqa-128", "mla-512-64"):
        table[f"{name} fp32"] = functools.partial(attend, name, fp32, fp32)
    for name in ("gqa-64", "gqa-128", "mla-512-64"):
        table[f"merge {name}"] = functools.partial(merge, name)
    table |= {
        "norm 2880": functools.partial(norm, 2880), "gate 14336": gate,
        "rope and store": functools.partial(rope_and_store, 64, 8, 64, False, bf16),
        "rope and store fp8": functools.partial(rope_and_store, 64, 8, 64, False, fp8),
        "rope and store, norms": functools.partial(rope_and_store, 28, 4, 128, True, bf16),
        "routing 20b": functools.partial(routing, "20b", 8), "routing 120b": functools.partial(routing, "120b", 64),
    }  # fmt: skip
    table["unpack coded rows"] = functools.partial(unpack, (512, 512, 512, 448, 256, 128, 64, 32), 0)
    table["unpack coded rows, rotary"] = functools.partial(unpack, (448, 448, 320, 192, 64), 64)
    table["pack coded rows"] = functools.partial(pack, CODED_832)
    table["gqa-64 int8 rows"] = functools.partial(attend_int8, "gqa-64")
    for name, latent_shape in LATENT.items():
        for kernel in ("logits", "sum", *(() if isinstance(latent_shape.code, int) else ("integers",))):
            table[f"{name} {kernel}"] = functools.partial(latent_part, name, kernel)
    for tokens in (1, 64):
        table[f"absorb 512-64, {tokens} tokens"] = functools.partial(absorbed, "absorb", tokens)
        table[f"up-project 512, {tokens} tokens"] = functools.partial(absorbed, "up-project", tokens)
    for kernel in ("write", "query", "lse", "score", "select"):
        table[f"selection {kernel}"] = functools.partial(select, kernel)
    for shape, part in (("20b", "gate"), ("20b", "down"), ("20b", "sum"), ("120b", "gate"), ("small", "down")):
        table[f"experts {shape} {part}"] = functools.partial(mix, shape, part, bf16)
    for shape, N in (("20b", 1), ("120b", 1), ("20b", 512), ("20b", 2048), ("120b", 2048)):
        table[f"experts {shape} gate, {N} tokens"] = functools.partial(mix, shape, "gate", bf16, N=N)
    table["experts 20b down, 512 tokens"] = functools.partial(mix, "20b", "down", bf16, N=512)
    for name, splits, outputs, part in (
        ("", 1, 32, "product"), (", 4 splits", 4, 32, "product"), (", 64 outputs", 1, 64, "product"),
        (" sum", 4, 32, "sum"),
    ):  # fmt: skip
        table[f"vector product{name}"] = functools.partial(few_rows, splits, outputs, part)
    table["experts small gate fp32"] = functools.partial(mix, "small", "gate", fp32)
    return table


LAUNCHES = _launches()
