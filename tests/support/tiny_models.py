"""Tiny random models of every family, with a byte-level tokenizer, written as checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

SHAPE = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 256,
}


YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 64,
}  # fmt: skip


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


FAMILIES = ("llama", "qwen2", "mistral", "qwen3", "mimo", "gpt_oss")
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]


# Families whose queries and keys are normed: layout `latent` only.
NORMED = ("qwen3",)


# Every family with every layout that it can take.
CASES = [(f, layout) for f in FAMILIES for layout in ("latent", "latent_rope") if layout == "latent" or f not in NORMED]


def build(family: str, **changes: Any) -> Any:
    """Return a tiny random causal LM of `family` with `changes` of its config."""
    import transformers

    windows = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    prefix, fields = {
        "llama": ("Llama", {"head_dim": 16}),
        "qwen2": ("Qwen2", {}),
        "mistral": ("Mistral", {"head_dim": 16, "sliding_window": 24}),
        "ministral": ("Ministral", {"head_dim": 16, "sliding_window": 24, "layer_types": ALTERNATING}),
        # A head size that is not hidden / heads; the last layer slides.
        "qwen3": ("Qwen3", {"head_dim": 20, **windows}),
        "mimo": ("Qwen2", {"head_dim": 16}),
        "gpt_oss": ("GptOss", {"head_dim": 16, "sliding_window": 24, "rope_parameters": YARN, **experts}),
    }[family]
    config = getattr(transformers, f"{prefix}Config")(**{**SHAPE, **fields, **changes})
    return getattr(transformers, f"{prefix}ForCausalLM")(config)


def load_original(directory: Path) -> Any:
    """Load the causal LM of a tiny model in fp32 by transformers."""
    import torch
    import transformers

    name = json.loads((directory / "config.json").read_text())["architectures"][0]
    # transformers has no class for MiMo; its remote code subclasses Qwen2.
    causal_lm = getattr(transformers, {"MiMoForCausalLM": "Qwen2ForCausalLM"}.get(name, name))
    return causal_lm.from_pretrained(directory, dtype=torch.float32).eval()


def add_drafting_layer(directory: Path) -> None:
    """Change a qwen2 checkpoint to mimo: config.json as on the hub, and tensors of one drafting layer."""
    import torch
    from safetensors.torch import load_file, save_file

    path = directory / "config.json"
    config = json.loads(path.read_text())
    config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    config["auto_map"] = {"AutoConfig": "configuration_mimo.MiMoConfig"}
    path.write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    drafting = {n.replace("layers.0", "mtp_layers.0"): t.clone() for n, t in tensors.items() if ".layers.0." in n}
    drafting["model.mtp_layers.0.input_proj.weight"] = torch.randn(SHAPE["hidden_size"], 2 * SHAPE["hidden_size"])
    save_file(tensors | drafting, directory / "model.safetensors", metadata={"format": "pt"})


def save_packed(source: Path, directory: Path, dtype: Any = None) -> Path:
    """Write a copy of a gpt_oss in bf16, or another dtype, with MXFP4 experts, like public checkpoints."""
    import torch
    from safetensors.torch import save_file

    from mlaforge.checkpoint import mxfp4
    from mlaforge.ops.mxfp4 import quantize

    shutil.copytree(source, directory)
    tensors = {}
    for name, tensor in _taken(directory).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            tensors |= dict(zip(mxfp4.stored_names(name), quantize(tensor), strict=True))
        else:
            tensors[name] = tensor.to(dtype or torch.bfloat16)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    spared = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    name = str(dtype or torch.bfloat16).removeprefix("torch.")
    config |= {"dtype": name, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": spared}}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def save_unpacked(source: Path, directory: Path) -> Path:
    """Write a copy of a checkpoint with MXFP4 experts that has the same values in fp32."""
    from safetensors.torch import save_file

    from mlaforge.checkpoint import mxfp4
    from mlaforge.ops.mxfp4 import unpack

    shutil.copytree(source, directory)
    tensors = _taken(directory)
    for name in [name for name in tensors if name.endswith(mxfp4.BLOCKS)]:
        stem = name.removesuffix(mxfp4.BLOCKS)
        stored = unpack(*(tensors.pop(part) for part in mxfp4.stored_names(stem)))
        tensors[stem] = stored.transpose(1, 2).contiguous()
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config.pop("quantization_config")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _taken(directory: Path) -> dict[str, Any]:
    """Load a checkpoint's tensors and delete its files."""
    from safetensors.torch import load_file

    tensors = {}
    for shard in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    (directory / INDEX).unlink(missing_ok=True)
    return tensors


def save_tokenizer(directory: Path) -> None:
    """Save a tokenizer with one token per byte, padding, beginning and end tokens, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    fast.save_pretrained(directory)


def save_model(directory: Path, family: str, seed: int, **changes: Any) -> Path:
    """Write a tiny model and its tokenizer to `directory`."""
    import torch

    torch.manual_seed(seed)
    model = build(family, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                # Non-uniform attention, and biases with an effect.
                parameter.normal_(std=0.25 if "weight" in name else 1.0)
            elif name.endswith(("bias", "sinks")):
                parameter.normal_()
            elif "q_norm" in name or "k_norm" in name:
                parameter.normal_(mean=1.0, std=0.4)
            elif "norm" not in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(directory)
    if family == "mimo":
        add_drafting_layer(directory)
    save_tokenizer(directory)
    return directory


def shard(directory: Path) -> Path:
    """Split the weights into three shards with an index, like large models."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    weight_map = {name: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        part = {name: tensors[name] for name in tensors if weight_map[name] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory
