"""Draft heads of all kinds, recognised by the architecture in config.json."""

from __future__ import annotations

from pathlib import Path

import torch

from mlaforge.checkpoint import block_head, eagle3
from mlaforge.checkpoint.reader import read_config
from mlaforge.modeling.block_head import BlockHead
from mlaforge.modeling.eagle3 import Eagle3Head
from mlaforge.runtime import UserError

DraftHead = Eagle3Head | BlockHead
ARCHITECTURES = (eagle3.ARCHITECTURE, block_head.ARCHITECTURE)
# Of block heads by other tools, which `draft import` converts.
FOREIGN_BLOCK = "DFlashDraftModel"


def read_head(directory: Path, num_layers: int | None) -> DraftHead:
    """Load a head in fp32 on the CPU for a target of `num_layers` layers; None for an unknown target. Raises UserError
    for an invalid config or tensor."""
    architectures = read_config(directory).get("architectures") or ()
    if block_head.ARCHITECTURE in architectures:
        return block_head.read_head(directory, num_layers)
    if FOREIGN_BLOCK in architectures:
        raise UserError(f"{directory} is a block head of another tool; import it first (mlaforge draft import)")
    return eagle3.read_head(directory, num_layers)


def write_head(head: DraftHead, directory: Path, dtype: torch.dtype = torch.float16) -> None:
    """Write a head of any kind to a folder. Raises UserError for a tensor that overflows in its dtype."""
    if isinstance(head, BlockHead):
        block_head.write_head(head, directory, dtype)
    else:
        eagle3.write_head(head, directory, dtype)
