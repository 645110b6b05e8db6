"""Model directories: finding and checking the source, reading it lazily, writing shards, loading strictly.

Only safetensors and GGUF are read, never pickle. The source is never written to.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from mlaforge import families
from mlaforge.artifact import MANIFEST, sha256
from mlaforge.checkpoint import mxfp4
from mlaforge.families.spec import ModelSpec
from mlaforge.runtime import UserError, log, progress, resolve_dtype

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHARD_BYTES = 2 * 10**9
# What belongs to a model beside its weights and config: tokenizer, chat template, generation defaults, licence.
COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.jinja",
    "generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
SUFFIX = "_mla"
# safetensors' names of what the supported models store.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "U8": torch.uint8,
}  # fmt: skip
# Old checkpoints carry RoPE's table, which transformers computes; it is never read.
TABLE = "rotary_emb.inv_freq"


def read_config(directory: Path, name: str = "config.json") -> dict[str, Any]:
    """config.json as a dict; UserError where it is missing or not a JSON object."""
    path = directory / name
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{directory} has no {name}; a Hugging Face model directory has one") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; fetch the model again") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no JSON object; a Hugging Face model's config.json is one")
    return config


class Reader:
    """Lazy access to the tensors of a safetensors directory, sharded or not."""

    def __init__(self, directory: Path):
        """Raises UserError for a missing or truncated shard, a pickle checkpoint, or a lying index."""
        from safetensors import SafetensorError, safe_open

        self.directory = directory
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        indexed = self._index()
        for name in self.shards:
            path = directory / name
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except FileNotFoundError as error:
                raise UserError(f"{path} is missing, though {INDEX} names it; fetch the model again") from error
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} is truncated or not safetensors ({error}); fetch it again") from error
            self._file_of.update((name, file) for name in file.keys() if not name.endswith(TABLE))  # noqa: SIM118 (no mapping)
        for name in indexed:
            if name not in self._file_of and not name.endswith(TABLE):
                raise UserError(f"{directory} has no tensor {name!r}, though {INDEX} names it; fetch the model again")
        # What the model does not use is not there for anyone who reads through this.
        prefixes = families.left_out(read_config(directory)) if (directory / "config.json").is_file() else ()
        self.left_out = [name for name in self._file_of if name.startswith(prefixes)]
        for name in self.left_out:
            del self._file_of[name]

    def _index(self) -> list[str]:
        path = self.directory / INDEX
        if path.is_file():
            try:
                weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
                self.shards = sorted(set(map(str, weight_map.values())))
                return list(weight_map)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{path} is not a safetensors index; fetch the model again") from error
        if (self.directory / SINGLE).is_file():
            self.shards = [SINGLE]
            return []
        pickles = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in self.directory.glob(pattern)]
        if pickles:
            raise UserError(
                f"{self.directory} has only pickled weights ({pickles[0]}), which can run code and are never read; "
                "convert them to safetensors first"
            )
        raise UserError(f"{self.directory} has neither {SINGLE} nor {INDEX}; a model directory has one of them")

    def __enter__(self) -> Reader:
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
        """The dtype a tensor is stored in, the tensor itself not read."""
        return DTYPES[self._file_of[name].get_slice(name).get_dtype()]

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def check_shapes(self, expected: dict[str, tuple[int, ...]], tied: frozenset[str] = frozenset()) -> None:
        """Raises UserError for the first tensor that is missing, extra or wrongly shaped; reads no tensor."""
        again = "fetch the model again, config and weights from one place"
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

    def check(self, expected: dict[str, tuple[int, ...]], tied: frozenset[str] = frozenset()) -> None:
        """As `check_shapes`, and UserError for the first tensor that holds NaN or infinity."""
        self.check_shapes(expected, tied)
        if self.left_out:
            log(f"left out: {len(self.left_out)} tensors that the logits do not depend on, such as {self.left_out[0]}")
        for name in progress(self, "check weights", len(self._file_of)):
            if not torch.isfinite(self[name]).all():
                raise UserError(f"{self.directory}: {name!r} holds NaN or infinity; fetch the model again")


class Writer:
    """Writes tensors into shards of at most SHARD_BYTES, one shard in memory at a time, and the index last.

    A shard that is there already (the same tensors in the same order, from a run that was killed) is not made again.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.pending: dict[str, Callable[[], Tensor]] = {}
        self.size = 0
        self.total = 0
        self.shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes a tensor; it is held until its shard is full.

        Raises UserError for NaN or infinity: a source's weights are finite, so that its dtype holds too little.
        """
        self.promise(name, tuple(tensor.shape), tensor.dtype, lambda: tensor)

    def promise(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], Tensor]) -> None:
        """The same for a tensor that `make` gives when its shard is written, if it is not there already."""
        size = math.prod(shape) * dtype.itemsize
        if self.pending and self.size + size > SHARD_BYTES:
            self._flush()
        self.pending[name] = make
        self.size += size
        self.total += size

    def _made(self, name: str) -> Tensor:
        tensor = self.pending[name]()
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise UserError(f"{name!r} is not finite in {tensor.dtype}; write float32 or bfloat16 (--dtype)")
        return tensor.contiguous()

    def _flush(self) -> None:
        from safetensors.torch import save_file

        path = self.directory / f"shard-{len(self.shards):05d}.safetensors"
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            save_file({name: self._made(name) for name in self.pending}, unfinished, metadata={"format": "pt"})
            unfinished.rename(path)
        self.shards.append(list(self.pending))
        self.pending, self.size = {}, 0

    def finish(self) -> None:
        """Writes the last shard and the index, and gives the shards their customary names."""
        self._flush()
        count, weight_map = len(self.shards), {}
        for number, names in enumerate(self.shards):
            final = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self.directory / f"shard-{number:05d}.safetensors").rename(self.directory / final)
            weight_map.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
        (self.directory / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def is_converted(config: dict[str, Any]) -> bool:
    """Whether a config.json is one of ours."""
    return str(config.get("model_type")).endswith(SUFFIX) and "mla_layer_types" in config


def model_class(config: dict[str, Any]) -> tuple[Any, Any]:
    """The config class and the causal-LM class of a config.json, ours or transformers'."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if not is_converted(config):
        family = families.families().get(config["model_type"])
        config_class = CONFIG_MAPPING[family.computed_by or config["model_type"] if family else config["model_type"]]
        return config_class, MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    from mlaforge.modeling import configuration_mla, modeling_mla

    name = str(config["architectures"][0])
    return (
        getattr(configuration_mla, name.replace("ForCausalLM", "Config")),
        getattr(modeling_mla, name),
    )


