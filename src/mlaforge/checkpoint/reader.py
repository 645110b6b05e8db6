"""Reading of model directories: config.json, lazy and checked access to tensors, and fingerprints.

Only safetensors and GGUF are read, never pickle. The source is never written to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from mlaforge import families
from mlaforge.artifact import MANIFEST, sha256
from mlaforge.checkpoint import misfits, mxfp4
from mlaforge.checkpoint.converted_config import SUFFIX
from mlaforge.checkpoint.mxfp4 import SCALES
from mlaforge.families.schema import OBJECT, check, check_config
from mlaforge.ops.mxfp4 import NAN_SCALE
from mlaforge.runtime import UserError, log, progress

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# Folder of named chat templates, beside the default one.
TEMPLATES = "additional_chat_templates"
# Files of a model beside weights and config: tokenizer, chat template, generation defaults, licence.
COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "tekken.json",
    "*.jinja", f"{TEMPLATES}/*.jinja", "chat_template.json", "*processor_config.json",
    "generation_config.json", "LICENSE*", "LICENCE*", "NOTICE*", "*POLICY*",
)  # fmt: skip
# safetensors' names of the supported dtypes.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
FLOATING, WHOLE = ("F64", "F32", "F16", "BF16"), ("I64", "I32", "U8", "BOOL")
# Old checkpoints contain the RoPE table, which transformers computes; it is ignored.
TABLE = "rotary_emb.inv_freq"


def check_files(directory: Path) -> None:
    """Raises UserError for the first entry of a model directory that is not a regular file: reading a pipe would block
    for ever."""
    for pattern in ("*.json", "*.safetensors", *COMPANIONS):
        for path in directory.glob(pattern):
            if path.exists() and not (path.is_file() or path.is_dir()):
                raise UserError(f"{path} is not a file (but a pipe, a socket or a device); fetch the model again")


def read_config(directory: Path, name: str = "config.json") -> dict[str, Any]:
    """Return config.json, or another JSON file of a model, as a dict. Raises UserError if it is missing or not a JSON
    object."""
    path = directory / name
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{path} is not a file (but a pipe, a socket or a device); fetch the model again")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{directory} has no {name}; a Hugging Face model directory has one") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; fetch the model again") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise UserError(f"{path} is nested too deeply to be read") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no JSON object; a Hugging Face model's {name} is one")
    return config


def read_index(directory: Path) -> dict[str, Any]:
    """Return tensor name -> file from the index of sharded weights; empty if there is no index. Raises UserError for an
    invalid one."""
    path = directory / INDEX
    if not path.is_file():
        return {}
    index = read_config(directory, INDEX)
    check(index, {"metadata": OBJECT}, str(path))
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path} is not a safetensors index: it has no 'weight_map'; fetch the model again")
    return weight_map


def read_model_config(directory: Path) -> dict[str, Any]:
    """Return config.json of a model directory, corrected as transformers loads it: the model_type of its class, no
    `tie_word_embeddings` if the head is stored, and MXFP4 only if tensors are packed. Raises UserError as `read_config`
    does, and for an invalid field."""
    config = families.canonical(read_config(directory))
    if str(config.get("model_type")).removesuffix(SUFFIX) in families.families():
        check_config(config)
    tied, packed = bool(config.get("tie_word_embeddings")), mxfp4.is_packed(config)
    names = stored_names(directory) if tied or packed else set()
    if tied and misfits.HEAD in names:
        config["tie_word_embeddings"] = False
    if packed and names and not any(name.endswith(mxfp4.BLOCKS) for name in names):
        log(f"{directory}: config.json declares MXFP4, but no tensor is packed; the weights are read as stored")
        del config["quantization_config"]
    return config


def stored_names(directory: Path) -> set[str]:
    """Return the tensor names of a model directory without reading tensors; empty if its weights cannot be read."""
    from safetensors import SafetensorError, safe_open

    if not (directory / SINGLE).is_file():
        return set(read_index(directory))
    try:
        with safe_open(directory / SINGLE, framework="pt") as file:
            return set(file.keys())
    except (SafetensorError, OSError):
        # The reader of the weights reports the error.
        return set()


class Reader:
    """Lazy access to the tensors of a safetensors directory, sharded or not, except those with `without` in their
    names."""

    def __init__(self, directory: Path, without: str | None = None):
        """Raises UserError for a missing or truncated shard, a pickle checkpoint, or a wrong index."""
        from safetensors import SafetensorError, safe_open

        self.directory = directory
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        self._names: dict[str, list[str]] = {}
        indexed = self._find_shards()
        for name in self.shards:
            path = directory / name
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except FileNotFoundError as error:
                raise UserError(f"{path} is missing, though {INDEX} names it; fetch the model again") from error
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} is truncated or not safetensors ({error}); fetch it again") from error
            self._names[name] = list(file.keys())
            self._file_of.update((name, file) for name in self._names[name] if not name.endswith(TABLE))
        for name in indexed:
            if name not in self._file_of and not name.endswith(TABLE):
                raise UserError(f"{directory} has no tensor {name!r}, though {INDEX} names it; fetch the model again")
        # Hide the tensors that the model does not use.
        prefixes = families.left_out(read_config(directory)) if (directory / "config.json").is_file() else ()
        self.left_out = [
            name for name in self._file_of if name.startswith(prefixes) or (without is not None and without in name)
        ]
        for name in self.left_out:
            del self._file_of[name]

    def _find_shards(self) -> list[str]:
        """Set `shards`, the files to read, by transformers' preference: a single file before an index. Returns the
        names in the index. Raises UserError if both are complete, because it is ambiguous which weights are meant."""
        weight_map = read_index(self.directory)
        shards = sorted(set(map(str, weight_map.values())))
        missing = [name for name in shards if not (self.directory / name).exists()]
        if (self.directory / SINGLE).is_file() and shards != [SINGLE]:
            if weight_map and not missing:
                raise UserError(
                    f"{self.directory} has two sets of weights, {SINGLE} and the {len(shards)} shards of {INDEX}; move "
                    "one of them out of the directory"
                )
            if weight_map:
                log(f"{self.directory}: {INDEX} is out of date ({missing[0]} is missing); {SINGLE} is read")
            self.shards = [SINGLE]
            return []
        if weight_map:
            if len(missing) == len(shards):
                raise UserError(
                    f"{self.directory / INDEX} names {len(shards)} files, all of which are missing, such as "
                    f"{missing[0]}: the index belongs to other weights, or they were not fetched"
                )
            self.shards = shards
            return list(weight_map)
        pickles = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in self.directory.glob(pattern)]
        if pickles:
            raise UserError(
                f"{self.directory} has only pickled weights ({pickles[0]}), which can run code and are never read; "
                "convert them to safetensors first"
            )
        raise UserError(f"{self.directory} has neither {SINGLE} nor {INDEX}; a model directory has one of them")

    @property
    def weight_map(self) -> dict[str, str]:
        """The shard of every tensor, including unused ones."""
        return {name: shard for shard, names in self._names.items() for name in names}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a tensor without reading it. Raises UserError for an unsupported one."""
        kind = self._file_of[name].get_slice(name).get_dtype()
        if kind not in DTYPES:
            raise UserError(f"{self.directory}: {name!r} is stored as {kind}; {', '.join(DTYPES)} are read")
        return DTYPES[kind]

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def check_shapes(
        self, expected: dict[str, tuple[int, ...]], tied: frozenset[str] = frozenset(),
        whole: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        """Raises UserError for the first tensor that is missing, unexpected, wrongly shaped, or integer unless it is
        among `whole`, which must be; reads no tensor."""
        again = "fetch the model again, config and weights from one place"
        vocabulary = {name: self.shape(name) for name in (misfits.EMBEDDING, misfits.HEAD) if name in self}
        if reason := misfits.explain(self._file_of, expected) or misfits.resized(vocabulary, expected):
            raise UserError(f"{self.directory} does not fit its config.json: {reason}")
        for name in expected:
            if name not in self and name not in tied:
                raise UserError(f"{self.directory} lacks the tensor {name!r} that its config.json calls for; {again}")
        for name in self:
            if name not in expected:
                raise UserError(
                    f"{self.directory} has a tensor {name!r} that its config.json does not call for; {again}"
                )
            if self.shape(name) != expected[name]:
                raise UserError(
                    f"{self.directory}: {name!r} has shape {list(self.shape(name))}, its config.json calls for "
                    f"{list(expected[name])}; {again}"
                )
            kind = self._file_of[name].get_slice(name).get_dtype()
            kinds = self._kinds(name, whole)
            if kind not in kinds:
                raise UserError(f"{self.directory}: {name!r} is stored as {kind}; {', '.join(kinds)} are read; {again}")

    def _kinds(self, name: str, whole: frozenset[str]) -> tuple[str, ...]:
        """Return safetensors' names of the dtypes that a tensor may have."""
        return WHOLE if name in whole else FLOATING

    def check(
        self, expected: dict[str, tuple[int, ...]], tied: frozenset[str] = frozenset(),
        whole: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        """Same as `check_shapes`, and raises UserError for the first tensor with NaN or infinity. Integer tensors are
        not read, except for MXFP4 scales: 255 is their NaN."""
        self.check_shapes(expected, tied, whole)
        if self.left_out:
            log(f"left out: {len(self.left_out)} unused tensors, such as {self.left_out[0]}")
        for name in progress(self, "check weights", len(self._file_of)):
            if name.endswith(SCALES) and name in whole and bool((self[name] == NAN_SCALE).any()):
                raise UserError(
                    f"{self.directory}: {name!r} holds the scale {NAN_SCALE}, MXFP4's NaN; fetch the model again"
                )
            if name not in whole and not is_finite(self[name]):
                raise UserError(f"{self.directory}: {name!r} holds NaN or infinity; fetch the model again")


def is_finite(tensor: Tensor) -> bool:
    """Return whether a floating-point tensor holds neither NaN nor infinity."""
    # isfinite takes twenty times as long, and more memory.
    return not tensor.numel() or all(bool(torch.isfinite(bound)) for bound in tensor.aminmax())


def fingerprint(directory: Path) -> str:
    """Return the SHA-256 over config.json, every weight file and the companions of a model directory (a chat template
    affects what is generated). Raises UserError if it has no config."""
    read_config(directory)
    digest = hashlib.sha256()
    for path in sorted([directory / "config.json", *directory.glob("*.safetensors"), *companions(directory)]):
        digest.update(f"{path.relative_to(directory).as_posix()} {sha256(path)}\n".encode())
    return digest.hexdigest()


def companions(directory: Path) -> list[Path]:
    """Return the files beside weights and config that a copy of the model needs."""
    files = {path for pattern in COMPANIONS for path in directory.glob(pattern) if path.is_file()}
    return sorted(path for path in files if path.name != MANIFEST)
