"""Compiles the kernels of attention, of its selection and of packed experts for sm_90 as they would be launched on
real shapes, without a GPU: one JSON line each.

python tests/support/compile_ahead.py [NAME ...]      (a process of its own: the tests' has Triton interpret)
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from mlaforge.ops import mxfp4_experts_triton as mixtures
from mlaforge.ops import paged_attention_triton as kernels
from mlaforge.ops import token_selection_triton as selections
from mlaforge.ops.cache_view import CacheView

# Name -> query heads, key heads, key width, value width (None: the value is the key's own first part), query tokens.
SHAPES = {
    "gqa-64": (64, 8, 64, 64, 1),
    "gqa-64-verify": (64, 8, 64, 64, 4),
    "gqa-64-prefill": (64, 8, 64, 64, 2048),
    "gqa-128": (64, 8, 128, 128, 1),
    "gqa-128-prefill": (64, 8, 128, 128, 2048),
    "gqa-96": (32, 32, 96, 96, 1),
    "mla-512-64": (64, 1, 576, -512, 1),
    "mla-512-64-prefill": (64, 1, 576, -512, 2048),
    "mla-256-64": (64, 1, 320, -256, 1),
    "mla-320-32": (64, 1, 352, -320, 1),
    "mla-384-64": (64, 1, 448, -384, 1),
    "mla-small": (9, 1, 224, -192, 1),
    "latent-64-512": (64, 8, 64, 512, 1),
    "gqa-64-mixed": (64, 8, 64, 64, 2048),
}


def launch(name: str, dtype: torch.dtype, rows: torch.dtype) -> kernels.Launch:
    H, G, D, V, T = SHAPES[name]
    k = torch.empty(32, G, D, dtype=rows)
    v = k[..., :-V] if V < 0 else torch.empty(32, G, V, dtype=rows)
    S = 8
    # One sequence's prefill beside decode of the others.
    N = S + T - 1 if name.endswith("mixed") else S * T
    numbers = torch.zeros(S + 1, dtype=torch.int32)
    view = CacheView(
        torch.zeros(S, 512, dtype=torch.int32), numbers[:S], numbers[:S], numbers, numbers.long(), 16, T, 8192
    )
    return kernels.make_launch(torch.empty(N, H, D, dtype=dtype), k, v, view, 0.1, splits=16 if T < 16 else 1)


def compile_ahead(kernel: Any, arguments: dict[str, Any], options: dict[str, int]) -> Any:
    """Specialised as a launch specialises: pointers and numbers by divisibility by 16."""
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        aligned = not parameter.do_not_specialize
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and aligned):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            kind = {
                "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8e4nv", "int32": "i32",
                "int8": "i8", "uint8": "u8", "int64": "i64",
            }  # fmt: skip
            signature[parameter.name] = "*" + kind[str(value.dtype).removeprefix("torch.")]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            aligned = aligned and isinstance(value, int) and value % 16 == 0
        if aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def merge(dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, int]]:
    """Arguments and options of the merge."""
    lse = torch.empty(1)
    out = torch.empty(1, dtype=dtype)
    return {"parts": lse, "lses": lse, "out": out, "lse": lse, "splits": 16, "V": 320, "SIZE": 512}, {"num_warps": 4}


def selection(kernel: str) -> tuple[Any, dict[str, Any]]:
    """The kernel `lse` or `score` of an index of 32 numbers and 64 heads, and its arguments."""
    S, H, L = 8, 64, 8192
    numbers = torch.zeros(S, dtype=torch.int32)
    view = CacheView(torch.zeros(S, 512, dtype=torch.int32), numbers, numbers, numbers, numbers.long(), 16, 1, L)
    _, arguments = selections.launches(torch.zeros(512, 32, 16, dtype=torch.int8), torch.zeros(S, H, 32), view)
    out = torch.zeros(S, L)
    if kernel == "lse":
        return selections.lse_kernel, arguments | {"out": out}
    more = {"lse": torch.zeros(S, H), "out": out, "width": L, "sink": 4, "window": 128, "stride": 0}
    return selections.score_kernel, arguments | more


# Name -> experts, of a token, hidden size, intermediate size: of 20B, of 120B, and of the stand-in.
EXPERTS = {"20b": (32, 4, 2880, 2880), "120b": (128, 4, 2880, 2880), "small": (4, 2, 576, 1536)}


def experts(name: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """The kernel `gate`, `down` or `sum` of one of EXPERTS, its arguments and options, with no memory for weights."""
    shape, part = name.split("-")
    (E, K, C, I), N = EXPERTS[shape], 8  # noqa: E741
    if part == "sum":
        out = torch.empty(1, dtype=dtype)
        arguments = {"parts": torch.empty(1), "weights": out, "out": out}
        return mixtures.sum_kernel, arguments | {"K": K, "C": C, "SUMMED": mixtures.SUMMED}, {"num_warps": 4}
    inputs, outputs, gated = (C, I, True) if part == "gate" else (I, C, False)
    with torch.device("meta"):
        blocks = torch.empty(E, outputs * (1 + gated), inputs // 32, 16, dtype=torch.uint8)
        x = torch.empty(N if gated else N * K, inputs, dtype=dtype)
        out = torch.empty(N * K, outputs, dtype=dtype if gated else torch.float32)
        order, offsets = torch.empty(N * K, dtype=torch.int64), torch.empty(E + 1, dtype=torch.int32)
        bias = torch.empty(E, blocks.shape[1], dtype=dtype)
    launch = mixtures.make_launch(x, order, offsets, blocks, blocks[..., 0], bias, out, K, 1.702, 7.0, gated)
    return mixtures.product_kernel, launch.arguments, launch.options


def registers(ptx: str) -> dict[str, int]:
    """Registers a thread and bytes spilled, as ptxas tells."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", path, "-o", path.with_suffix(".cubin")]
        done = subprocess.run(command, capture_output=True, text=True)
        told = done.stdout + done.stderr
    used, spilled = re.search(r"Used (\d+) registers", told), re.search(r"(\d+) bytes spill stores", told)
    assert used and spilled, told
    return {"registers": int(used[1]), "spilled": int(spilled[1])}


