"""Token indexes in a checkpoint: their fields in config.json and their shard, beside the model's unchanged shards.

`convert` adds indexes to the model that it writes, `sparsify` to an existing one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlaforge.checkpoint import loading
from mlaforge.checkpoint.reader import INDEX, Reader
from mlaforge.families.spec import ModelSpec

INDEX_SHARD = "model-index.safetensors"


def layer_kinds(spec: ModelSpec, share: int = 1) -> list[str]:
    """Return `indexer_types` for config.json: layers with a sliding window are dense; of every `share` consecutive
    others, the first has an index."""
    full = [i for i, layer in enumerate(spec.layers) if layer.window is None]
    kinds = ["dense"] * spec.num_layers
    for number, layer in enumerate(full):
        kinds[layer] = "shared" if number % share else "full"
    return kinds


def index_fields(kinds: list[str], topk: int, width: int, sink: int, window: int, stride: int = 0) -> dict[str, Any]:
    """Return the fields of config.json that describe indexes."""
    return {
        "index_kind": "pairs",
        "index_topk": topk,
        "index_head_dim": width,
        "index_sink": sink,
        "index_window": window,
        "index_stride": stride,
        "indexer_types": kinds,
    }


def add_indexes(directory: Path, settings: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Add index tensors to the sharded model in `directory`, and replace its config.json by `settings`. Raises
    UserError if its tensors then do not fit its config."""
    from safetensors.torch import save_file

    stored = {n: (t.to(dtype) if t.is_floating_point() else t).contiguous() for n, t in tensors.items()}
    save_file(stored, directory / INDEX_SHARD, metadata={"format": "pt"})
    weight_map = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
    # Indexes that the model had before are replaced.
    weight_map = {name: shard for name, shard in weight_map.items() if shard != INDEX_SHARD}
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    index = {"metadata": {"total_size": size}, "weight_map": weight_map | dict.fromkeys(stored, INDEX_SHARD)}
    (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    with Reader(directory) as reader:
        reader.check_shapes(*loading.expected_tensors(settings))
