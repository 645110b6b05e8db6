"""`diagnose`: what a model's attention does on a text, and what converting it would cost, before anything is converted.

The forward and backward pass of calibration (factorization/moments.py) is watched layer by layer: where attention looks
(attention_stats.py), how experts are routed (routing.py), the shape of keys and values (geometry.py). The moments give
the first-order loss of every layer by budget and layout, and from it a plan for `convert --plan` (prediction.py); what
such conversions lose is measured on held-out windows (held_out.py). docs/diagnose.md says what each number means.
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
from mlaforge.diagnosis.prediction import BUDGETS, Prediction, foreseen, stats_key
from mlaforge.diagnosis.routing import RoutingStats
from mlaforge.factorization import code, moments
from mlaforge.modeling.rope_mla import pairs, rotate
from mlaforge.planning import plan_file
from mlaforge.planning.plan import LATENT_LAYOUTS, Plan, make_plan
from mlaforge.runtime import UserError, resolve_device, timed
from mlaforge.tensor_store import TensorStore

DIAGNOSIS = "diagnosis.json"
# Windows that conversions are judged on, for each that is looked at.
HELD_OUT = 0.25


class Watch:
    """A `moments.Observer`: what it sees of the head and of each layer waits in a store. ids: [N, T]."""

    def __init__(self, stream: LayerStream, ids: Tensor, store: TensorStore, router: str | None, stored: torch.dtype):
        self.stream, self.ids, self.store, self.router, self.stored = stream, ids, store, router, stored

    def head(self, window: int, norm: Any, head: Tensor, hidden_BTC: Tensor) -> None:
        token_losses = losses(norm, head, hidden_BTC[0], self.ids[window])
        self.store[f"losses-{window:04d}"] = {"mean": token_losses.double().mean()}

    @contextmanager
    def layer(self, index: int, layer: Any) -> Iterator[Callable[[dict[str, Any]], None]]:
        stream, own = self.stream, self.stream.spec.layers[index]
        attention = AttentionStats.empty(own, self.ids.shape[1], stream.device)
        geometry = Geometry.empty(own, stream.spec.hidden_size, stream.device)
        routing = RoutingStats.empty(own.moe, stream.device) if own.moe else None
        sinks = layer.self_attn.sinks.float() if own.sinks else None
        allocated: list[int] = []

        @torch.no_grad()
        def see(activations: dict[str, Any]) -> None:
            x = activations["x"][0].float()
            cos, sin = (pairs(table[0], own.head_dim // 2).float() for table in activations["rope"])
            q, k, v = (
                activations[name][0].detach().float().view(len(x), -1, own.head_dim).transpose(0, 1)
                for name in ("q_proj", "k_proj", "v_proj")
            )
            norms = (layer.self_attn.q_norm, layer.self_attn.k_norm) if own.qk_norm else None
            normed = (norms[0](q), norms[1](k)) if norms else (q, k)
            rotated = rotate(normed[0], cos, sin), rotate(normed[1], cos, sin)
            attention.add(*rotated, own, stream.spec.softmax_scale, sinks)
            geometry.add(x, (q, k, v), normed, rotated)
            if not allocated:
                rows = rotated[1][None].to(self.stored), v[None].to(self.stored)
                allocated.append(allocated_bytes(stream.config, index, *rows))

        with contextlib.ExitStack() as hooks:
            if own.moe and routing:
                assert self.router is not None, "a family with experts says where its router is"
                hooks.callback(_listen(layer.get_submodule(self.router), routing, own.moe.top_k).remove)
            yield see
        parts = {"attention": attention, "geometry": geometry, **({"routing": routing} if routing else {})}
        tensors = {f"{part}.{name}": value for part, stats in parts.items() for name, value in vars(stats).items()}
        self.store[stats_key(index)] = {**tensors, "cache.allocated": torch.tensor(allocated[0])}


def _listen(router: Any, routing: RoutingStats, top_k: int) -> Any:
    def hear(_: Any, __: Any, out: Any) -> None:
        routing.add(out[0] if isinstance(out, tuple) else out, top_k)

    return router.register_forward_hook(hear)


def allocated_bytes(config: Any, index: int, keys: Tensor, values: Tensor) -> int:
    """Bytes that transformers' cache really holds of one layer, after a prompt and one more token.

    keys, values: [1, heads, T, D] as they are cached. Counted are whole storages: what a slice keeps alive is held.
    """
    cache = DynamicCache(config=config)
    for part in (slice(None, -1), slice(-1, None)):
        cache.update(keys[:, :, part], values[:, :, part], index)
    layer = cache.layers[index]
    storages = {s.data_ptr(): s.nbytes() for s in (layer.keys.untyped_storage(), layer.values.untyped_storage())}
    return sum(storages.values())


def run(model: str, out: Path | None, config: DiagnoseConfig, overwrite: bool = False) -> Manifest:
    """Diagnoses a model; writes an artifact (numbers, plan, drawings) if `out` is given.

    The metrics are a summary with verdicts. The same again returns the finished result, or goes on where a killed run
    stopped. Raises UserError for the user's mistakes; `out` is either complete or untouched.
    """
    source = SourceModel.open(model)
    if source.converted:
        raise UserError(f"{source} is already converted ({source.model_type}); diagnose the original")
    plan = make_plan(source.spec, config.budget, config.layout, config.layers)
    device = resolve_device(config.device)
    text, held = windows(source.tokenizer, config)
    source.check_tokens(text.ids, held.ids)
    manifest = Manifest(
        "diagnose",
        config={k: v for k, v in dataclasses.asdict(config).items() if k != "device"} | record_names(config, "text"),
        inputs={"model": {**source.record, "model_type": source.spec.model_type}, "text": text.describe(),
                "held_out": held.describe()},
    )  # fmt: skip
    if out is not None and (done := finished(out, manifest, overwrite, (source.path, config.text))):
        return done
    stored = source.dtype
    with contextlib.ExitStack() as opened:
        if out is None:
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        else:
            folder = opened.enter_context(writing(out, manifest, resumable=True))
        # As `convert` calibrates: fp32 on a CPU, where half precision is slower, the stored dtype on a GPU.
        dtype = torch.float32 if device.type == "cpu" else stored
        stream = opened.enter_context(LayerStream(source, dtype, device))
        work = TensorStore(folder / WORK)
        with timed(manifest.seconds, "check"):
            stream.check()
        with timed(manifest.seconds, "watch"):
            watch = Watch(stream, text.ids, work, source.family.router, stored)
            moments.collect(stream, range(stream.num_layers), text.ids.split(1), work, config.seed, watch)
        with timed(manifest.seconds, "predict"):
            prediction = Prediction(stream, work, plan, config.budget, config.layers)
            suggested = prediction.allocated(config.budget)
        with timed(manifest.seconds, "judge"):
            curves = prediction.curves(held.ids, text.ids)
        records = _records(stream, work, prediction, suggested, stored, config.seqlen)
        losses = foreseen(prediction, suggested, *curves)
        mean = float(torch.stack([work[f"losses-{n:04d}"]["mean"] for n in range(len(text.ids))]).mean())
        manifest.metrics = verdicts.summary(records, mean, text.ids.shape, suggested, stored, losses)
        manifest.metrics["held_out"] = held.ids.numel() - len(held.ids)
        if out is not None:
            # A plan may be chosen by what it was judged on.
            known = sorted({passage for each in (text, held) for passage in overlap.passages(each)})
            _write(folder, manifest, records, suggested, known, config.report)
    return manifest


def windows(tokenizer: Any, config: DiagnoseConfig) -> tuple[corpus.Windows, corpus.Windows]:
    """What is looked at, as `convert` would calibrate on it, and what conversions are judged on: other windows of the
    text, spread over it, that share no passage with the first. Raises UserError where there are none."""
    looked = corpus.windows(tokenizer, config.text, config.windows, config.seqlen, seed=config.seed)
    wanted = math.ceil(config.windows * HELD_OUT)
    if config.text == corpus.EMBEDDED:
        others = corpus.windows(tokenizer, config.text, wanted, config.seqlen, evaluation=True)
    else:
        every = corpus.windows(tokenizer, config.text, sys.maxsize // config.seqlen, config.seqlen)
        seen = {row.numpy().tobytes() for row in looked.ids}
        others = every.take([n for n, row in enumerate(every.ids) if row.numpy().tobytes() not in seen])
        if not len(others.ids):
            # All of a short text would be looked at: a part of it is left for judging.
            count = len(looked.ids)
            left = _spread(count, min(wanted, count // 2))
            others, looked = looked.take(left), looked.take([n for n in range(count) if n not in left])
    repeated = overlap.overlapping(others, overlap.passages(looked))
    new = [n for n in range(len(others.ids)) if n not in repeated]
    if not new:
        raise UserError(
            f"text {record_name(config.text)!r} leaves nothing to judge on: beside {len(looked.ids)} window(s) of "
            f"{config.seqlen} tokens it has none that is new; give more text or a smaller --seqlen"
        )
    return looked, others.take([new[n] for n in _spread(len(new), min(wanted, len(new)))])


def _spread(count: int, wanted: int) -> list[int]:
    """So many of `count` numbers, far from each other."""
    return [int((n + 0.5) * count / wanted) for n in range(wanted)]


def _records(
    stream: LayerStream, work: TensorStore, prediction: Prediction, suggested: Plan, stored: torch.dtype, length: int
) -> list[dict[str, Any]]:
    """Everything about each layer as plain numbers."""
    plan, records = prediction.plan, []
    for i, (own, chosen) in enumerate(zip(stream.spec.layers, suggested.layers, strict=True)):
        tensors, found = work[stats_key(i)], prediction.layers[i]

        def stats(kind: Any, part: str, tensors: dict[str, Tensor] = tensors) -> dict[str, Any]:
            return kind(**{n.split(".")[1]: t for n, t in tensors.items() if n.startswith(f"{part}.")}).describe()

        eigenvalues = {name.split(".")[1]: v for name, v in found.items() if name.startswith("spectrum.")}
        rows = torch.zeros(1, 1, length, chosen.cached(own), dtype=stored)
        converted = chosen.layout != "gqa"
        gqa = int(tensors["cache.allocated"])
        records.append({
            "layer": i,
            "window": own.window,
            "num_heads": own.num_heads,
            "num_kv_heads": own.num_kv_heads,
            "gqa_cached": own.cached,
            "attention": stats(AttentionStats, "attention"),
            "geometry": stats(Geometry, "geometry"),
            "routing": stats(RoutingStats, "routing") if own.moe else None,
            "spectra": {name: v.tolist() for name, v in eigenvalues.items()},
            "effective_rank": {name: effective_rank(v) for name, v in eigenvalues.items()},
            "first_order": {
                layout: {str(b): None if math.isnan(v) else v for b, v in zip(BUDGETS, row, strict=True)}
                for layout, row in zip(LATENT_LAYOUTS, found["loss"].tolist(), strict=True)
            },
            "plan": {
                **dataclasses.asdict(chosen),
                "first_order": prediction.first_order(i, chosen) if converted else None,
                "uniform_rank": plan.layers[i].kv_lora_rank,
            },
            "coded": {
                str(bits): {"code": code.counts(widths[i]), "first_order": prediction.bits_lost(i, bits)}
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
