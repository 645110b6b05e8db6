"""Checkpoints of GPT-OSS's own sizes with random weights: what costs as much as the public ones, and says nothing.

Experts hold random MXFP4 codes under scales that give their outputs the size of their inputs; all else is drawn
normal. So reads are real, hidden states stay finite, and tokens spread over the experts.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shutil
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlaforge.artifact import Manifest, finished, writing
from mlaforge.checkpoint import loading, mxfp4
from mlaforge.checkpoint.writer import rewriting
from mlaforge.demo.config import MakeGptOssConfig
from mlaforge.ops.mxfp4 import BIAS, BLOCK, VALUES
from mlaforge.runtime import UserError, log, progress, timed

WINDOW = 128
YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
NOT_PACKED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
# Layers and experts; the rest is the same in both.
SIZES = {"20b": (24, 32), "120b": (36, 128)}
# Standard deviation of what is drawn normal, as transformers initialises this family.
STD = 0.02
# Root mean square of the sixteen codes, all as likely.
CODES = math.sqrt(sum(value**2 for value in VALUES) / len(VALUES))
# Written beside the weights: config, index, tokenizer, manifest.
BESIDE = 32 * 2**20
# A byte-level tokenizer of 259 tokens: random weights need no other, and none has to be fetched.
TOKENIZER = Path(__file__).with_name("tokenizer")
TOKENIZER_IDS = {"pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258}


def settings(name: str, layers: int | None = None) -> dict[str, Any]:
    """config.json of the geometry `name` of SIZES, or of its first `layers` layers."""
    count, experts = SIZES[name]
    count = layers or count
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": count,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201_088,
        "max_position_embeddings": 131_072,
        "rope_parameters": {
            **YARN, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_theta": 150_000.0
        },
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "initializer_range": STD,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(count)],
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": NOT_PACKED},
    }  # fmt: skip


# Tensors of whole numbers that choose rotary frequencies (modeling/).
INDICES = ("rope_index", "index.frequency")


def _dtype(name: str, whole: bool) -> torch.dtype:
    """The stored dtype of a tensor; `whole`: it holds whole numbers."""
    if not whole:
        return torch.bfloat16
    return torch.int64 if name.endswith(INDICES) else torch.uint8


@dataclasses.dataclass(frozen=True)
class Random:
    """The tensors that a gpt_oss config.json with MXFP4 experts calls for, converted or not, drawn one at a time.

    Each tensor has a separate generator, so that its values do not depend on the order of drawing.
    """

    settings: dict[str, Any]
    seed: int

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> shape and dtype, in the order of the model."""
        shapes, _, whole = loading.expected_tensors(self.settings)
        return {name: (shape, _dtype(name, name in whole)) for name, shape in shapes.items()}

    @property
    def bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.shapes().values())

    def draw(self, name: str, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
        """The tensor on `device`; devices draw different numbers."""
        digest = sha256(f"{self.seed} {name}".encode()).digest()
        on: dict[str, Any] = {"device": device, "generator": torch.Generator(device)}
        on["generator"].manual_seed(int.from_bytes(digest[:7]))
        if name.endswith(INDICES):
            return torch.arange(shape[0], device=device) % (self.settings["head_dim"] // 2)
        if name.endswith(mxfp4.BLOCKS):
            # Four bytes a draw: a byte each would take most of the time that writing takes.
            words = torch.empty(*shape[:-1], shape[-1] // 4, dtype=torch.int32, device=device)
            return words.random_(-(2**31), 2**31, generator=on["generator"]).view(torch.uint8)
        if name.endswith(mxfp4.SCALES):
            # A weight's standard deviation is that which keeps the size of K inputs, between two powers of two.
            low = math.floor(-math.log2(CODES * math.sqrt(shape[-1] * BLOCK)))
            return torch.randint(BIAS + low, BIAS + low + 2, shape, dtype=torch.uint8, **on)
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16, device=device)
        if name.endswith("sinks"):
            return torch.randn(shape, **on).bfloat16()
        numbers = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return numbers.normal_(0, STD, generator=on["generator"])

    def write(self, directory: Path) -> None:
        """Writes the checkpoint in shards, one of them in memory at a time, with the tokenizer TOKENIZER."""
        with rewriting(TOKENIZER, directory, self.settings) as writer:
            for name, (shape, dtype) in progress(self.shapes().items(), "draw", len(self.shapes())):
                writer.promise(name, shape, dtype, functools.partial(self.draw, name, shape))


def run(out: Path, config: MakeGptOssConfig, overwrite: bool = False) -> Manifest:
    """Writes the random checkpoint of `config.geometry` to `out` and returns its manifest.

    The same geometry and seed again return the finished result. UserError for options that only rewriting has, and
    where the disk has too little room.
    """
    if given := next(_given(config), None):
        raise UserError(
            f"{given} is for a model that is rewritten; a geometry has random weights: leave one of them out"
        )
    assert config.geometry is not None, "the caller asks for one"
    random = Random(settings(config.geometry) | TOKENIZER_IDS, config.seed)
    manifest = Manifest(
        "make-gptoss",
        config={"geometry": config.geometry, "seed": config.seed},
        inputs={
            "model": {
                "path": config.geometry,
                "sha256": sha256(json.dumps(random.settings, sort_keys=True).encode()).hexdigest(),
                "model_type": "gpt_oss",
            }
        },
    )
    if done := finished(out, manifest, overwrite):
        log(f"{out} is finished already")
        return done
    check_room(out, random.bytes + BESIDE)
    with writing(out, manifest) as partial, timed(manifest.seconds, "write"):
        random.write(partial)
    return manifest


def _given(config: MakeGptOssConfig) -> Iterator[str]:
    """Options beside geometry and seed that are not at their defaults."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in ("geometry", "seed") and value != field.default:
            yield f"{field.name.strip('_')} = {value}"


def check_room(out: Path, needed: int) -> None:
    """UserError where the disk that `out` will lie on has less than `needed` bytes free."""
    place = next(parent for parent in out.resolve().parents if parent.exists())
    if (free := shutil.disk_usage(place).free) < needed:
        raise UserError(
            f"{out} takes {needed / 2**30:.1f} GiB and the disk has {free / 2**30:.1f} GiB free at {place}; free some "
            "room, or choose another output directory"
        )
