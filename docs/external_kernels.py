"""Generate reference/external-kernels.md: which layer of which model fits which library's kernel, by the adapters' own
refusals (src/mlaforge/ops/external/).

python docs/external_kernels.py     (tests/system/test_external_kernels_page.py compares the page)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch

from mlaforge.ops.external import deep_gemm
from mlaforge.ops.external.attention_library import AttentionCase
from mlaforge.ops.external.library import EXTERNAL
from mlaforge.ops.gpu_properties import capability_name
from mlaforge.ops.latent_attention import LATENT
from mlaforge.ops.packed_attention import FLASH_MLA_SPARSE
from mlaforge.ops.packed_attention import OP as PACKED_HEADS
from mlaforge.ops.paged_attention import LIBRARIES
from mlaforge.ops.row_formats import row_format
from mlaforge.ops.row_formats.plain import Plain
from mlaforge.rendering.table import markdown_table

PAGE = Path(__file__).parent / "reference" / "external-kernels.md"
# Name -> query heads, KV heads, elements of a head.
MODELS = {
    "GPT-OSS 20B, 120B": (64, 8, 64), "Llama 3.1 8B": (32, 8, 128), "Qwen3 8B": (32, 8, 128),
    "SmolLM2-135M": (9, 3, 64),
}  # fmt: skip
WINDOWED = ("GPT-OSS 20B, 120B",)
# Norms of keys per head allow layout `latent` alone.
NORMED = ("Qwen3 8B",)
CAPABILITIES = [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]
HOPPER = (9, 0)
ROPE = 64

OPENING = """\
# Kernels of other libraries

