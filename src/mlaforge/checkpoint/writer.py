"""Writing of checkpoints: safetensors shards one at a time, the index last."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mlaforge.modeling
from mlaforge.checkpoint.reader import INDEX, companions, is_finite
from mlaforge.runtime import UserError

SHARD_BYTES = 2 * 10**9


class Writer:
    """Writer of shards of at most SHARD_BYTES, one shard in memory at a time, and the index last.

    An existing shard (of a killed run with the same tensors in the same order) is not written again.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.pending: dict[str, Callable[[], Tensor]] = {}
        self.size = 0
        self.total = 0
        self.shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, which stays in memory until its shard is full.

        Raises UserError for NaN or infinity: a source's weights are finite, so that the tensor overflows in its dtype.
        """
        self.promise(name, tuple(tensor.shape), tensor.dtype, lambda: tensor)

    def promise(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], Tensor]) -> None:
        """Add a tensor that `make` returns when its shard is written, unless the shard exists."""
        size = math.prod(shape) * dtype.itemsize
        if self.pending and self.size + size > SHARD_BYTES:
            self._flush()
        self.pending[name] = make
        self.size += size
        self.total += size

    def _checked(self, name: str) -> Tensor:
        tensor = self.pending[name]()
        if tensor.is_floating_point() and not is_finite(tensor):
            raise UserError(f"{name!r} is not finite in {tensor.dtype}; write float32 or bfloat16 (--dtype)")
        return tensor.contiguous()

    def _flush(self) -> None:
        from safetensors.torch import save_file

        path = self.directory / f"shard-{len(self.shards):05d}.safetensors"
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            save_file({name: self._checked(name) for name in self.pending}, unfinished, metadata={"format": "pt"})
            unfinished.rename(path)
        self.shards.append(list(self.pending))
        self.pending, self.size = {}, 0

    def finish(self) -> None:
        """Write the last shard and the index, and rename the shards to their customary names."""
        self._flush()
        count, weight_map = len(self.shards), {}
        for number, names in enumerate(self.shards):
            final = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self.directory / f"shard-{number:05d}.safetensors").rename(self.directory / final)
            weight_map.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
        (self.directory / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


@contextmanager
def rewriting(source: Path | None, out: Path, settings: dict[str, Any]) -> Iterator[Writer]:
    """Context manager: write the tensors of a checkpoint derived from the model directory `source` into `out`, then the
    index, `settings` as config.json, and the source's companions (tokenizer, ...)."""
    writer = Writer(out)
    yield writer
    writer.finish()
    (out / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if source is not None:
        copy_companions(source, out)


def copy_companions(source: Path, out: Path) -> None:
    """Copy the files of the model directory `source` beside weights and config into the directory `out`."""
    for path in companions(source):
        copy = out / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def copy_model_code(out: Path) -> None:
    """Copy the files of modeling/ that transformers loads from a checkpoint (trust_remote_code) into `out`."""
    for path in sorted(Path(mlaforge.modeling.__path__[0]).glob("*_mla.py")):
        shutil.copyfile(path, out / path.name)