def main(names: list[str]) -> None:
    for given in names:
        # NAME, NAME:DTYPE, or NAME:DTYPE:DTYPE OF THE CACHE
        shape, *dtypes = given.split(":")
        dtype = getattr(torch, dtypes[0] if dtypes else "bfloat16")
        rows = getattr(torch, dtypes[-1]) if dtypes else dtype
        start = time.perf_counter()
        told: dict[str, Any] = {"name": given}
        if shape == "merge":
            done = compile_ahead(kernels.merge_kernel, *merge(dtype))
        elif shape.startswith("selection-"):
            done = compile_ahead(*selection(shape.removeprefix("selection-")), {"num_warps": 4})
        elif shape.startswith("experts-"):
            kernel, arguments, options = experts(shape.removeprefix("experts-"), dtype)
            told |= {"tile": [arguments.get("BLOCK_O", 0), arguments.get("BLOCK_M", 0)]}
            done = compile_ahead(kernel, arguments, options)
        else:
            planned = launch(shape, dtype, rows)
            told |= {"grid": planned.grid, "tile": [planned.arguments[name] for name in ("BLOCK_M", "BLOCK_N")]}
            done = compile_ahead(kernels.attend_kernel, planned.arguments, planned.options)
        told |= {"shared": done.metadata.shared, **registers(done.asm["ptx"])}
        told |= {"wgmma": done.asm["ptx"].count("wgmma.mma_async"), "seconds": round(time.perf_counter() - start, 1)}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    fp8 = [f"{name}:bfloat16:float8_e4m3fn" for name in ("gqa-64", "gqa-128-prefill", "mla-512-64", "mla-small")]
    main(
        sys.argv[1:]
        or [
            *SHAPES,
            "merge",
            "selection-lse",
            "selection-score",
            "experts-20b-gate",
            "experts-20b-down",
            "experts-120b-gate",
            "experts-small-down",
            "experts-20b-sum",
            "experts-small-gate:float32",
            "gqa-128:float16",
            "gqa-128:float32",
            "mla-512-64:float32",
            *fp8,
        ]
    )
