"""Tables that verbs print."""

from __future__ import annotations

from typing import Any

from mlaforge.rendering.table import text_table


def conversion_table(manifests: list[Any]) -> str:
    """Table with perplexities and cache of each conversion."""
    measures = {
        "Original": "original_ppl",
        "Partial RoPE": "partial_rope_ppl",
        "MLA": "mla_ppl",
        "Sparse": "sparse_ppl",
    }
    heads = ("layout", *(f"{name} ppl" for name in measures), "ratio", "cache bytes/token", "of GQA")
    rows: list[tuple[str, ...]] = [heads]
    for manifest in manifests:
        metrics, cache = manifest.metrics, manifest.metrics["cache"]
        ppl = [f"{metrics[name]:.3f}" if metrics.get(name) else "–" for name in measures.values()]
        ratio = f"{metrics['ratio']:.4f}" if "ratio" in metrics else "–"
        ratio += f", sparse {metrics['sparse_ratio']:.4f}" if "sparse_ratio" in metrics else ""
        layouts = {layer["layout"] for layer in metrics["layers"]}
        cache_bytes = f"{cache['gqa_bytes_per_token']} -> {cache['mla_bytes_per_token']}"
        bits = f", {manifest.config['bits']:g} bits" if manifest.config.get("bits") else ""
        bits += "" if manifest.config.get("dense", True) else f", {manifest.config['topk']} tokens read"
        rows.append((" + ".join(sorted(layouts)) + bits, *ppl, ratio, cache_bytes, f"{100 * cache['fraction']:.1f} %"))
    return text_table(rows, ">")