`python docs/external_kernels.py` generates this page from what the adapters in `src/mlaforge/ops/external/` refuse; a
test compares it. **No GPU has run them yet**: they are tested on stand-ins with the libraries' signatures and checks,
and vLLM's kernels also ran in Triton's interpreter. [ops.md](../ops.md#kernels-of-other-libraries) describes how they
are chosen.
"""

NOTES = """\
## What every adapter does

- Sinks scale `out` by `sigmoid(lse - sink)`; the lse is natural, -inf where a query token sees nothing. FlashInfer's
  grouped-query lse is to base 2, FlashMLA's is +inf for empty rows; vLLM's grouped-query kernel returns none, which the
  adapter computes from the parts that it writes.
- Ranks under 512, and fewer than 64 rotary elements, are widened by zeros: `fp8_ds_mla` rows when they are written,
  16-bit rows in a copy at every call.
- Trees are refused, and so is CUDA graph capture: a step whose layers use a library runs kernel by kernel.
- vLLM's kernels compute one query token per sequence, so a step with several reads the cache as often.
- DeepGEMM's index logits are sums of ReLUs over heads; the index of this package is not of that form.

An `fp8_ds_mla` row has 656 bytes for any rank: a row of rank R in bf16 has 2 R + 128, so it saves memory above rank
264. Its latent has a relative error of 2.6 % in the mean square, its rotary key none.
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table: a kind of layer of a model, how its rows are stored, and the reason of each library."""

    model: str
    layer: str
    stored: str
    refusals: dict[str, str | None]


def attention_refusals(case: AttentionCase, stored: str, groups: tuple[int, ...]) -> dict[str, str | None]:
    """Library -> why it does not compute attention over rows in the format `stored`, or None."""
    format = row_format(stored, groups, counts=(groups[0], 32))
    if isinstance(format, Plain):
        case = dataclasses.replace(case, rows=format.torch_dtype)
        return {adapter.library.name: adapter.refusal(case) for adapter in LIBRARIES}
    packed = dict.fromkeys((adapter.library.name for adapter in LIBRARIES), f"it does not read rows in {stored}")
    if case.latent:
        return packed | {"flash_mla": FLASH_MLA_SPARSE.refusal(format, case.heads, case.dtype, case.capability)}
    assert not EXTERNAL.keys() & PACKED_HEADS.implementations.keys()
    return packed


def cases(
    model: str, capability: tuple[int, int] = HOPPER
) -> Iterator[tuple[str, str, AttentionCase, tuple[int, ...]]]:  # fmt: skip
    """Layer, storage, case and sizes of the groups of a row, for blocks of 64 tokens."""
    (H, G, D), half = MODELS[model], torch.bfloat16
    heads = AttentionCase(H, G, D, D, False, half, half, 64, capability)
    rank = G * D - ROPE
    latent = AttentionCase(H, 1, rank + ROPE, rank, True, half, half, 64, capability)
    for stored in ("bf16", "fp8", "int8"):
        yield "GQA", stored, heads, (D,) * (2 * G)
    if model in WINDOWED:
        yield "GQA, window 128", "bf16", dataclasses.replace(heads, window=128), (D,) * (2 * G)
    yield "GQA, selection", "bf16", dataclasses.replace(heads, page=1), (D,) * (2 * G)
    if model in NORMED:
        return
    for width in {rank: None, 512: None} if rank > 512 else {rank: None}:
        sized, groups = dataclasses.replace(latent, key=width + ROPE, value=width), (width, ROPE)
        name = f"latent_rope {width} + {ROPE}"
        for stored in ("bf16", "fp8", "coded", *(["fp8_ds_mla"] if width <= 512 else [])):
            yield name, stored, sized, groups
            if stored in ("bf16", "fp8_ds_mla"):
                yield f"{name}, selection", stored, dataclasses.replace(sized, page=1), groups


def rows() -> list[Row]:
    """All rows, in the page's order."""
    table = []
    for model in MODELS:
        for layer, stored, case, groups in cases(model):
            table.append(Row(model, layer, stored, attention_refusals(case, stored, groups)))
        assert not EXTERNAL.keys() & LATENT.implementations.keys()
        none = dict.fromkeys((adapter.library.name for adapter in LIBRARIES), "it does not decompress keys")
        table.append(Row(model, "latent", "any", none))
    return table


def page() -> str:
    """The page's text."""
    reasons: dict[str, int] = {}

    def cell(reason: str | None) -> str:
        return "yes" if reason is None else str(reasons.setdefault(reason, len(reasons) + 1))

    names = [adapter.library.name for adapter in LIBRARIES]
    models = [("model", "layers", "rows", *names)]
    models += [(row.model, row.layer, row.stored, *(cell(row.refusals[name]) for name in names)) for row in rows()]
    gpus = [("layers of GPT-OSS", "rows", "library", *map(capability_name, CAPABILITIES))]
    first = next(iter(MODELS))
    by_gpu = [list(cases(first, capability)) for capability in CAPABILITIES]
    for same in zip(*by_gpu, strict=True):
        layer, stored = same[0][:2]
        refused = [attention_refusals(case, stored, groups) for _, _, case, groups in same]
        gpus += [
            (layer, stored, name, *(cell(refusals[name]) for refusals in refused))
            for name in names if any(refusals[name] is None for refusals in refused)
        ]  # fmt: skip
    experts = [cell(deep_gemm.refusal(torch.bfloat16, {2880}, capability)) for capability in CAPABILITIES]
    gpus.append(("experts", "MXFP4", "deep_gemm", *experts))
    versions = [("name in `MLAFORGE_OPS`", "the adapter follows", "files")]
    versions += [(f"`{library.name}`", library.follows, library.source) for library in EXTERNAL.values()]
    parts = [
        OPENING, "## Versions", markdown_table(versions),
        "## Models\n\nOn compute capability 9.0, with blocks of 64 tokens; `latent_rope` at half of the original's "
        "cache, and at rank 512 where that is less. A number is a reason below.",
        markdown_table(models), "## GPUs", markdown_table(gpus), "## Reasons",
        "\n".join(f"{number}. {reason}" for reason, number in reasons.items()), NOTES,
    ]  # fmt: skip
    return "\n\n".join(part.strip() for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
