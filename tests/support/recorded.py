"""Manifests and results in the format of the stages, `bench` and `gate`, with invented numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlaforge.artifact import Manifest

MACHINE = {"mlaforge": "0.1.0", "torch": "2.13.0", "device": "test machine"}


def conversion(layout: str = "latent", ratio: float = 1.021, layers: int = 4) -> Manifest:
    """Return a manifest of `convert`. Layer 0 has a sliding window and stays GQA."""
    rotary = 64 if layout == "latent_rope" else 0
    records: list[dict[str, Any]] = [
        {
            "layer": i, "layout": layout if i else "gqa", "window": None if i else 128,
            "kv_lora_rank": 96 + 8 * i if i else 0, "qk_rope_head_dim": rotary if i else 0,
            "cached": 96 + 8 * i + rotary if i else 384, "gqa_cached": 384,
            "predicted_loss": 0.00123 * i if i else None,
            "spectrum": [0.1 * 0.97**j for j in range(384)] if i else None,
        }
        for i in range(layers)
    ]  # fmt: skip
    before, after = 384 * layers, sum(record["cached"] for record in records)
    return Manifest(
        "convert",
        config={"budget": 0.5, "layout": layout, "nsamples": 16, "seqlen": 2048, "seed": 17},
        inputs={
            "model": {"path": "models/Tiny-135M", "model_type": "llama", "sha256": "a1" * 32},
            "calibration": {"source": "wiki.valid", "sha256": "b2" * 32, "tokens": 32768},
            "evaluation": {"source": "wiki.test", "sha256": "c3" * 32, "tokens": 16384},
        },
        metrics={
            "original_ppl": 19.0186,
            "partial_rope_ppl": 19.984 if rotary else None,
            "mla_ppl": 19.0186 * ratio,
            "ratio": ratio,
            "cache": {
                "gqa_per_token": before, "mla_per_token": after, "fraction": after / before,
                "gqa_bytes_per_token": 2 * before, "mla_bytes_per_token": 2 * after,
            },
            "layers": records,
        },
        seconds={"load": 0.75, "moments": 36.6, "factorize": 2.07},
        environment=MACHINE,
    )  # fmt: skip


def evaluation(**metrics: Any) -> Manifest:
    return Manifest(
        "eval",
        config={"seqlen": 2048},
        inputs={"model": {"path": "models/Tiny-135M"}, "text": {"source": "wiki.test", "sha256": "d4" * 32}},
        metrics={"ppl": 19.0186, "nll": 2.9454, "nll_stderr": 0.0312, "tokens": 16376, "windows": 8, **metrics},
        seconds={"eval": 33.2},
        environment=MACHINE,
    )


def talk(*texts: str) -> Manifest:
    runs = [
        {
            "model": f"model-{i}", "text": text, "new_tokens": 48, "seconds": 3.1, "tokens_per_second": 15.48,
            "cache_bytes": 3870720 // (i + 1), "cached_tokens": 84,
        }
        for i, text in enumerate(texts)
    ]  # fmt: skip
    return Manifest("generate", {"chat": True}, {}, {"prompt": "Why?", "runs": runs}, environment=MACHINE)


def save(manifest: Manifest, directory: Path) -> None:
    directory.mkdir(parents=True)
    manifest.save(directory)


def healing(tokens: int = 4096) -> Manifest:
    """Four evaluations, the third the best."""
    kl = (0.3, 0.1, 0.05, 0.06)
    points = [
        {"step": n, "tokens": tokens * n, "ppl": 20 + 10 * value, "teacher_ppl": 20.0, "kl": value}
        for n, value in enumerate(kl)
    ]
    made = Manifest("heal", {"steps": 3}, {"student": {"path": "here"}}, environment=MACHINE)
    made.metrics = {"curve": points, "best": points[2], "last": points[3], "tokens_per_second": 321.5}
    return made


def training() -> Manifest:
    """A head's, three evaluations: one place of the third drafted token was never asked for."""
    shares = ((0.3, 0.2, None), (0.42, 0.33, 0.25), (0.44, 0.35, 0.31))
    points = [
        {"step": n, "tokens": 2048 * n, "acceptance": list(own), "acceptance_length": 1.2 + 0.1875 * n,
         "loss": 4.5 - n if n else None} for n, own in enumerate(shares)
    ]  # fmt: skip
    made = Manifest("draft train", {"steps": 2}, {"model": {"path": "models/Tiny-135M"}}, environment=MACHINE)
    made.metrics = {"curve": points, "best": points[2], "last": points[2], "tokens_per_second": 645.5,
                    "parameters": 7654321, "text": {"answers": 2345}}  # fmt: skip
    return made


def judged() -> Manifest:
    """Two criteria, one of which fails."""
    criteria = [
        {"name": "perplexity", "student": 20.1, "teacher": 20.0, "worse": 0.005, "interval": [0.003, 0.008],
         "limit": 0.01, "kind": "relative", "documents": 16, "passed": True},
        {"name": "kl", "student": 0.05, "teacher": 0.0, "worse": 0.05, "interval": None, "limit": 0.02,
         "kind": "delta", "documents": 16, "passed": False},
    ]  # fmt: skip
    metrics = {"criteria": criteria, "passed": False}
    return Manifest("acceptance", {}, {"student": {"path": "healed"}}, metrics, environment=MACHINE)


def span(median: float, by: float = 0.02) -> dict[str, Any]:
    ends = median * (1 - by), median * (1 + by)
    return {"median": median, "min": ends[0], "max": ends[1], "runs": [ends[0], median, ends[1]]}


