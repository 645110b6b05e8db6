"""Resolution of MODEL to a local directory: a directory, a GGUF file (dequantised once), or a hub id."""

from __future__ import annotations

import os
from pathlib import Path, PurePath
from typing import Any

from mlaforge import families
from mlaforge.artifact import Manifest, locked, sha256, writing
from mlaforge.checkpoint.reader import COMPANIONS, INDEX, SINGLE, read_config, read_index, read_model_config
from mlaforge.checkpoint.writer import rewriting
from mlaforge.runtime import UserError, cache_home, log, progress

# Timeout of the hub's first response.
HUB_SECONDS = 10.0
GGUF = ".gguf"
# Every tokenizer has one of these files.
TOKENIZER = "tokenizer.json"
VOCABULARIES = (TOKENIZER, "*.model", "vocab.*", "tekken.json")


def locate(model: str) -> Path:
    """Return the local directory of MODEL: a directory, a .gguf file (dequantised once), or a hub id.

    Raises UserError if it is none of these or cannot be fetched.
    """
    path = Path(model).expanduser()
    if path.suffix.lower() == GGUF:
        return from_gguf(path)
    if path.is_dir():
        # Absolute, so that even `.` has a name; links keep the user's name.
        return Path(os.path.abspath(path))
    if path.exists():
        raise UserError(f"{model} is a file; give a model directory, a .gguf file or a hub id such as org/name")
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise UserError(f"{model} does not exist; give a model directory, a .gguf file or a hub id such as org/name")
    return _from_hub(model)


def _from_hub(model: str, config_alone: bool = False) -> Path:
    """Return a hub model's directory in the local hub cache after fetching missing files; of the weights only those
    that the model loads. `config_alone`: config.json suffices."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalEntryNotFoundError

    local, absent = None, ["config.json"]
    try:
        # A model that is complete in the local cache needs no network.
        local = Path(snapshot_download(model, allow_patterns=["config.json"], local_files_only=True))
        if not (absent := _missing(local, config_alone)):
            return local
    except HFValidationError as error:
        raise UserError(f"{model!r} is neither a directory nor a hub id such as org/name") from error
    except LocalEntryNotFoundError:
        pass
    try:
        # Called first, because snapshot_download has no timeout for an unresponsive hub.
        info = HfApi().model_info(model, timeout=HUB_SECONDS)
        names = [file.rfilename for file in info.siblings or ()]
        beside = [name for name in names if _belongs(name, ("*.json", *COMPANIONS)) and name != INDEX]
        weights = [SINGLE] if SINGLE in names else [INDEX] if INDEX in names else []
        patterns = ["config.json"] if config_alone else [*beside, *weights]
        local = Path(snapshot_download(model, allow_patterns=patterns, etag_timeout=5))
        if shards := [name for name in _missing(local, config_alone) if name in names]:
            snapshot_download(model, allow_patterns=shards, etag_timeout=5)
        if missing := [name for name in _missing(local, config_alone) if name != TOKENIZER]:
            raise UserError(f"the hub's {model!r} has no {missing[0]}; only models in safetensors are read")
        return local
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no answer"
        raise UserError(
            f"the hub does not give {model!r} (status {status}): check the name and your access token, or give a "
            "local model directory or .gguf file"
        ) from error
    except (HTTPError, OSError, RuntimeError) as error:
        if local is not None and absent == [TOKENIZER]:
            return local
        offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        raise UserError(
            f"the local cache lacks {absent[0]} of {model!r}, and the hub cannot be reached{offline}; give a local "
            "model directory or .gguf file, or copy the model into the hub cache"
        ) from error


def _belongs(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a file of a repository belongs to the model: other folders hold other formats."""
    return any(PurePath(name).match(pattern) and name.count("/") == pattern.count("/") for pattern in patterns)


def _missing(directory: Path, config_alone: bool) -> list[str]:
    """Return the files that a model directory lacks: config.json, the weights in its index, any tokenizer."""
    required = ["config.json"]
    if not config_alone and not any(path for pattern in VOCABULARIES for path in directory.glob(pattern)):
        required.append(TOKENIZER)
    if not config_alone and not (directory / SINGLE).is_file():
        try:
            required += sorted(set(map(str, read_index(directory).values()))) or [SINGLE]
        except UserError:
            required.append(INDEX)
    return [name for name in required if not (directory / name).is_file()]


def find_config(model: str) -> dict[str, Any]:
    """Return config.json of MODEL (a config.json, a directory, a .gguf file or a hub id) without its weights."""
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".json":
        return families.canonical(read_config(path.parent, path.name))
    if path.suffix.lower() == GGUF and path.is_file():
        from mlaforge.checkpoint.gguf_model import GgufModel

        return GgufModel(path).config
    if path.exists() or model.count("/") != 1 or model.startswith((".", "/", "~")):
        return read_model_config(locate(model))
    return families.canonical(read_config(_from_hub(model, config_alone=True)))


def from_gguf(path: Path) -> Path:
    """Dequantise a GGUF file to fp32 in the cache and return that directory. The cache is keyed by the file's SHA-256;
    concurrent calls wait."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; give a .gguf file or a model directory")
    out = cache_home() / "dequantised" / f"{path.stem}-{sha256(path)[:12]}"
    if not (out / "config.json").is_file():
        with locked(out.with_name(f".{out.name}.lock"), str(out), wait=True):
            if not (out / "config.json").is_file():
                _dequantise(path, out)
    return out


def _dequantise(path: Path, out: Path) -> None:
    from transformers import AutoTokenizer

    from mlaforge.checkpoint.gguf_model import GgufModel

    model = GgufModel(path)
    log(f"dequantising {path.name} once into {out}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except (ValueError, KeyError, IndexError, NotImplementedError, OSError, RuntimeError, TypeError) as error:
        raise UserError(f"the tokenizer in {path} cannot be read: {' '.join(str(error).split())[:200]}") from error
    with writing(out, Manifest("gguf", {}, {"file": path.name, "sha256": sha256(path)})) as partial:
        tokenizer.save_pretrained(partial)
        with rewriting(None, partial, model.config) as writer:
            for name in progress(model.names, f"dequantise {path.name}"):
                writer.add(name, model.tensor(name))
