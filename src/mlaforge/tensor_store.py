"""On-disk store for the tensors of an unfinished stage: its results, and those passed from layer to layer.

Files are written atomically, so that a stage killed at any moment resumes from all that it had finished. Memory use
does not grow with the number of layers.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor


class TensorStore:
    """A folder of safetensors files, one per name. A name without tensors serves as a marker."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def __contains__(self, name: str) -> bool:
        return self._path(name).exists()

    def __setitem__(self, name: str, tensors: dict[str, Tensor]) -> None:
        from safetensors.torch import save_file

        unfinished = self.folder / f"{name}.unfinished"
        save_file({key: tensor.detach().contiguous().cpu() for key, tensor in tensors.items()}, unfinished)
        os.replace(unfinished, self._path(name))

    def __getitem__(self, name: str) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        return load_file(self._path(name))

    def part(self, name: str, start: str) -> dict[str, Tensor]:
        """Return the tensors of a file whose keys begin with `start`, without reading the others."""
        from safetensors import safe_open

        with safe_open(self._path(name), framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys() if key.startswith(start)}  # noqa: SIM118 (no mapping)

    def drop(self, start: str) -> None:
        """Delete every name that begins with `start`."""
        for path in self.folder.glob(f"{start}*.safetensors"):
            path.unlink()
