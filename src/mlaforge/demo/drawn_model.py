"""Models with random weights that are drawn on the device where they are used: nothing is written to disk.

For measuring on a machine without checkpoints. `settings` of demo/geometry.py describe the original; `converted` is
the config.json that a conversion of it would have.
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


class DrawnTensors(Reader):
    """The tensors of `random` on `device`, drawn when they are read."""

    def __init__(self, random: Random, device: torch.device):
        self.random, self.device, self.left_out = random, device, []
        self.shapes = random.shapes()

    def __exit__(self, *_: object) -> None:
        """No file is open."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def __getitem__(self, name: str) -> Tensor:
        return self.random.draw(name, self.shapes[name][0], self.device)

    def check_shapes(self, *expected: Any) -> None:
        """Shapes are the expected ones by construction."""

    def check(self, *expected: Any) -> None:
        """Values are finite by construction."""


@dataclasses.dataclass(frozen=True)
class DrawnModel(SourceModel):
    """A model of `config` whose weights are drawn on `device`; its tokenizer is TOKENIZER."""

    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0

    @classmethod
    def of(cls, config: dict[str, Any], device: torch.device, name: str = "drawn") -> DrawnModel:
        """`config` is a config.json of a geometry, or what `converted` makes of it."""
        return cls(TOKENIZER, name, config | TOKENIZER_IDS, device=device)

    def weights(self) -> Reader:
        """As SourceModel.weights."""
        return DrawnTensors(Random(self.config, self.seed), self.device)


@dataclasses.dataclass(frozen=True)
class Latent:
    """What the layers of full attention become: `layout` latent or latent_rope, the rank and the rotary width of a
    row, `bits` of each coordinate of a coded row (0: rows are bf16), `topk` tokens that a sparse step reads (0: all).
    """

    layout: str
    rank: int
    rope: int = 0
    bits: int = 0
    topk: int = 0


# Of a sparse model: numbers of an index key, first and newest tokens that are always read.
INDEX_WIDTH, INDEX_SINK, INDEX_WINDOW = 64, 16, 64


def converted(settings: dict[str, Any], latent: Latent) -> dict[str, Any]:
    """The config.json of a model whose layers of full attention were converted; the others keep their attention."""
    full = [kind == "full_attention" for kind in settings["layer_types"]]
    head_dim, model_type = settings["head_dim"], settings["model_type"] + SUFFIX
    fields = {
        "model_type": model_type, "architectures": [architecture(model_type)],
        "kv_lora_rank": latent.rank, "qk_rope_head_dim": latent.rope, "qk_nope_head_dim": head_dim,
        "v_head_dim": head_dim, "softmax_scale": head_dim**-0.5,
        "mla_layer_types": [latent.layout if converts else "gqa" for converts in full],
        "mla_kv_lora_ranks": [latent.rank if converts else 0 for converts in full],
        "mla_q_bias": True, "mla_k_bias": True, "mla_o_bias": True, "mla_sinks": True,
    }  # fmt: skip
    if latent.bits:
        fields["mla_code_counts"] = [[latent.rank] * latent.bits if converts else [] for converts in full]
    if latent.topk:
        fields |= {
            "index_kind": "pairs", "index_topk": latent.topk, "index_head_dim": INDEX_WIDTH,
            "index_sink": INDEX_SINK, "index_window": INDEX_WINDOW,
            "indexer_types": ["full" if converts else "dense" for converts in full],
        }  # fmt: skip
    return completed({**settings, **fields})
