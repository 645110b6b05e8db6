"""`diagnose`: statistics of a model's attention on a text, and the predicted loss of converting it.

Statistics are collected layer by layer during the forward and backward pass of calibration (factorization/moments.py):
attention (attention_stats.py), routing of experts (routing.py), geometry of keys and values (geometry.py). The moments
give the first-order loss of every layer by budget and layout, and from it a plan for `convert --plan` (prediction.py).
The loss of such conversions is measured on held-out windows (held_out.py). docs/diagnose.md explains all numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from mlaforge.artifact import WORK, Manifest, finished, record_name, record_names, writing
from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.checkpoint.token_losses import losses
from mlaforge.config import by_keywords
from mlaforge.data import corpus, overlap
from mlaforge.diagnosis import verdicts
from mlaforge.diagnosis.attention_stats import AttentionStats
from mlaforge.diagnosis.config import DiagnoseConfig
from mlaforge.diagnosis.geometry import Geometry, effective_rank
from mlaforge.diagnosis.prediction import BUDGETS, Prediction, predicted_losses, stats_key
from mlaforge.diagnosis.routing import RoutingStats
from mlaforge.factorization import code, moments
from mlaforge.modeling.rope_mla import pairs, rotate
from mlaforge.planning import plan_file
from mlaforge.planning.plan import LATENT_LAYOUTS, Plan, make_plan
from mlaforge.runtime import UserError, resolve_device, timed
from mlaforge.tensor_store import TensorStore

DIAGNOSIS = "diagnosis.json"
# Evaluation windows per diagnosed window.
EVAL_FRACTION = 0.25


class DiagnosisObserver:
    """A `moments.Observer` that writes the statistics of the head and of each layer to a store. ids: [N, T]."""

    def __init__(
        self, stream: LayerStream, ids: Tensor, store: TensorStore, router: str | None, cache_dtype: torch.dtype
    ):
        self.stream, self.ids, self.store, self.router, self.cache_dtype = stream, ids, store, router, cache_dtype

    def head(self, window: int, norm: Any, head: Tensor, hidden_BTC: Tensor) -> None:
        token_losses = losses(norm, head, hidden_BTC[0], self.ids[window])
        self.store[f"losses-{window:04d}"] = {"mean": token_losses.double().mean()}

    @contextmanager
    def layer(self, index: int, layer: Any) -> Iterator[Callable[[dict[str, Any]], None]]:
        stream, spec = self.stream, self.stream.spec.layers[index]
        attention = AttentionStats.empty(spec, self.ids.shape[1], stream.device)
        geometry = Geometry.empty(spec, stream.spec.hidden_size, stream.device)
        routing = RoutingStats.empty(spec.moe, stream.device) if spec.moe else None
        sinks = layer.self_attn.sinks.float() if spec.sinks else None
        allocated: list[int] = []

        @torch.no_grad()
        def observe(activations: dict[str, Any]) -> None:
            x = activations["x"][0].float()
            cos, sin = (pairs(table[0], spec.head_dim // 2).float() for table in activations["rope"])
            q, k, v = (
                activations[name][0].detach().float().view(len(x), -1, spec.head_dim).transpose(0, 1)
                for name in ("q_proj", "k_proj", "v_proj")
            )
            norms = (layer.self_attn.q_norm, layer.self_attn.k_norm) if spec.qk_norm else None
            normed = (norms[0](q), norms[1](k)) if norms else (q, k)
            rotated = rotate(normed[0], cos, sin), rotate(normed[1], cos, sin)
            attention.add(*rotated, spec, stream.spec.softmax_scale, sinks)
            geometry.add(x, (q, k, v), normed, rotated)
            if not allocated:
                rows = rotated[1][None].to(self.cache_dtype), v[None].to(self.cache_dtype)
                allocated.append(allocated_bytes(stream.config, index, *rows))

        with contextlib.ExitStack() as hooks:
            if spec.moe and routing:
                assert self.router is not None, "a family with experts names its router"
                hooks.callback(_register_hook(layer.get_submodule(self.router), routing, spec.moe.top_k).remove)
            yield observe
        parts = {"attention": attention, "geometry": geometry, **({"routing": routing} if routing else {})}
        tensors = {f"{part}.{name}": value for part, stats in parts.items() for name, value in vars(stats).items()}
        self.store[stats_key(index)] = {**tensors, "cache.allocated": torch.tensor(allocated[0])}


def _register_hook(router: Any, routing: RoutingStats, top_k: int) -> Any:
    def record(_: Any, __: Any, out: Any) -> None:
        routing.add(out[0] if isinstance(out, tuple) else out, top_k)

    return router.register_forward_hook(record)


def allocated_bytes(config: Any, index: int, keys: Tensor, values: Tensor) -> int:
    """Return the bytes that transformers' cache allocates for one layer, after a prompt and one more token.

    keys, values: [1, heads, T, D] as cached. Whole storages are counted, because a slice keeps its storage alive.
    """
    cache = DynamicCache(config=config)
    for part in (slice(None, -1), slice(-1, None)):
        cache.update(keys[:, :, part], values[:, :, part], index)
    layer = cache.layers[index]
    storages = {s.data_ptr(): s.nbytes() for s in (layer.keys.untyped_storage(), layer.values.untyped_storage())}
    return sum(storages.values())


def run(model: str, out: Path | None, config: DiagnoseConfig, overwrite: bool = False) -> Manifest:
    """Diagnose a model; write an artifact (numbers, plan, plots) if `out` is given.

    The metrics are a summary with verdicts. With the same inputs, a finished result is returned and an interrupted run
    resumes. Raises UserError for invalid inputs; `out` is always either complete or untouched.
    """
    source = SourceModel.open(model)
    if source.converted:
        raise UserError(f"{source} is already converted ({source.model_type}); diagnose the original")
    plan = make_plan(source.spec, config.budget, config.layout, config.layers)
    device = resolve_device(config.device)
    text, eval_text = windows(source.tokenizer, config)
    source.check_tokens(text.ids, eval_text.ids)
    manifest = Manifest(
        "diagnose",
        config={k: v for k, v in dataclasses.asdict(config).items() if k != "device"} | record_names(config, "text"),
        inputs={"model": {**source.record, "model_type": source.spec.model_type}, "text": text.describe(),
                "held_out": eval_text.describe()},
    )  # fmt: skip
    if out is not None and (previous := finished(out, manifest, overwrite, (source.path, config.text))):
        return previous
    cache_dtype = source.dtype
    with contextlib.ExitStack() as opened:
        if out is None:
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        else:
            folder = opened.enter_context(writing(out, manifest, resumable=True))
        # As in `convert`: fp32 on a CPU, where half precision is slower; the stored dtype on a GPU.
        dtype = torch.float32 if device.type == "cpu" else cache_dtype
        stream = opened.enter_context(LayerStream(source, dtype, device))
        work = TensorStore(folder / WORK)
        with timed(manifest.seconds, "check"):
            stream.check()
        with timed(manifest.seconds, "watch"):
            observer = DiagnosisObserver(stream, text.ids, work, source.family.router, cache_dtype)
            moments.collect(stream, range(stream.num_layers), text.ids.split(1), work, config.seed, observer)
        with timed(manifest.seconds, "predict"):
            prediction = Prediction(stream, work, plan, config.budget, config.layers)
            suggested = prediction.allocated(config.budget)
        with timed(manifest.seconds, "judge"):
            curves = prediction.curves(eval_text.ids, text.ids)
        records = _records(stream, work, prediction, suggested, cache_dtype, config.seqlen)
        losses = predicted_losses(prediction, suggested, *curves)
        mean = float(torch.stack([work[f"losses-{n:04d}"]["mean"] for n in range(len(text.ids))]).mean())
        manifest.metrics = verdicts.summary(records, mean, text.ids.shape, suggested, cache_dtype, losses)
        manifest.metrics["held_out"] = eval_text.ids.numel() - len(eval_text.ids)
        if out is not None:
            # The evaluation windows too: a plan may be selected by its loss on them.
            passages = sorted({*overlap.passages(text), *overlap.passages(eval_text)})
            _write(folder, manifest, records, suggested, passages, config.report)
    return manifest


def windows(tokenizer: Any, config: DiagnoseConfig) -> tuple[corpus.Windows, corpus.Windows]:
    """Return the windows to diagnose, as `convert` would calibrate on them, and the evaluation windows for conversions.

    Evaluation windows are spread over the text and share no passage with the others. Raises UserError for none.
    """
    diagnosed = corpus.windows(tokenizer, config.text, config.windows, config.seqlen, seed=config.seed)
    num_eval = math.ceil(config.windows * EVAL_FRACTION)
    if config.text == corpus.EMBEDDED:
        candidates = corpus.windows(tokenizer, config.text, num_eval, config.seqlen, evaluation=True)
    else:
        all_windows = corpus.windows(tokenizer, config.text, sys.maxsize // config.seqlen, config.seqlen)
        diagnosed_rows = {row.numpy().tobytes() for row in diagnosed.ids}
        rows = [row.numpy().tobytes() for row in all_windows.ids]
        candidates = all_windows.take([n for n, row in enumerate(rows) if row not in diagnosed_rows])
        if not len(candidates.ids):
            # A short text would be diagnosed completely: part of it is reserved for evaluation.
            count = len(diagnosed.ids)
            reserved = _spread(count, min(num_eval, count // 2))
            remaining = [n for n in range(count) if n not in reserved]
            candidates, diagnosed = diagnosed.take(reserved), diagnosed.take(remaining)
    repeated = overlap.overlapping(candidates, overlap.passages(diagnosed))
    unseen = [n for n in range(len(candidates.ids)) if n not in repeated]
    if not unseen:
        raise UserError(
            f"text {record_name(config.text)!r} leaves no evaluation window: beside {len(diagnosed.ids)} window(s) of "
            f"{config.seqlen} tokens it has none that is new; give more text or a smaller --seqlen"
        )
    return diagnosed, candidates.take([unseen[n] for n in _spread(len(unseen), min(num_eval, len(unseen)))])


def _spread(total: int, count: int) -> list[int]:
    """Return `count` evenly spaced numbers below `total`."""
    return [int((n + 0.5) * total / count) for n in range(count)]


def _records(
    stream: LayerStream,
    work: TensorStore,
    prediction: Prediction,
    suggested: Plan,
    cache_dtype: torch.dtype,
    length: int,
) -> list[dict[str, Any]]:
    """Return all results per layer as plain numbers for JSON."""
    plan, records = prediction.plan, []
    for i, (spec, chosen) in enumerate(zip(stream.spec.layers, suggested.layers, strict=True)):
        tensors, predictions = work[stats_key(i)], prediction.layers[i]

        def stats(kind: Any, part: str, tensors: dict[str, Tensor] = tensors) -> dict[str, Any]:
            return kind(**{n.split(".")[1]: t for n, t in tensors.items() if n.startswith(f"{part}.")}).describe()

        eigenvalues = {name.split(".")[1]: v for name, v in predictions.items() if name.startswith("spectrum.")}
        rows = torch.zeros(1, 1, length, chosen.cached(spec), dtype=cache_dtype)
        converted = chosen.layout != "gqa"
        gqa = int(tensors["cache.allocated"])
        records.append({
            "layer": i,
            "window": spec.window,
            "num_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "gqa_cached": spec.cached,
            "attention": stats(AttentionStats, "attention"),
            "geometry": stats(Geometry, "geometry"),
            "routing": stats(RoutingStats, "routing") if spec.moe else None,
            "spectra": {name: v.tolist() for name, v in eigenvalues.items()},
            "effective_rank": {name: effective_rank(v) for name, v in eigenvalues.items()},
            "first_order": {
                layout: {str(b): None if math.isnan(v) else v for b, v in zip(BUDGETS, row, strict=True)}
                for layout, row in zip(LATENT_LAYOUTS, predictions["loss"].tolist(), strict=True)
            },
            "plan": {
                **dataclasses.asdict(chosen),
                "first_order": prediction.first_order(i, chosen) if converted else None,
                "uniform_rank": plan.layers[i].kv_lora_rank,
            },
            "coded": {
                str(bits): {"code": code.counts(widths[i]), "first_order": prediction.bits_loss(i, bits)}
                for bits, widths in prediction.widths.items()
            } if converted else None,
            "cache_bytes": {
                "gqa": gqa,
                "plan": allocated_bytes(stream.config, i, rows, rows[..., :0]) if converted else gqa,
            },
        })  # fmt: skip
    return records


def _write(
    folder: Path, manifest: Manifest, records: list[dict[str, Any]], suggested: Plan, passages: list[int], report: bool
) -> None:
    inputs = {name: manifest.inputs[name] for name in ("model", "text", "held_out")}
    document = {**inputs, "summary": manifest.metrics, "budgets": BUDGETS, "layers": records}
    diagnosis = json.loads(json.dumps(document), parse_float=lambda text: float(f"{float(text):.6g}"))
    (folder / DIAGNOSIS).write_text(json.dumps(diagnosis, allow_nan=False) + "\n", encoding="utf-8")
    predicted = [record["plan"]["first_order"] for record in records]
    plan_file.write(folder / plan_file.PLAN, suggested, inputs, predicted, passages)
    if report:
        from mlaforge.diagnosis.plots import draw

        draw(folder, diagnosis)


diagnose = by_keywords(run, DiagnoseConfig)