def load_model(
    directory: Path, dtype: str = "auto", device: torch.device | str = "cpu", quantization: Any = None
) -> Any:
    """The causal LM of a model directory, original or converted, in evaluation mode, no code from it run.
    `quantization`: transformers' config of a library that packs the weights on loading.

    Strict: UserError for an unsupported family or any tensor that is missing, extra, wrongly shaped or not finite.
    """
    config = read_config(directory)
    families.family_of({**config, "model_type": str(config.get("model_type")).removesuffix(SUFFIX)})
    config_class, causal_lm = model_class(config)
    with Reader(directory) as reader:
        reader.check_shapes(*expected_tensors(config))
        left_out = set(reader.left_out)
    model, info = causal_lm.from_pretrained(
        directory,
        config=config_class.from_dict({**config, "model_type": config_class.model_type}),
        dtype=resolve_dtype(dtype, stored_dtype(config)),
        output_loading_info=True,
        local_files_only=True,
        use_safetensors=True,
        **({"quantization_config": quantization, "device_map": {"": device}} if quantization else {}),
    )
    unexpected = set(info["unexpected_keys"]) - left_out
    assert not (info["missing_keys"] or unexpected or info["mismatched_keys"]), info
    # Text from NaN looks like the text of a poor model, so that nobody would look for the reason here.
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise UserError(
                f"{directory}: {name!r} holds NaN or infinity in {tensor.dtype}; fetch the model again, or give "
                "another --dtype"
            )
    return model.eval() if quantization else model.eval().to(device)


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """The ModelSpec of a config.json, original or converted; UserError for an unsupported family."""
    return families.read_spec({**config, "model_type": str(config.get("model_type")).removesuffix(SUFFIX)})


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


def check_tokens(directory: Path, *texts: Tensor) -> None:
    """Raises UserError where a text has a token id that the model of `directory` has no embedding for."""
    size, largest = read_config(directory).get("vocab_size", 0), max(int(ids.max()) for ids in texts)
    if largest >= size:
        raise UserError(
            f"the tokenizer in {directory} gives token {largest}, but the model's vocabulary has {size}: it is "
            "another model's tokenizer"
        )


def skeleton(config: dict[str, Any]) -> Any:
    """The causal LM that a config.json describes, on the meta device. Raises UserError where it describes none."""
    config_class, causal_lm = model_class(config)
    method = (config.get("quantization_config") or {}).get("quant_method", "mxfp4")
    if method != "mxfp4":
        raise UserError(f"weights quantised with {method!r} are not read; give the checkpoint it was made from")
    try:
        with torch.device("meta"):
            return causal_lm(config_class(**{k: v for k, v in config.items() if k != "model_type"}))
    except (StrictDataclassError, ValueError, KeyError, AssertionError) as error:
        # A KeyError is a name, such as hidden_act's, that transformers has nothing for.
        reason = f"{error} is not known" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise UserError(f"config.json makes no {config['model_type']} model: {reason}") from error


def expected_tensors(config: dict[str, Any]) -> tuple[dict[str, tuple[int, ...]], frozenset[str]]:
    """Names and shapes that a config.json calls for, and the names that may be absent because they are tied."""
    model = skeleton(config)
    shapes = mxfp4.stored(config, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    tied = model.all_tied_weights_keys if getattr(model.config, "tie_word_embeddings", False) else ()
    return shapes, frozenset(tied)


def fingerprint(directory: Path) -> str:
    """SHA-256 over config.json, every weight file and the companions (a chat template decides what is generated) of
    a model directory; UserError where it has no config."""
    read_config(directory)
    digest = hashlib.sha256()
    for path in sorted([directory / "config.json", *directory.glob("*.safetensors"), *companions(directory)]):
        digest.update(f"{path.name} {sha256(path)}\n".encode())
    return digest.hexdigest()


def companions(directory: Path) -> list[Path]:
    """The files beside weights and config that a copy of the model needs."""
    found = {p for pattern in COMPANIONS for p in directory.glob(pattern) if p.is_file()}
    return sorted(p for p in found if p.name != MANIFEST)
