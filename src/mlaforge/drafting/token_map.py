"""The tokens that a draft head can propose: what `mlaforge draft vocab` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlaforge.artifact import Manifest
from mlaforge.runtime import UserError

STAGE, FILE = "draft vocab", "vocabulary.safetensors"


def mapping(ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """d2t (offsets: target = draft + d2t[draft]) and t2d (whether it is there), of rising token ids."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return ids - torch.arange(len(ids)), t2d


def read(directory: Path, vocab_size: int) -> Tensor:
    """The token ids of a vocabulary that `run` wrote. Raises UserError for another model's, or none."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    manifest = Manifest.load(directory)
    if manifest is None or manifest.stage != STAGE:
        raise UserError(f"{directory} is not what `mlaforge draft vocab` wrote")
    try:
        found: dict[str, Any] = load_file(directory / FILE)
        ids: Tensor = found["d2t"] + torch.arange(len(found["d2t"]))
        size = len(found["t2d"])
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(f"{directory / FILE} is damaged: {error}") from error
    if size != vocab_size:
        raise UserError(f"the vocabulary in {directory} is of {size} tokens, the model's has {vocab_size}")
    if not torch.equal(found["t2d"].nonzero()[:, 0], ids):
        raise UserError(f"{directory / FILE} is damaged: d2t and t2d differ")
    return ids
