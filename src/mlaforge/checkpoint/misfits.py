"""Explanations of common mismatches between a checkpoint's tensors and its config.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping

# Prefix that a wrapper adds to every name -> the wrapper.
WRAPPERS = {
    "_orig_mod.": "torch.compile", "module.": "DistributedDataParallel or DataParallel",
    "_fsdp_wrapped_module.": "FullyShardedDataParallel",
}  # fmt: skip
ADAPTERS = (".lora_A.", ".lora_B.", ".lora_embedding_A", ".base_layer.", "base_model.model.")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def explain(names: Collection[str], expected: Collection[str]) -> str | None:
    """Return the reason why the tensor names differ, or None if it is not known."""
    if adapter := next((name for name in names if any(part in name for part in ADAPTERS)), None):
        return (
            f"it has tensors of a LoRA adapter, such as {adapter!r}; merge the adapter into the model first (PEFT's "
            "merge_and_unload) and save that"
        )
    for prefix, wrapper in WRAPPERS.items():
        if any(name.startswith(prefix) for name in names):
            return (
                f"its tensors' names begin with {prefix!r}: it was saved from a model wrapped in {wrapper}; save the "
                "wrapped model itself, or remove the prefix from the names"
            )
    if not any(name.startswith("model.") for name in names) and any(f"model.{name}" in expected for name in names):
        return (
            "its tensors' names lack the prefix 'model.': it was saved from the model without its vocabulary head; "
            "load it with transformers' AutoModelForCausalLM and save that"
        )
    return None


def resized(shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return a message if the vocabulary has another size than in config.json, else None."""
    for name in (EMBEDDING, HEAD):
        if name not in shapes or name not in expected:
            continue
        (rows, *width), (vocab_size, *hidden_size) = shapes[name], expected[name]
        if rows != vocab_size and width == hidden_size:
            return (
                f"{name!r} has {rows} rows, vocab_size in config.json is {vocab_size}: the vocabulary was resized; set "
                f"vocab_size to {rows}"
            )
    return None
