"""Where MODEL comes from: a directory, a GGUF file (dequantised once), or a hub id."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import torch

from mlaforge.artifact import Manifest, locked, sha256, writing
from mlaforge.checkpoint.reader import COMPANIONS, read_config
from mlaforge.runtime import UserError, cache_home, log

# How long to wait for the hub's first answer.
HUB_SECONDS = 10.0


def locate(model: str) -> Path:
    """The local directory of MODEL: a directory, a .gguf file (dequantised once), or a hub id.

    Raises UserError in one line where it is none of these or cannot be fetched.
    """
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return from_gguf(path)
    if path.is_dir():
        # With a name, even for `.`; links stay as the user called them.
        return Path(os.path.abspath(path))
    if path.exists():
        raise UserError(f"{model} is a file; give a model directory, a .gguf file or a hub id such as org/name")
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise UserError(f"{model} does not exist; give a model directory, a .gguf file or a hub id such as org/name")
    return _from_hub(model, ["*.json", "*.safetensors", *COMPANIONS])


def _from_hub(model: str, wanted: list[str]) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalEntryNotFoundError

    try:
        # What is complete in the local cache needs no network.
        return Path(snapshot_download(model, allow_patterns=wanted, local_files_only=True))
    except HFValidationError as error:
        raise UserError(f"{model!r} is neither a directory nor a hub id such as org/name") from error
    except LocalEntryNotFoundError:
        pass
    try:
        # Asked first, because snapshot_download would wait for a silent hub for ever.
        HfApi().model_info(model, timeout=HUB_SECONDS)
        return Path(snapshot_download(model, allow_patterns=wanted, etag_timeout=5))
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no answer"
        raise UserError(
            f"the hub does not give {model!r} (status {status}): check the name and your access token, or give a "
            "local model directory or .gguf file"
        ) from error
    except (HTTPError, OSError, RuntimeError) as error:
        raise UserError(
            f"{model!r} is not here and the hub cannot be reached; give a local model directory or .gguf file, or "
            "copy the model into the hub cache"
        ) from error


def find_config(model: str) -> dict[str, Any]:
    """config.json of MODEL without its weights: a config.json, a directory, a .gguf file or a hub id."""
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".json":
        return read_config(path.parent, path.name)
    if path.exists() or model.count("/") != 1 or model.startswith((".", "/", "~")):
        return read_config(locate(model))
    return read_config(_from_hub(model, ["config.json"]))


def from_gguf(path: Path) -> Path:
    """Dequantises a GGUF file once, to fp32, into the cache; later calls find it by the file's SHA-256, and one that
    comes meanwhile waits."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; give a .gguf file or a model directory")
    out = cache_home() / "gguf" / f"{path.stem}-{sha256(path)[:12]}"
    if not (out / "config.json").is_file():
        with locked(out.with_name(f".{out.name}.lock"), str(out), wait=True):
            if not (out / "config.json").is_file():
                _dequantise(path, out)
    return out


def _dequantise(path: Path, out: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        import accelerate  # noqa: F401 (only to say in words that one is missing)
        import gguf  # noqa: F401 (the same)
    except ImportError as error:
        raise UserError(f"reading .gguf files needs {error.name}: pip install 'mlaforge[gguf]'") from error
    log(f"dequantising {path.name} once into {out}")
    try:
        # Without the explicit request transformers would keep quantised blocks that it cannot save.
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except (ValueError, KeyError, IndexError, NotImplementedError, OSError, RuntimeError, struct.error) as error:
        # What transformers says of these speaks of JSON and of its own settings.
        damaged = isinstance(error, OSError | RuntimeError)
        why = "its header is damaged" if damaged else " ".join(str(error).split())[:200]
        raise UserError(f"{path} cannot be read as GGUF: {why}") from error
    with writing(out, Manifest("gguf", {}, {"file": path.name, "sha256": sha256(path)})) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
