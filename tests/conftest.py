"""Shared fixtures: tiny random models of every family with a byte-level tokenizer, two disjoint texts, the command
line in this process, and what is needed to see that nothing was left behind."""

from __future__ import annotations

import hashlib
import os
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

# Before anything imports huggingface_hub: no test may wait for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

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
FAMILIES = ("llama", "qwen2", "mistral")


def build(family: str, **changes: Any) -> Any:
    """A tiny random causal LM of `family`; `changes` go into its config."""
    import transformers

    prefix = {"llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral"}[family]
    own = {"llama": {"head_dim": 16}, "qwen2": {}, "mistral": {"head_dim": 16, "sliding_window": 24}}[family]
    config = getattr(transformers, f"{prefix}Config")(**{**SHAPE, **own, **changes})
    return getattr(transformers, f"{prefix}ForCausalLM")(config)


def save_tokenizer(directory: Path) -> None:
    """One token per byte, a padding, a beginning and an end token, and a chat template."""
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
    """Writes a tiny model and its tokenizer into `directory`."""
    import torch

    torch.manual_seed(seed)
    model = build(family, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                # Attention that is not flat, and biases that matter.
                parameter.normal_(std=0.25 if "weight" in name else 1.0)
            elif name.endswith("bias"):
                parameter.normal_()
            elif "norm" not in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family -> directory of a tiny random model. Read-only: copy it before you damage it."""
    folder = tmp_path_factory.mktemp("models")
    return {family: save_model(folder / family, family, seed) for seed, family in enumerate(FAMILIES)}


@pytest.fixture(scope="session")
def biased_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with attention_bias: q, k, v and o all have one. Read-only."""
    return save_model(tmp_path_factory.mktemp("biased") / "llama", "llama", 3, attention_bias=True)


def _text(tmp_path_factory: pytest.TempPathFactory, name: str, keys: list[str]) -> Path:
    path = tmp_path_factory.mktemp("text") / f"{name}.txt"
    path.write_text("\n\n".join(topics[key] for key in keys)[:12000], encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def calibration_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _text(tmp_path_factory, "calibration", sorted(topics)[:20])


@pytest.fixture(scope="session")
def evaluation_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _text(tmp_path_factory, "evaluation", sorted(topics)[-20:])


@pytest.fixture
def model(tiny_models: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """model("llama") -> a copy of that tiny model in tmp_path, to be damaged."""

    def copy(family: str = "llama") -> Path:
        return Path(shutil.copytree(tiny_models[family], tmp_path / family))

    return copy


@pytest.fixture(scope="session")
def short(calibration_file: Path, evaluation_file: Path) -> list[str]:
    """Options with which `convert` takes a fraction of a second on a tiny model."""
    told = {"calibration": calibration_file, "evaluation": evaluation_file, "seqlen": 64, "nsamples": 4}
    told |= {"eval-windows": 2, "device": "cpu"}
    return [part for name, value in told.items() for part in (f"--{name}", str(value))]


@pytest.fixture(scope="session")
def cli() -> Callable[..., Any]:
    """cli("convert", MODEL, OUT, ...) -> exit_code, stdout and stderr of the command, run in this process.

    What would be a traceback is appended to stderr, as Python would print it.
    """
    from typer.testing import CliRunner

    from mlaforge.cli import app

    class Done:
        def __init__(self, result: Any):
            self.exit_code: int = result.exit_code
            self.stdout: str = result.stdout
            self.stderr: str = result.stderr
            if result.exception is not None and not isinstance(result.exception, SystemExit):
                self.stderr += "".join(traceback.format_exception(result.exception))

    return lambda *arguments: Done(CliRunner().invoke(app, [str(a) for a in arguments]))


@pytest.fixture(scope="session")
def tree() -> Callable[[Path], dict[str, str]]:
    """tree(folder) -> everything below it, hidden files too: name -> what it is, for a file its SHA-256."""

    def describe(path: Path) -> str:
        if path.is_symlink():
            return f"link to {os.readlink(path)}"
        return "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()

    return lambda folder: {str(p.relative_to(folder)): describe(p) for p in sorted(folder.rglob("*"))}
