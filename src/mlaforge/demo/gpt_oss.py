"""`make-gptoss`: a llama checkpoint rewritten as an equivalent GPT-OSS checkpoint, with options that bring it closer to
the real model: the fixture of this family where its weights cannot be downloaded. See docs/gpt-oss.md.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlaforge.artifact import Manifest, finished, record_names, writing
from mlaforge.checkpoint import loading, mxfp4
from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.checkpoint.reader import Reader
from mlaforge.checkpoint.source_model import SourceModel, stored_dtype
from mlaforge.checkpoint.writer import rewriting
from mlaforge.data import corpus, overlap
from mlaforge.data.packing import Feed, Phase, pack
from mlaforge.demo import first_token, geometry, upcycle
from mlaforge.demo import model as demo_model
from mlaforge.demo.config import MakeGptOssConfig
from mlaforge.demo.geometry import NOT_PACKED, WINDOW, YARN
from mlaforge.factorization.refit import refit_student
from mlaforge.families.family import read_rope
from mlaforge.healing.distillation import Distillation, LossConfig
from mlaforge.modeling.latent_attention_mla import FUSED
from mlaforge.ops.mxfp4 import quantize
from mlaforge.runtime import UserError, log, progress, resolve_dtype, timed
from mlaforge.training.optimizer import Hyperparameters, NonFiniteLoss, Optimizer

# GPT-OSS clamps gate and up at 7; no activation reaches this limit.
LIMIT = 1e4
# exp(NO_SINK) is 0 in every dtype; unlike -inf, checkpoints may contain it.
NO_SINK = -1e4
# Full layers attend to the first token, so their sink is lower by this much, where it costs almost nothing.
BELOW = 4.0
# Size of the random biases of q, k and v relative to the projections' outputs.
BIAS = 0.02
# Windows of text to which sinks and o_proj are fitted, and their length; distillation uses halves, which are faster.
MEASURED, TOKENS = 8, 1024


def run(out: Path, config: MakeGptOssConfig, overwrite: bool = False) -> Manifest:
    """Write the GPT-OSS checkpoint `out` and return its manifest. Raise UserError for invalid input.

    A finished result of the same source, text and options is reused.
    """
    if config.geometry:
        return geometry.run(out, config, overwrite)
    source = SourceModel.open(demo_model.fetch() if config.from_ == "smollm2" else config.from_)
    check(source, config)
    tuned = None
    if config.sinks or config.heal:
        count, length = max(MEASURED, -(-config.heal // 2)), min(TOKENS, source.spec.max_position_embeddings)
        tuned = corpus.windows(source.tokenizer, config.text, count, length, seed=config.seed)
        source.check_tokens(tuned.ids)
    manifest = Manifest(
        "make-gptoss",
        config=dataclasses.asdict(config) | record_names(config, "from_", "text"),
        inputs={
            "model": {**source.record, "path": source.path.name, "model_type": source.spec.model_type},
            "calibration": tuned.describe() if tuned else None,
        },
    )
    if existing := finished(out, manifest, overwrite, (source.path, config.text)):
        log(f"{out} is finished already")
        return existing
    with writing(out, manifest) as partial:
        _make(source, config, tuned, manifest, partial)
    return manifest


def check(source: SourceModel, config: MakeGptOssConfig) -> None:
    """Raise UserError if the source or the options cannot be represented as GPT-OSS."""
    raw = source.config
    if raw.get("model_type") != "llama":
        raise UserError(f"only llama checkpoints can be rewritten as GPT-OSS, not {raw.get('model_type')!r}")
    spec = source.spec
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise UserError(f"GPT-OSS uses silu, the source {activation!r}; give a checkpoint with hidden_act silu")
    if config.top_k > config.experts:
        raise UserError(f"top_k = {config.top_k} must be at most experts = {config.experts}")
    if config.yarn is not None and spec.rope.kind != "default":
        raise UserError(f"the source's RoPE is {spec.rope.kind!r}; --yarn needs unscaled RoPE")
    if config.mxfp4:
        for width in (spec.hidden_size, raw["intermediate_size"]):
            mxfp4.stored_shapes((1, width, 1))
    if (config.sinks or config.heal) and spec.max_position_embeddings <= WINDOW:
        raise UserError(f"sinks and healing need more than {WINDOW} positions, not {spec.max_position_embeddings}")


def gptoss_config(source: SourceModel, config: MakeGptOssConfig) -> dict[str, Any]:
    """config.json of the result."""
    raw, spec = source.config, source.spec
    factor = float(config.yarn or 1.0)
    rope: dict[str, Any] = dict(spec.rope.parameters)
    if spec.rope.kind == "default":
        # With factor 1 these are the plain frequencies, bit for bit. Without the key, GPT-OSS defaults to factor 32.
        rope = {**YARN, "factor": factor, "original_max_position_embeddings": spec.max_position_embeddings}
    layer = spec.layers[0]
    settings: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": spec.hidden_size,
        "intermediate_size": raw["intermediate_size"],
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": int(spec.max_position_embeddings * factor),
        "rope_parameters": {**rope, "rope_theta": spec.rope.theta},
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "swiglu_alpha": 1.0,
        "swiglu_limit": LIMIT,
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "initializer_range": raw.get("initializer_range", 0.02),
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "sliding_window": WINDOW,
        "layer_types": [
            "sliding_attention" if config.windows and i % 2 == 0 else "full_attention" for i in range(spec.num_layers)
        ],
        # Runtimes of this family read lm_head.weight regardless of this key.
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": str(resolve_dtype(config.dtype, source.dtype)).removeprefix("torch."),
        **{key: raw[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in raw},
    }
    if config.mxfp4:
        settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": NOT_PACKED}
    return settings


def _make(
    source: SourceModel, config: MakeGptOssConfig, tuned: corpus.Windows | None, manifest: Manifest, partial: Path
) -> None:
    """Write the checkpoint into `partial` and fill the manifest's metrics."""
    settings = gptoss_config(source, config)
    first = None
    with Reader(source.path) as reader:
        reader.check(*loading.expected_tensors(source.config))
        if config.sinks and tuned is not None:
            with timed(manifest.seconds, "sinks"):
                first = measure_sinks(source.path, settings, tuned)
        healed: dict[str, Tensor] = {}
        if config.heal and tuned is not None:
            with timed(manifest.seconds, "heal"):
                # Only attention is healed and all experts are nearly equal; a single expert is much faster.
                single = dataclasses.replace(config, experts=1, top_k=1, differ=0.0)
                draft = Upcycled(reader, source, single, gptoss_config(source, single), first)
                healed, losses = heal(partial / ".draft", draft, tuned, config.heal)
            manifest.metrics["kl"] = [float(f"{loss:.5g}") for loss in losses]
            # A mean, as the loss varies much between windows.
            manifest.metrics["kl_last"] = sum(losses[-8:]) / len(losses[-8:])
        with timed(manifest.seconds, "write"):
            write(partial, Upcycled(reader, source, config, settings, first), healed)
    if tuned is not None:
        overlap.write_passages(partial, overlap.passages(tuned))


