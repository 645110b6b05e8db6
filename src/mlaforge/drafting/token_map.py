"""The tokens that a draft head can propose: what `mlaforge draft vocab` wrote."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from mlaforge.artifact import Manifest
from mlaforge.checkpoint.eagle3 import OFFSETS, target_ids
from mlaforge.runtime import UserError

STAGE, FILE = "draft vocab", "vocabulary.safetensors"


def read(directory: Path, vocab_size: int) -> Tensor:
    """The token ids of a vocabulary that `run` wrote. Raises UserError for another model's, or none."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    manifest = Manifest.load(directory)
    if manifest is None or manifest.stage != STAGE:
        raise UserError(f"{directory} is not what `mlaforge draft vocab` wrote")
    try:
        stored = load_file(directory / FILE)
        d2t, t2d = stored["d2t"], stored["t2d"]
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(f"{directory / FILE} is damaged: {error}") from error
    if len(t2d) != vocab_size:
        raise UserError(f"the vocabulary in {directory} is of {len(t2d)} tokens, the model's has {vocab_size}")
    try:
        return target_ids(d2t, t2d, vocab_size, OFFSETS)[1]
    except UserError as error:
        raise UserError(f"{directory / FILE} is damaged: {error}") from error