def case(
    model: str, layout: str, context: int, speed: float, drafts: int = 0, batch: int = 1, **changes: Any
) -> dict[str, Any]:
    """One case of a scenario as `bench` writes it."""
    accepted = [0.8 * 0.9**j for j in range(drafts)]
    block = {"mean_acceptance_length": 1 + sum(accepted), "acceptance_per_position": accepted} if drafts else None
    if block and changes.get("specpv") == "lossless":
        block |= {"kept_share": 0.62, "bytes_per_token": {"all": 123456789.0}}
    cached = context * batch * (23040 if layout == "gqa" else 11520)
    return {
        "id": f"mlaforge {model} {layout} {context}x{batch} k{drafts}", "engine": "mlaforge", "model": model,
        "layout": layout, "dtype": "bfloat16", "context": context, "batch": batch, "tokens": 64,
        "num_speculative_tokens": drafts, "draft": "ngram" if drafts else "none", "specpv": "off",
        "cache_fraction": 0.75, "prefix_caching": True, "imported": None, "status": "ok", "limit": None,
        "repetitions": 3, "tokens_per_second": span(speed),
        "ms_per_token": {"p50": 1e3 / speed, "p90": 1.1e3 / speed, "p99": 2e3 / speed},
        "time_to_first_token": span(context / 1000), "time_to_first_token_cached": 0.04,
        "prefill_tokens_per_second": span(1000.0), "speedup": span(1.4) if drafts else None,
        "over_transformers": None, "distinct_4_grams": 0.83,
        "peak_memory": {"weights": 2.7e8, "cache": cached, "activations": 6e7, "total": 3.3e8 + cached},
        "cache": {"bytes": cached, "planned_bytes": cached},
        "roofline": {"tokens_per_second": 2 * speed, "fraction": 0.5, "limit": "weight bandwidth"},
        "eagle_speculation": block, **changes,
    }  # fmt: skip


def scenario(cases: list[dict[str, Any]], name: str = "single", **changes: Any) -> dict[str, Any]:
    return {
        "kind": "scenario", "schema": 1, "scenario": name, "scope": "cpu", "description": "One request.",
        "time": "2026-08-30T12:00:00+00:00", "seconds": 312.5, "command": f"mlaforge bench {name} MODEL OUT",
        "commit": "9abdef0" + 33 * "0", "dirty": False, "forced": False, "device": "test machine",
        "environment": MACHINE, "config": {}, "prompts": [],
        "roof": {"name": "cpu", "bandwidth": 1.5e10, "flops": 6.0e10, "source": "measured"},
        "models": [], "perf": None, "cases": cases, **changes,
    }  # fmt: skip


def cases() -> list[dict[str, Any]]:
    """GQA and latent by context, drafts and batch, transformers beside them, and what does not fit."""
    found = []
    for n, context in enumerate((512, 2048, 4096)):
        for model, layout, speed in (("Tiny-135M", "gqa", 60.0 - 10 * n), ("tiny-latent", "latent", 55.0 - 5 * n)):
            found.append(case(model, layout, context, speed))
            found += [case(model, layout, context, speed * gain, drafts) for drafts, gain in ((2, 1.3), (3, 1.31))]
        found.append(case("Tiny-135M", "gqa", context, 20.0, engine="transformers", eagle_speculation=None))
    found += [case("tiny-latent", "latent", 512, speed, batch=batch) for batch, speed in ((4, 150.0), (8, 154.0))]
    limit = {"what": "the cache holds 4,096 of 8,320 tokens", "change": "--cache-fraction 0.9"}
    found.append(case("Tiny-135M", "gqa", 8192, 1.0, status="capacity", limit=limit, tokens_per_second=None))
    return found


def gates(**changes: Any) -> dict[str, Any]:
    def gate(name: str, value: float | None, verdict: str) -> dict[str, Any]:
        return {
            "name": name, "scenario": "single", "quantity": "tokens_per_second", "comparison": "ratio",
            "against": "plain decoding", "operator": ">=", "threshold": 1.3, "unit": "x", "value": value,
            "spread": [value - 0.1, value + 0.1] if value else None, "ceiling": 2.07, "ceiling_reason": "all accepted",
            "verdict": verdict, "case": "mlaforge", "reason": f"{value} >= 1.3",
        }  # fmt: skip

    listed = [gate("faster", 1.4, "pass"), gate("much faster", 1.2, "fail"), gate("unseen", None, "missing")]
    return {
        "kind": "gates", "schema": 1, "time": "2026-08-30T13:00:00+00:00", "scope": "cpu", "commit": 40 * "9",
        "dirty": False, "device": "test machine", "forced": False, "passed": False,
        "ledger": {"file": "results/ledger.json", "in_a_row": 2, "needed": 3}, "gates": listed, **changes,
    }  # fmt: skip


def kernels() -> dict[str, Any]:
    rows = [
        {"op": "paged_attention", "layout": "mla", "sequences": 8, "tokens": tokens, "queries": 1, "dtype": "bfloat16",
         "by": "native", "us": 41.2, "gbs": 9.0, "tflops": 0.02 * n, "of_the_roof": 0.48, "limit": "bandwidth"}
        for n, tokens in enumerate((1024, 8192), 1)
    ]  # fmt: skip
    return {**scenario([]), "kind": "kernels", "rows": rows}


def put(folder: Path, **files: dict[str, Any]) -> None:
    """Writes results as `bench` and `gate` do: results/<time>/<name>.json below `folder`."""
    run = folder / "results" / "20260830-120000"
    run.mkdir(parents=True, exist_ok=True)
    for name, body in files.items():
        (run / f"{name}.json").write_text(json.dumps(body))
