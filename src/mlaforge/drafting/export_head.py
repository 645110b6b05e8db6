"""`draft export`: a copy of a draft head in another storage format, fp16 for vLLM and others, or int8.

The manifest contains the source's manifest, so the head's training text stays known (dataset.py).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from mlaforge.artifact import MANIFEST, Manifest, finished, record_name, writing
from mlaforge.checkpoint.draft_head import read_head, write_head
from mlaforge.checkpoint.reader import SINGLE, fingerprint
from mlaforge.drafting.config import DraftExportConfig
from mlaforge.drafting.dataset import EXPORT_STAGE
from mlaforge.runtime import UserError, timed

DTYPES = {"float16": torch.float16, "int8": torch.int8}


def _summary(source: Manifest) -> dict[str, Any]:
    """Return a manifest as a dictionary, without the loss of every step and with the first point of its curve only: the
    best and the last one are metrics."""
    metrics = {name: value for name, value in source.metrics.items() if name not in ("losses", "curve")}
    first = {"first": source.metrics["curve"][0]} if source.metrics.get("curve") else {}
    return {**dataclasses.asdict(source), "metrics": metrics | first}


def run(head: Path, out: Path, config: DraftExportConfig, overwrite: bool = False) -> Manifest:
    """Write the head in the directory `head` into the new directory `out`, with matrices in `config.dtype`.

    Raises UserError if it is not a draft head, if its captured states depend on the target (`draft import` resolves
    them), and for values outside the range of fp16.
    """
    if not head.is_dir():
        raise UserError(f"{head} is not a directory; give the directory of a draft head")
    source = Manifest.load(head)
    if source is None and (head / MANIFEST).exists():
        raise UserError(f"{head / MANIFEST} cannot be read; restore it, or remove it if the head's origin is unknown")
    manifest = Manifest(
        EXPORT_STAGE,
        config=dataclasses.asdict(config),
        inputs={
            "head": {
                "path": record_name(head),
                "sha256": fingerprint(head),
                "manifest": _summary(source) if source else None,
            }
        },
    )
    if previous := finished(out, manifest, overwrite, (head,)):
        return previous
    with writing(out, manifest) as partial, timed(manifest.seconds, "export"):
        exported = read_head(head, None)
        write_head(exported, partial, DTYPES[config.dtype])
        manifest.metrics = {
            "parameters": sum(parameter.numel() for parameter in exported.parameters()),
            "bytes": (partial / SINGLE).stat().st_size,
        }
    return manifest
