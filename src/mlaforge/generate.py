"""`generate`: greedy text from one model or from two side by side, with the cache measured in real bytes."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch

from mlaforge import checkpoint, locate
from mlaforge.artifact import Manifest, finished, writing
from mlaforge.options import GenerateConfig
from mlaforge.runtime import UserError, resolve_device, timed


def cache_bytes(cache: Any) -> int:
    """Bytes that a transformers cache holds in its keys and values, by allocation."""
    return sum(
        tensor.untyped_storage().nbytes()
        for layer in cache.layers
        for tensor in {id(t): t for t in (layer.keys, layer.values) if t is not None}.values()
    )


@torch.inference_mode()
def continue_prompt(directory: Path, config: GenerateConfig) -> dict[str, Any]:
    """One model's greedy continuation and what it took."""
    device = resolve_device(config.device)
    tokenizer = checkpoint.load_tokenizer(directory)
    model = checkpoint.load_model(directory, config.dtype, device)
    if config.chat:
        if not tokenizer.chat_template:
            raise UserError(f"{directory} has no chat template; leave --chat out")
        turn = [{"role": "user", "content": config.prompt}]
        ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        ids = tokenizer(config.prompt, return_tensors="pt")
    prompt = ids["input_ids"].to(device)
    if not prompt.numel():
        raise UserError("the prompt is empty; pass --prompt with some text")
    checkpoint.check_tokens(directory, prompt)
    # One token first, so that neither model's clock pays for warming up.
    model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1, do_sample=False)
    start = time.perf_counter()
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=config.max_new_tokens, do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    new = out.sequences[0, prompt.shape[1] :]
    return {
        "text": tokenizer.decode(new, skip_special_tokens=True),
        "new_tokens": len(new),
        "seconds": seconds,
        "tokens_per_second": len(new) / seconds,
        "cache_bytes": cache_bytes(out.past_key_values),
        "cached_tokens": int(out.past_key_values.get_seq_length()),
    }


def run(model: str, out: Path | None, config: GenerateConfig, overwrite: bool = False) -> Manifest:
    """Continues the prompt with MODEL, and with `against` where given; writes an artifact if `out` is given."""
    if config.max_new_tokens < 1:
        raise UserError(f"max_new_tokens = {config.max_new_tokens} must be at least 1")
    directories = {name: locate.locate(name) for name in (model, config.against) if name}
    manifest = Manifest(
        "generate",
        config={k: v for k, v in dataclasses.asdict(config).items() if k not in ("device", "against")},
        inputs={"models": [checkpoint.fingerprint(directory) for directory in directories.values()]},
    )
    if out is not None and (done := finished(out, manifest, overwrite)):
        return done
    with timed(manifest.seconds, "generate"):
        runs = [{"model": found.name, **continue_prompt(found, config)} for found in directories.values()]
    manifest.metrics = {"prompt": config.prompt, "runs": runs}
    if out is not None:
        with writing(out, manifest):
            pass
    return manifest
