"""Models with random weights, generated on the device that uses them without files, for machines without checkpoints.

`settings` of demo/geometry.py is the config.json of an original; `converted` returns that of a conversion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mlaforge.checkpoint.converted_config import SUFFIX, architecture, completed
from mlaforge.checkpoint.reader import Reader
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.demo.geometry import TOKENIZER, TOKENIZER_IDS, Random
from mlaforge.modeling.coded_layout_mla import VERSION


class DrawnTensors(Reader):
    """Tensors of `random`, generated on `device` when they are read."""

    def __init__(self, random: Random, device: torch.device):
        self.random, self.device, self.left_out = random, device, []
        self.shapes = random.shapes()

    def __exit__(self, *_: object) -> None:
        """Nothing to close: no file is open."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def __getitem__(self, name: str) -> Tensor:
        return self.random.draw(name, self.shapes[name][0], self.device)

    def check_shapes(self, *expected: Any) -> None:
        """Nothing to check: shapes are correct by construction."""

    def check(self, *expected: Any) -> None:
        """Nothing to check: values are finite by construction."""


@dataclasses.dataclass(frozen=True)
class DrawnModel(SourceModel):
    """Model of `config` with random weights on `device` and the tokenizer TOKENIZER."""

    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0

    @classmethod
    def of(cls, config: dict[str, Any], device: torch.device, name: str = "drawn") -> DrawnModel:
        """config: config.json of a geometry, original or converted."""
        return cls(TOKENIZER, name, config | TOKENIZER_IDS, device=device)

    def weights(self) -> Reader:
        """See SourceModel.weights."""
        return DrawnTensors(Random(self.config, self.seed), self.device)


@dataclasses.dataclass(frozen=True)
class Latent:
    """Target of the full-attention layers. layout: latent or latent_rope. rank, rope: widths of the latent and of the
    rotary key. bits: per coordinate of a coded row; 0: bf16 rows. topk: tokens that a sparse step reads; 0: all."""

    layout: str
    rank: int
    rope: int = 0
    bits: int = 0
    topk: int = 0


# Sparse models: width of an index key, and the first and newest tokens that are always read.
INDEX_WIDTH, INDEX_SINK, INDEX_WINDOW = 64, 16, 64


def converted(settings: dict[str, Any], latent: Latent) -> dict[str, Any]:
    """config.json of a model with converted full-attention layers; the others keep their attention."""
    full = [kind == "full_attention" for kind in settings["layer_types"]]
    head_dim, model_type = settings["head_dim"], settings["model_type"] + SUFFIX
    fields = {
        "model_type": model_type, "architectures": [architecture(model_type)],
        "kv_lora_rank": latent.rank, "qk_rope_head_dim": latent.rope, "qk_nope_head_dim": head_dim,
        "v_head_dim": head_dim, "softmax_scale": head_dim**-0.5,
        "mla_layer_types": [latent.layout if is_full else "gqa" for is_full in full],
        "mla_kv_lora_ranks": [latent.rank if is_full else 0 for is_full in full],
        "mla_q_bias": True, "mla_k_bias": True, "mla_o_bias": True, "mla_sinks": True,
    }  # fmt: skip
    if latent.bits:
        fields["mla_code_counts"] = [[latent.rank] * latent.bits if is_full else [] for is_full in full]
        fields["mla_code_version"] = VERSION
    if latent.topk:
        fields |= {
            "index_kind": "pairs", "index_topk": latent.topk, "index_head_dim": INDEX_WIDTH,
            "index_sink": INDEX_SINK, "index_window": INDEX_WINDOW,
            "indexer_types": ["full" if is_full else "dense" for is_full in full],
        }  # fmt: skip
    return completed({**settings, **fields})