def fitted(tuned: corpus.Windows) -> Tensor:
    """Windows [N, T] for sinks and o_proj: MEASURED windows, spread over the text."""
    return tuned.ids[:: max(1, len(tuned.ids) // MEASURED)][:MEASURED]


def measure_sinks(directory: Path, result: dict[str, Any], tuned: corpus.Windows) -> list[first_token.FirstToken]:
    """First-token statistics of every layer of the source with the result's RoPE, without its scaling of logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings, scaling = AutoConfig.from_pretrained(directory), read_rope(result).attention_scaling
    settings.rope_parameters = {**result["rope_parameters"], "attention_factor": scaling**0.5}
    model = AutoModelForCausalLM.from_pretrained(directory, config=settings, dtype=torch.float32).eval()
    ids = fitted(tuned)
    after = min(WINDOW, ids.shape[1] // 2)
    return first_token.measure(model, progress(ids, "measure sinks", len(ids)), after)


def heal(folder: Path, draft: Upcycled, tuned: corpus.Windows, steps: int) -> tuple[dict[str, Tensor], list[float]]:
    """Fit the draft's attention, with sinks and biases, to the source. Return new tensors and the KL of every step.

    folder: temporary directory for the draft.
    """
    folder.mkdir()
    write(folder, draft, {})
    source = draft.source
    device = torch.device("cpu")
    with (
        LayerStream(folder, torch.float32, device) as draft_stream,
        LayerStream(source, torch.float32, device) as source_stream,
    ):
        solved = refit_student(draft_stream, source_stream, fitted(tuned))
    student, teacher = loading.load_model(folder, "float32"), loading.load_model(source, "float32")
    for model in (student, teacher):
        model.requires_grad_(False)
    shutil.rmtree(folder)
    # Only attention tensors are replaced; the student must have all their names.
    unknown = student.load_state_dict(solved, strict=False).unexpected_keys
    assert not unknown, unknown
    student.set_attn_implementation(FUSED)
    names = [name for name, _ in student.named_parameters() if ".self_attn." in name]
    halves = tuned.ids.reshape(-1, TOKENS // 2) if tuned.ids.shape[1] == TOKENS else tuned.ids
    feed = Feed((Phase(pack(list(halves), halves.shape[1]), steps),), halves.shape[1], seed=0)
    optimizer = Optimizer(Distillation(student, teacher, LossConfig(temperature=1.0)), feed, Hyperparameters(), names)
    try:
        losses = [optimizer.training_step()["kl"] for _ in progress(range(steps), "heal", steps)]
    except NonFiniteLoss as error:
        raise UserError(
            f"healing diverged at step {error.step + 1} of {steps}; heal for fewer steps, or give other text"
        ) from error
    return {name: student.get_parameter(name).detach() for name in names}, losses


def write(partial: Path, upcycled: Upcycled, healed: dict[str, Tensor]) -> None:
    """Stream config and tensors into `partial`. healed: replacements by name."""
    dtype = stored_dtype(upcycled.settings)
    with rewriting(upcycled.source.path, partial, upcycled.settings) as writer:
        for name, tensor in upcycled:
            stored = tensor if tensor.dtype == torch.uint8 else healed.get(name, tensor).to(dtype)
            writer.add(name, stored)


@dataclasses.dataclass
class Upcycled:
    """Iterator over the result's tensors, with one layer in memory at a time."""

    reader: Reader
    source: SourceModel
    config: MakeGptOssConfig
    settings: dict[str, Any]
    first: list[first_token.FirstToken] | None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        embedding = self.reader["model.embed_tokens.weight"]
        yield "model.embed_tokens.weight", embedding
        for i in progress(range(self.source.spec.num_layers), "rewrite", self.source.spec.num_layers):
            prefix = f"model.layers.{i}."
            # One seed per layer, so that every pass generates the same values.
            draw = torch.Generator().manual_seed(self.config.seed * 100_003 + i)
            for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
                yield prefix + norm, self.reader[prefix + norm]
            for name, tensor in self.attention(i, draw).items():
                yield f"{prefix}self_attn.{name}", tensor
            for name, tensor in self.mlp(i, draw).items():
                yield f"{prefix}mlp.{name}", tensor
        yield "model.norm.weight", self.reader["model.norm.weight"]
        # A copy, as safetensors rejects two names for one storage.
        yield "lm_head.weight", self.reader["lm_head.weight"] if "lm_head.weight" in self.reader else embedding.clone()

    def _optional(self, name: str) -> Tensor | None:
        return self.reader[name].float() if name in self.reader else None

    def attention(self, i: int, draw: torch.Generator) -> dict[str, Tensor]:
        """Projections, biases and sinks of layer i, fp32. q_proj is divided by the square root of YaRN's logit scaling;
        docs/gpt-oss.md has the measurement behind it."""
        prefix, tensors = f"model.layers.{i}.self_attn.", dict[str, Tensor]()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight = self.reader[f"{prefix}{name}.weight"].float()
            bias = self._optional(f"{prefix}{name}.bias")
            tensors[f"{name}.weight"] = weight
            tensors[f"{name}.bias"] = torch.zeros(len(weight)) if bias is None else bias
        tensors["sinks"] = torch.full((self.source.spec.layers[i].num_heads,), NO_SINK)
        if self.first is not None:
            self._add_sinks(i, tensors, self.first[i], draw)
        scaling = read_rope(self.settings).attention_scaling / self.source.spec.rope.attention_scaling
        for name in ("q_proj.weight", "q_proj.bias"):
            tensors[name] = tensors[name] / scaling
        return tensors

    def _add_sinks(
        self, i: int, tensors: dict[str, Tensor], first: first_token.FirstToken, draw: torch.Generator
    ) -> None:
        """Set sinks from the first token's logit, and biases; o_proj's bias compensates their mean effect."""
        layer, slides = self.source.spec.layers[i], self.settings["layer_types"][i] == "sliding_attention"
        tensors["sinks"] = first.logit if slides else first.logit - BELOW
        for name, rms in (("q_proj", first.query_rms), ("k_proj", first.key_rms), ("v_proj", first.value_rms)):
            added = torch.randn(tensors[f"{name}.bias"].shape, generator=draw) * (BIAS * rms)
            tensors[f"{name}.bias"] = tensors[f"{name}.bias"] + added
        # `added` is now v_proj's bias, which every head adds to its output.
        heads = added.view(layer.num_kv_heads, -1).repeat_interleave(layer.group, dim=0)
        lost = first.value - (1 - first.share[:, None]) * heads if slides else -heads
        tensors["o_proj.bias"] = tensors["o_proj.bias"] + tensors["o_proj.weight"] @ lost.flatten()

    def mlp(self, i: int, draw: torch.Generator) -> dict[str, Tensor]:
        """Router and experts of layer i in the checkpoint's format."""
        prefix, config = f"model.layers.{i}.mlp.", self.config
        parts = [self.reader[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down")]
        biases = [self._optional(f"{prefix}{name}_proj.bias") for name in ("gate", "up", "down")]
        tensors = upcycle.router(config.experts, self.source.spec.hidden_size, draw)
        tensors = {f"router.{name}": tensor for name, tensor in tensors.items()}
        for name, tensor in upcycle.experts(
            upcycle.Dense(*parts, *biases), config.experts, config.differ, draw
        ).items():
            if config.mxfp4 and tensor.ndim == 3:
                names = mxfp4.stored_names(f"experts.{name}")
                tensors.update(zip(names, quantize(tensor), strict=True))
            else:
                tensors[f"experts.{name}"] = tensor
        return tensors
