"""Comparison of an implementation's outputs with the reference, and storage of mismatching inputs for replay."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from collections.abc import Sequence
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


def check(
    name: str, inputs: Sequence[Any], actual: Sequence[Tensor], expected: Sequence[Tensor],
    tolerance: tuple[float, float] | None = None,
) -> None:  # fmt: skip
    """Raise AssertionError if an output differs. The message contains the path of the saved inputs. `tolerance`:
    absolute and relative; by the dtype of the first input if None."""
    tolerances = tolerance or TOLERANCES.get(inputs[0].dtype, TOLERANCES[torch.float32])
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if line := differences(a, e, *tolerances):
            directory = runtime.cache_home() / "mismatches"
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / f"{name.replace(' ', '-')}-{os.getpid()}-{len(list(directory.iterdir()))}.safetensors"
            save(path, inputs)
            raise AssertionError(f"{name}, output {i}: {line}; inputs saved as {path}")


def cloned(value: Any) -> Any:
    """Copy a tensor, or the tensors of a dataclass; anything else is returned as it is."""
    if isinstance(value, Tensor):
        return value.clone()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: cloned(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **fields)
    return value


def save(path: Path, inputs: Sequence[Any]) -> None:
    """Save tensors, dtypes, numbers, sequences and dataclasses of these as one safetensors file. Strides and shared
    memory are preserved: each storage is saved once, complete."""
    storages: dict[str, Tensor] = {}

    def described(value: Any) -> Any:
        if isinstance(value, Tensor):
            flat = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
            key = f"{value.untyped_storage().data_ptr()} {value.dtype}"
            storages.setdefault(key, flat)
            return {"storage": key, "view": [list(value.shape), list(value.stride()), value.storage_offset()]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if dataclasses.is_dataclass(value):
            fields = {field.name: described(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return {"class": f"{type(value).__module__}:{type(value).__qualname__}", "fields": fields}
        # A view's runs are a sequence, but not a list.
        return value if value is None or isinstance(value, (bool, int, float, str)) else [described(v) for v in value]

    text = json.dumps([described(value) for value in inputs])
    save_file({key: flat.cpu() for key, flat in storages.items()}, path, {"inputs": text})


def load(path: Path, device: str = "cpu") -> list[Any]:
    """Load what `save` wrote. Lists become tuples. Only dataclasses of this package are constructed."""
    with safe_open(path, "pt", device=device) as file:
        storages = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
        inputs = json.loads(file.metadata()["inputs"])

    def value_of(stored: Any) -> Any:
        if isinstance(stored, list):
            return tuple(map(value_of, stored))
        if not isinstance(stored, dict):
            return stored
        if "storage" in stored:
            return storages[stored["storage"]].as_strided(*stored["view"])
        if "dtype" in stored:
            return getattr(torch, stored["dtype"])
        module, _, name = stored["class"].partition(":")
        assert module.startswith("mlaforge.ops."), f"{path} names the class {stored['class']}"
        kind = getattr(importlib.import_module(module), name)
        assert isinstance(kind, type) and dataclasses.is_dataclass(kind), f"{stored['class']} is no dataclass"
        return kind(**{name: value_of(field) for name, field in stored["fields"].items()})

    return list(map(value_of, inputs))
