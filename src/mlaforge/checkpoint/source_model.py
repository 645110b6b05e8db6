"""A model directory, opened once per command: what every stage asks of the model that it is given."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlaforge import families
from mlaforge.artifact import record_name
from mlaforge.checkpoint.reader import fingerprint, read_config
from mlaforge.checkpoint.resolve import locate
from mlaforge.families.family import Family
from mlaforge.families.spec import ModelSpec
from mlaforge.runtime import UserError, resolve_dtype

SUFFIX = "_mla"


def is_converted(config: dict[str, Any]) -> bool:
    """Whether a config.json is one of ours."""
    return str(config.get("model_type")).endswith(SUFFIX) and "mla_layer_types" in config


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """The ModelSpec of a config.json, original or converted; UserError for an unsupported family."""
    return family_of(config).read_spec(config)


def family_of(config: dict[str, Any]) -> Family:
    """The family of a config.json, for a converted one its original's; UserError for an unsupported one."""
    model_type = config.get("model_type")
    own = {"model_type": model_type.removesuffix(SUFFIX)} if isinstance(model_type, str) else {}
    return families.family_of({**config, **own})


def stored_dtype(config: dict[str, Any]) -> torch.dtype:
    """The dtype that a config.json declares; float32 where it declares none."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return resolve_dtype(name, torch.float32)


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer of a model directory; no code from it is run."""
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{directory} has no tokenizer that can be read (tokenizer.json); copy it there") from error


@dataclasses.dataclass(frozen=True)
class SourceModel:
    """An original or converted model on disk: `path`, its directory; `name`, as manifests call it; `config`, its
    config.json. What costs more than that is read when it is first asked for, and kept; no weight is."""

    path: Path
    name: str
    config: dict[str, Any]

    @classmethod
    def open(cls, model: str | Path | SourceModel) -> SourceModel:
        """MODEL as users call it: a directory, a .gguf file (dequantised once) or a hub id; one that is open stays so.

        Raises UserError where it is none of these, cannot be fetched, or has no config.json.
        """
        if isinstance(model, SourceModel):
            return model
        path = locate(str(model))
        return cls(path, record_name(model), read_config(path))

    def __str__(self) -> str:
        return str(self.path)

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type"))

    @property
    def converted(self) -> bool:
        """Whether mlaforge made it."""
        return is_converted(self.config)

    @cached_property
    def family(self) -> Family:
        """Raises UserError for an unsupported family."""
        return family_of(self.config)

    @cached_property
    def spec(self) -> ModelSpec:
        """Raises UserError for an unsupported family, and for a config.json that makes none of its models."""
        return read_spec(self.config)

    @cached_property
    def dtype(self) -> torch.dtype:
        """What its config.json declares; float32 where it declares none."""
        return stored_dtype(self.config)

    @cached_property
    def tokenizer(self) -> Any:
        """Raises UserError where it has none that can be read."""
        return load_tokenizer(self.path)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over config, weights and companions (`reader.fingerprint`): every file is read, once."""
        return fingerprint(self.path)

    @property
    def record(self) -> dict[str, str]:
        """How a manifest's inputs tell it."""
        return {"path": self.name, "sha256": self.fingerprint}

    def check_tokens(self, *texts: Tensor) -> None:
        """Raises UserError where a text has a token id that the model has no embedding for."""
        size, largest = self.config.get("vocab_size", 0), max(int(ids.max()) for ids in texts)
        if largest >= size:
            raise UserError(
                f"the tokenizer in {self} gives token {largest}, but the model's vocabulary has {size}: it is "
                "another model's tokenizer"
            )
