"""Comparison of an implementation's outputs with the reference, and storage of mismatching inputs for replay."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mlaforge import runtime

# Absolute and relative tolerance by the dtype of an op's first input; a mismatch exceeds both.
TOLERANCES = {torch.float32: (1e-5, 1e-4), torch.float16: (2e-3, 5e-3), torch.bfloat16: (1e-2, 3e-2)}


def differences(actual: Tensor, expected: Tensor, absolute: float, relative: float) -> str:
    """Return "" if the tensors agree, else a line that describes the difference and its worst position.

    Infinities and NaNs must be at the same positions; finite values must agree absolutely or relatively.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{list(actual.shape)} {actual.dtype} instead of {list(expected.shape)} {expected.dtype}"
    for name, mask in (("nan", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = mask(actual) != mask(expected)
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            return (
                f"{int(wrong.sum())} elements differ in {name}, first {at}: {actual[at]:g} instead of {expected[at]:g}"
            )
    a, e = actual.double(), expected.double()
    error = torch.where(e.isfinite(), (a - e).abs(), 0.0)
    excess = error / (absolute + relative * torch.where(e.isfinite(), e, 0.0).abs())
    if not excess.numel() or excess.max() <= 1:
        return ""
    at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    wrong_count = int((excess > 1).sum())
    return f"{wrong_count} of {excess.numel()} elements differ, worst {at}: {actual[at]:g} instead of {expected[at]:g}"


def check(name: str, inputs: Sequence[Any], actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Raise AssertionError if an output differs. The message contains the path of the saved inputs."""
    tolerances = TOLERANCES[inputs[0].dtype]
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if line := differences(a, e, *tolerances):
            directory = runtime.cache_home() / "mismatches"
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / f"{name.replace(' ', '-')}-{os.getpid()}-{len(list(directory.iterdir()))}.safetensors"
            save(path, inputs)
            raise AssertionError(f"{name}, output {i}: {line}; inputs saved as {path}")


def _leaves(inputs: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield inputs by index, and fields of dataclasses as `index.field`."""
    for i, value in enumerate(inputs):
        if dataclasses.is_dataclass(value):
            yield from ((f"{i}.{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value))
        else:
            yield str(i), value


def save(path: Path, inputs: Sequence[Any]) -> None:
    """Save tensors, numbers and dataclasses of these as one safetensors file. Strides and shared memory are preserved:
    each storage is saved once, complete."""
    storages: dict[str, Tensor] = {}
    described: dict[str, Any] = {}
    for name, value in _leaves(inputs):
        if isinstance(value, Tensor):
            flat = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
            key = f"{value.untyped_storage().data_ptr()} {value.dtype}"
            storages.setdefault(key, flat)
            value = {"storage": key, "view": [list(value.shape), list(value.stride()), value.storage_offset()]}
        described[name] = value
    # A view's runs are a sequence, but not a list.
    text = json.dumps(described, default=list)
    save_file({key: flat.cpu() for key, flat in storages.items()}, path, {"inputs": text})


def _tuples(value: Any) -> Any:
    """Convert lists to tuples, which JSON does not have."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def load(path: Path, kinds: dict[int, type], device: str = "cpu") -> list[Any]:
    """Load what `save` wrote; `kinds` maps the index of an input to its dataclass."""
    values: dict[int, Any] = {}
    with safe_open(path, "pt", device=device) as file:
        storages = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
        for name, value in json.loads(file.metadata()["inputs"]).items():
            if isinstance(value, dict):
                value = storages[value["storage"]].as_strided(*value["view"])
            value = _tuples(value)
            number, _, field = name.partition(".")
            if field:
                values.setdefault(int(number), {})[field] = value
            else:
                values[int(number)] = value
    return [kinds[i](**values[i]) if i in kinds else values[i] for i in sorted(values)]
