"""Writing of a converted checkpoint: config, tensors, and the modeling files for transformers' trust_remote_code.

docs/checkpoint.md documents the format.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlaforge.checkpoint import loading
from mlaforge.checkpoint.reader import Reader
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.checkpoint.writer import copy_model_code, rewriting
from mlaforge.factorization.layer import LayerWeights


def write_checkpoint(
    source: SourceModel, out: Path, settings: dict[str, Any], layers: Collection[int],
    weights: Callable[[int], LayerWeights], dtype: torch.dtype,
) -> None:  # fmt: skip
    """Write weights, config, tokenizer and its companions, and the modeling files into the directory `out`.

    Tensors outside the attention of `layers` are copied from the source, floating-point ones cast to `dtype`: packed
    experts stay byte for byte. `weights` is called for one layer at a time.
    """
    settings = {**settings, "dtype": str(dtype).removeprefix("torch.")}
    settings.pop("torch_dtype", None)
    replaced = tuple(source.family.attention.format(layer=i) for i in layers)
    shapes, _, _ = loading.expected_tensors(settings)

    latest = functools.lru_cache(maxsize=1)(weights)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def copied(name: str) -> Tensor:
        return cast(reader[name])

    def solved(index: int, prefix: str, name: str) -> Tensor:
        return cast(latest(index).tensors.get(name.removeprefix(prefix), torch.zeros(shapes[name])))

    with Reader(source.path) as reader, rewriting(source.path, out, settings) as writer:
        for name in reader:
            if not name.startswith(replaced):
                stored = reader.dtype(name)
                kind = dtype if stored.is_floating_point else stored
                writer.promise(name, reader.shape(name), kind, functools.partial(copied, name))
        for index, prefix in zip(layers, replaced, strict=True):
            for name in (name for name in shapes if name.startswith(prefix)):
                kind = torch.int64 if name.endswith("rope_index") else dtype
                writer.promise(name, shapes[name], kind, functools.partial(solved, index, prefix, name))
    copy_model_code(out)
