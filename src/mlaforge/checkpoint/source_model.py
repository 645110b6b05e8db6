"""SourceModel: a model directory, opened once per command."""

from __future__ import annotations

import dataclasses
import textwrap
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlaforge import families
from mlaforge.artifact import record_name
from mlaforge.checkpoint.converted_config import (
    SUFFIX,
    check_converted,
    check_selection,
    completed,
    is_converted,
    is_sparse,
)
from mlaforge.checkpoint.reader import Reader, check_files, fingerprint, read_config, read_model_config
from mlaforge.checkpoint.resolve import locate
from mlaforge.families.family import Family
from mlaforge.families.schema import GENERATION, check
from mlaforge.families.spec import ModelSpec
from mlaforge.runtime import UserError, resolve_dtype

GENERATION_CONFIG = "generation_config.json"
# Part of the names of index tensors.
INDEXES = ".self_attn.index."


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """Return the ModelSpec of a config.json; for a converted model, that of its original. Raises UserError for an
    unsupported family and for an invalid field."""
    spec = families.read_spec(_original(config))
    if is_converted(config):
        check_converted(config, spec)
    return spec


def family_of(config: dict[str, Any]) -> Family:
    """Return the family of a config.json; for a converted model, that of its original. Raises UserError for an
    unsupported family."""
    return families.family_of(_original(config))


def _original(config: dict[str, Any]) -> dict[str, Any]:
    model_type = config.get("model_type")
    return {**config, "model_type": model_type.removesuffix(SUFFIX)} if isinstance(model_type, str) else config


def stored_dtype(config: dict[str, Any]) -> torch.dtype:
    """Return the dtype that a config.json declares, float32 if none. Raises UserError for an unsupported one."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    # PyTorch's aliases, such as half, which transformers accepts.
    dtype = getattr(torch, name, None)
    return resolve_dtype(str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else name, torch.float32)


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a model directory without running code from it. Raises UserError."""
    from transformers import PreTrainedTokenizerFast

    check_files(directory)
    if (directory / "tekken.json").exists() and not (directory / "tokenizer.json").exists():
        raise UserError(
            f"{directory} has only a tekken.json, which is not supported; copy the same model's tokenizer.json and "
            "tokenizer_config.json there"
        )
    try:
        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # tokenizers raises nothing narrower for a file that it cannot read
        reason = textwrap.shorten(str(error), 160, placeholder=" …")
        raise UserError(
            f"{directory} has no tokenizer that can be read (tokenizer.json, tokenizer_config.json: {reason}); copy it "
            "there"
        ) from error


@dataclasses.dataclass(frozen=True)
class SourceModel:
    """An original or converted model on disk. `path`: its directory; `name`: its name in manifests; `config`: its
    config.json. Other properties are read on first use and cached; weights are not."""

    path: Path
    name: str
    config: dict[str, Any]
    # Tensors with this text in their names are not read.
    without: str | None = None

    @classmethod
    def open(cls, model: str | Path | SourceModel) -> SourceModel:
        """Open MODEL: a directory, a .gguf file (dequantised once) or a hub id; a SourceModel is returned unchanged.

        Raises UserError if it is none of these, cannot be fetched, has no config.json, or has a field of a wrong type
        in it or in generation_config.json.
        """
        if isinstance(model, SourceModel):
            return model
        path = locate(str(model))
        check_files(path)
        config = read_model_config(path)
        source = cls(path, record_name(model), completed(config) if is_converted(config) else config)
        check(source.generation_config, GENERATION, str(path / GENERATION_CONFIG))
        return source

    def __str__(self) -> str:
        return str(self.path)

    def dense(self) -> SourceModel:
        """Return a sparse model without its index: the input of `sparsify`. Raises UserError if it is not sparse."""
        if not is_sparse(self.config):
            raise UserError(f"{self} is not sparse: it has no index that --dense could leave out")
        config = {name: value for name, value in self.config.items() if not name.startswith("index")}
        if all(kind == "gqa" for kind in config["mla_layer_types"]):
            config = _original(config)
        return dataclasses.replace(self, config=completed(config) if is_converted(config) else config, without=INDEXES)

    def with_selection(self, dense: bool, topk: int | None) -> SourceModel:
        """Return the model with the options of a load: without its index if `dense`, with another `topk` unless None;
        budgets of layers then change in proportion.

        Raises UserError if either is for another model, for both, and for a `topk` that is too small.
        """
        if dense and topk is not None:
            raise UserError(f"dense reads all tokens, and topk = {topk} selects some of them; leave one out")
        if dense:
            return self.dense()
        if topk is None:
            return self
        if not is_sparse(self.config):
            raise UserError(f"{self} is not sparse: it has no index for topk = {topk} (mlaforge sparsify adds one)")
        _ = self.spec  # raises for an invalid config
        sink, window = self.config.get("index_sink") or 0, self.config["index_window"]
        check_selection(topk, sink, window)
        budgets, ratio = self.config.get("index_topk_per_layer"), topk / self.config["index_topk"]
        if budgets:
            budgets = [max(sink + window + 1, round(ratio * budget)) for budget in budgets]
        return dataclasses.replace(self, config={**self.config, "index_topk": topk, "index_topk_per_layer": budgets})

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type"))

    @property
    def converted(self) -> bool:
        """Whether it is a converted model."""
        return is_converted(self.config)

    @cached_property
    def family(self) -> Family:
        """Raises UserError for an unsupported family."""
        return family_of(self.config)

    @cached_property
    def spec(self) -> ModelSpec:
        """Raises UserError for an unsupported family, and for a config.json that is invalid for it."""
        return read_spec(self.config)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """Its generation_config.json; empty if it has none."""
        return read_config(self.path, GENERATION_CONFIG) if (self.path / GENERATION_CONFIG).exists() else {}

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype that config.json declares; float32 if none."""
        return stored_dtype(self.config)

    def weights(self) -> Reader:
        """Return a lazy reader of the model's tensors. Raises UserError as `Reader` does."""
        return Reader(self.path, self.without)

    @cached_property
    def tokenizer(self) -> Any:
        """Raises UserError if the model has no readable tokenizer."""
        return load_tokenizer(self.path)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over config, weights and companions (`reader.fingerprint`); reads every file once."""
        return fingerprint(self.path)

    @property
    def record(self) -> dict[str, str]:
        """Its record in a manifest's inputs."""
        return {"path": self.name, "sha256": self.fingerprint}

    def check_tokens(self, *texts: Tensor) -> None:
        """Raises UserError for a text with a token id outside the model's vocabulary."""
        size, largest = self.config.get("vocab_size", 0), max(int(ids.max()) for ids in texts)
        if largest >= size:
            raise UserError(
                f"the tokenizer in {self} gives token {largest}, but the model's vocabulary has {size}: it belongs "
                "to another model"
            )
