"""Checkpoints with GPT-OSS's sizes and random weights, which cost as much as the public ones.

Experts have random MXFP4 codes with scales that preserve the size of their inputs; other weights are normal. Thus
memory reads are realistic, hidden states stay finite, and tokens spread over the experts.
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
# Layers and experts; all other sizes are equal.
SIZES = {"20b": (24, 32), "120b": (36, 128)}
# Standard deviation of normal weights, as transformers initialises this family.
STD = 0.02
# Root mean square of the sixteen equally likely codes.
CODES = math.sqrt(sum(value**2 for value in VALUES) / len(VALUES))
# Bytes of the other files: config, index, tokenizer, manifest.
OTHER_FILES = 32 * 2**20
# A byte-level tokenizer of 259 tokens, which suffices for random weights without a download.
TOKENIZER = Path(__file__).with_name("tokenizer")
TOKENIZER_IDS = {"pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258}


def settings(name: str, layers: int | None = None) -> dict[str, Any]:
    """config.json of the geometry `name` in SIZES, optionally with only its first `layers` layers."""
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


# Integer tensors that select rotary frequencies (modeling/).
INDICES = ("rope_index", "index.frequency")


def _dtype(name: str, is_integer: bool) -> torch.dtype:
    """Stored dtype of a tensor."""
    if not is_integer:
        return torch.bfloat16
    return torch.int64 if name.endswith(INDICES) else torch.uint8


@dataclasses.dataclass(frozen=True)
class Random:
    """Random tensors for a gpt_oss config.json with MXFP4 experts, original or converted, generated one at a time.

    Each tensor has a separate generator, so that its values do not depend on the order.
    """

    settings: dict[str, Any]
    seed: int

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> shape and dtype, in the order of the model."""
        shapes, _, integers = loading.expected_tensors(self.settings)
        return {name: (shape, _dtype(name, name in integers)) for name, shape in shapes.items()}

    @property
    def bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.shapes().values())

    def draw(self, name: str, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
        """Generate a tensor on `device`. The values differ between kinds of devices."""
        digest = sha256(f"{self.seed} {name}".encode()).digest()
        options: dict[str, Any] = {"device": device, "generator": torch.Generator(device)}
        options["generator"].manual_seed(int.from_bytes(digest[:7]))
        if name.endswith(INDICES):
            return torch.arange(shape[0], device=device) % (self.settings["head_dim"] // 2)
        if name.endswith(mxfp4.BLOCKS):
            # Four bytes per random number, as one byte each would dominate the time of writing.
            words = torch.empty(*shape[:-1], shape[-1] // 4, dtype=torch.int32, device=device)
            return words.random_(-(2**31), 2**31, generator=options["generator"]).view(torch.uint8)
        if name.endswith(mxfp4.SCALES):
            # Between the two powers of two around the standard deviation that preserves the size of K inputs.
            low = math.floor(-math.log2(CODES * math.sqrt(shape[-1] * BLOCK)))
            return torch.randint(BIAS + low, BIAS + low + 2, shape, dtype=torch.uint8, **options)
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16, device=device)
        if name.endswith("sinks"):
            return torch.randn(shape, **options).bfloat16()
        weight = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return weight.normal_(0, STD, generator=options["generator"])

    def write(self, directory: Path) -> None:
        """Write the checkpoint with the tokenizer TOKENIZER, in shards, one of which is in memory at a time."""
        with rewriting(TOKENIZER, directory, self.settings) as writer:
            for name, (shape, dtype) in progress(self.shapes().items(), "draw", len(self.shapes())):
                writer.promise(name, shape, dtype, functools.partial(self.draw, name, shape))


def run(out: Path, config: MakeGptOssConfig, overwrite: bool = False) -> Manifest:
    """Write the random checkpoint of `config.geometry` to `out` and return its manifest.

    A finished result of the same geometry and seed is reused. Raise UserError for options that apply to rewriting only,
    or if the disk is too small.
    """
    if override := next(_overrides(config), None):
        raise UserError(
            f"{override} applies to a rewritten model, and geometry to random weights: leave one of them out"
        )
    assert config.geometry is not None, "the caller checks it"
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
    if existing := finished(out, manifest, overwrite):
        log(f"{out} is finished already")
        return existing
    check_room(out, random.bytes + OTHER_FILES)
    with writing(out, manifest) as partial, timed(manifest.seconds, "write"):
        random.write(partial)
    return manifest


def _overrides(config: MakeGptOssConfig) -> Iterator[str]:
    """Options other than geometry and seed that differ from their defaults."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in ("geometry", "seed") and value != field.default:
            yield f"{field.name.strip('_')} = {value}"


def check_room(out: Path, needed: int) -> None:
    """Raise UserError if the disk of `out` has less than `needed` bytes free."""
    folder = next(parent for parent in out.resolve().parents if parent.exists())
    if (free := shutil.disk_usage(folder).free) < needed:
        raise UserError(
            f"{out} takes {needed / 2**30:.1f} GiB and the disk has {free / 2**30:.1f} GiB free at {folder}; free some "
            "space, or choose another output directory"
        )
