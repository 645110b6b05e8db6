"""Tensors of a draft head, stored in a float dtype or in int8 with scales.

The int8 format is `int-quantized` of compressed-tensors, 8 bits, symmetric, one scale per output channel: every matrix
`NAME` [M, K] is int8 with `NAME_scale` [M, 1] in a float dtype, weight = code * scale, and config.json holds
QUANTIZATION as its quantization_config. Norms and biases stay in a float dtype, d2t and t2d are unchanged. Codes are
rounded as by the engine (ops/rounded_weights.py), so that rounding the dequantised weights again gives the same codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlaforge.checkpoint.reader import Reader, read_config
from mlaforge.ops.rounded_weights import rounded8
from mlaforge.runtime import UserError

SCALE = "_scale"
WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": [],
    "config_groups": {
        "group_0": {
            "targets": ["Linear", "Embedding"],
            "weights": WEIGHTS,
            "input_activations": None,
            "output_activations": None,
        }
    },
}


def is_quantized(config_dict: Mapping[str, Any], directory: Path) -> bool:
    """Return whether config.json declares int8 matrices. Raises UserError for any other quantisation."""
    quantization = config_dict.get("quantization_config")
    if not quantization:
        return False
    groups = quantization.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    weights = group.get("weights") if isinstance(group, dict) else None
    supported = (
        all(quantization.get(name) == QUANTIZATION[name] for name in ("quant_method", "format"))
        and not quantization.get("ignore")
        and isinstance(weights, dict)
        and all(weights.get(name, False) == value for name, value in WEIGHTS.items())
        and not (group or {}).get("input_activations")
    )
    if not supported:
        raise UserError(
            f"{directory}: quantization_config in config.json describes an unsupported format; a head is stored in a "
            "float dtype, or by compressed-tensors as int-quantized with all matrices in symmetric 8 bits per channel"
        )
    return True


def quantize(weight_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes [M, K] and fp32 scales [M, 1] of a floating-point matrix."""
    codes_MK, scale_M = rounded8(weight_MK.float())
    return codes_MK.to(torch.int8), scale_M[:, None]


def dequantize(codes_MK: Tensor, scale_M1: Tensor) -> Tensor:
    """Return the matrix in fp32 [M, K]."""
    return codes_MK.float() * scale_M1.float()


class HeadReader(Reader):
    """Reader of a head's tensors; int8 matrices are dequantised to fp32 when they are read."""

    def __init__(self, directory: Path):
        """Raises UserError as Reader does, and for an unsupported quantisation."""
        self.quantized = is_quantized(read_config(directory), directory)
        super().__init__(directory)

    @property
    def weights(self) -> list[str]:
        """Names of all tensors but the scales."""
        return [name for name in self if not self._is_scale(name)]

    def _is_scale(self, name: str) -> bool:
        return self.quantized and name.endswith(SCALE)

    def _is_code(self, name: str) -> bool:
        return self.quantized and not self._is_scale(name) and len(self.shape(name)) == 2

    def __getitem__(self, name: str) -> Tensor:
        tensor = super().__getitem__(name)
        return dequantize(tensor, super().__getitem__(f"{name}{SCALE}")) if self._is_code(name) else tensor

    def check_shapes(
        self, expected: dict[str, tuple[int, ...]], tied: frozenset[str] = frozenset(),
        whole: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        """Same as Reader.check_shapes, but add the scales of the matrices in `expected`."""
        if self.quantized:
            scales = {f"{name}{SCALE}": (shape[0], 1) for name, shape in expected.items() if len(shape) == 2}
            expected = expected | scales
        super().check_shapes(expected, tied, whole)

    def _kinds(self, name: str, whole: frozenset[str]) -> tuple[str, ...]:
        return ("I8",) if self._is_code(name) else super()._kinds(name, whole)
