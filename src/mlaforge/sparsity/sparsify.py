"""`sparsify`: add token indexes to a model, or replace those of a sparse one, so that decoding reads only selected
tokens.

The model runs once over a text, one layer at a time; each layer's index is computed from the statistics of its queries
and keys (factorization/token_index.py). OUT contains MODEL's shards unchanged, one more shard with the indexes, and a
config.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlaforge.artifact import WORK, Manifest, finished, record_names, writing
from mlaforge.checkpoint.converted_config import check_selection, is_sparse, with_current_code
from mlaforge.checkpoint.index_files import INDEX_SHARD, add_indexes, index_fields, layer_kinds
from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.checkpoint.reader import INDEX, SINGLE
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.checkpoint.writer import copy_companions, copy_model_code
from mlaforge.config import by_keywords
from mlaforge.data import corpus, overlap
from mlaforge.factorization.layer import mla_classes
from mlaforge.factorization.observation import learn_indexes
from mlaforge.planning.plan import plan_of
from mlaforge.planning.selection import index_width
from mlaforge.runtime import UserError, log, resolve_device, timed
from mlaforge.sparsity.config import SparsifyConfig
from mlaforge.sparsity.placement import BUDGET_FRACTIONS, WINDOW_PER_BUDGET, Divergences, place_indexes
from mlaforge.tensor_store import TensorStore

RENAMED_SINGLE = "model-00001-of-00001.safetensors"


def settings(source: SourceModel, config: SparsifyConfig) -> dict[str, Any]:
    """Return config.json of the result. Raises UserError for contradictory options, and for a model with sliding
    windows only."""
    check_selection(config.topk, config.sink, config.window, config.width)
    raw, spec = with_current_code(source.config), source.spec
    kinds = layer_kinds(spec, config.share)
    if "full" not in kinds:
        raise UserError(f"{source} has no layer without a sliding window; there is nothing to make sparse")
    layer = spec.layers[0]
    dense_fields = {} if source.converted else {
        **mla_classes(raw), "kv_lora_rank": 0, "qk_nope_head_dim": layer.head_dim, "v_head_dim": layer.head_dim,
        "softmax_scale": spec.softmax_scale, "mla_layer_types": ["gqa"] * spec.num_layers,
        "mla_kv_lora_ranks": [0] * spec.num_layers,
    }  # fmt: skip
    width = config.width or index_width(plan_of(raw, spec))
    return {
        **{name: value for name, value in raw.items() if name not in ("_name_or_path", "transformers_version")},
        **dense_fields,
        **index_fields(kinds, config.topk, width, config.sink, config.window, config.stride),
    }


def run(model: str, out: Path, config: SparsifyConfig, overwrite: bool = False) -> Manifest:
    """Write the sparse version of MODEL, original or converted, into the new directory `out`; return its manifest.

    Raises UserError for invalid inputs; `out` is always either complete or untouched.
    """
    source = SourceModel.open(model)
    if is_sparse(source.config):
        # Its indexes are replaced.
        source = source.dense()
    measured = config.placement == "measured"
    output_config = settings(source, dataclasses.replace(config, share=1) if measured else config)
    if config.share > 1 and not measured:
        log(f"share = {config.share}: the sharing layers are not measured; --placement measured loses far less")
    device = resolve_device(config.device)
    windows = corpus.windows(source.tokenizer, config.text, config.nsamples, config.seqlen, seed=config.seed)
    texts = [windows, *([long_windows(source, config)] if measured else [])]
    for text in texts:
        source.check_tokens(text.ids)
    options = {name: value for name, value in dataclasses.asdict(config).items() if name != "device"}
    manifest = Manifest(
        "sparsify",
        config=options | record_names(config, "text"),
        inputs={"model": {**source.record, "model_type": source.model_type}, "text": windows.describe()},
    )
    if previous := finished(out, manifest, overwrite, (source.path, config.text)):
        log(f"{out} is finished already")
        return previous
    dtype = torch.float32 if device.type == "cpu" else source.dtype
    losses: dict[int, float] = {}
    with writing(out, manifest, resumable=measured) as partial:
        work = TensorStore(partial / WORK)
        with LayerStream(source, dtype, device) as stream, timed(manifest.seconds, "index"):
            stream.check()
            if "index" not in work:
                work["index"] = learn_indexes(
                    stream, windows.ids, output_config["indexer_types"], output_config["index_head_dim"]
                )
            tensors = work["index"]
        with timed(manifest.seconds, "write"):
            write(source, partial, output_config, tensors)
        if measured:
            with LayerStream(partial, dtype, device) as stream, timed(manifest.seconds, "placement"):
                divergences = Divergences(stream, config.topk, 2 * config.share - 1 if config.share > 1 else 0)
                divergences.measure(list(texts[1].ids), work)
            output_config |= place_indexes(divergences, config.share)
            losses = dict(
                zip(divergences.layers, divergences.indexed[:, BUDGET_FRACTIONS.index(1.0)].tolist(), strict=True)
            )
            indexed_layers = {f".{i}." for i, kind in enumerate(output_config["indexer_types"]) if kind == "full"}
            with timed(manifest.seconds, "write"):
                write(
                    source,
                    partial,
                    output_config,
                    {n: t for n, t in tensors.items() if any(layer in n for layer in indexed_layers)},
                )
        passages_file = source.path / overlap.PASSAGES
        tuned = overlap.read_passages(passages_file) if passages_file.is_file() else []
        overlap.write_passages(partial, sorted({*tuned, *(p for text in texts for p in overlap.passages(text))}))
        per_token = output_config["index_head_dim"] * output_config["indexer_types"].count("full")
        manifest.metrics["cache"] = {"index_bytes_per_token": per_token}
        budgets = output_config.get("index_topk_per_layer") or [config.topk] * source.spec.num_layers
        manifest.metrics["layers"] = [
            {"kind": kind, "topk": None if kind == "dense" else budgets[i], "kl": losses.get(i)}
            for i, kind in enumerate(output_config["indexer_types"])
        ]
    return manifest


def long_windows(source: SourceModel, config: SparsifyConfig) -> corpus.Windows:
    """Return the windows for measured placement. Raises UserError if the text or the model's context is too short."""
    length = WINDOW_PER_BUDGET * config.topk
    if length > source.spec.max_position_embeddings:
        raise UserError(
            f"placement of topk = {config.topk} is measured on windows of {length} tokens, and the model's context is "
            f"{source.spec.max_position_embeddings}; give a smaller --topk, or --placement even"
        )
    try:
        return corpus.windows(source.tokenizer, config.text, config.nsamples, length, seed=config.seed)
    except corpus.TooShort:
        raise UserError(
            f"placement of topk = {config.topk} is measured on windows of {length} tokens, and text {config.text!r} "
            "has fewer; give more text, a smaller --topk, or --placement even"
        ) from None


def write(source: SourceModel, out: Path, output_config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write the model into the directory `out`: unchanged shards, index tensors, config, tokenizer and model code."""
    with source.weights() as reader:
        # Loaders ignore the index if a file has the name of a single-file checkpoint.
        names = {shard: RENAMED_SINGLE if shard == SINGLE else shard for shard in reader.shards if shard != INDEX_SHARD}
        weight_map = {name: names[shard] for name, shard in reader.weight_map.items() if shard in names}
    for shard, name in names.items():
        shutil.copyfile(source.path / shard, out / name)
    copy_companions(source.path, out)
    copy_model_code(out)
    (out / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    add_indexes(out, output_config, tensors, source.dtype)


sparsify = by_keywords(run, SparsifyConfig)
