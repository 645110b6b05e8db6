"""`draft import` of block heads published as `DFlashDraftModel` (z-lab/dflash), into the format of
checkpoint/block_head.py.

What such a head takes from its target is copied: the embedding of its mask token, and the language model head. Its
`target_layer_ids` number layers by their outputs, as transformers' hidden_states from 1 on: the last layer's is after
the final norm. Heads with masks or layers that this package does not compute are refused.

Legend: C hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from mlaforge.checkpoint.draft_head import FOREIGN_BLOCK
from mlaforge.checkpoint.eagle3 import LAYER_FIELDS, check_head
from mlaforge.checkpoint.reader import Reader
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.families.schema import COUNT, OBJECT, check, check_config, list_of, whole
from mlaforge.modeling.block_head import BlockConfig, BlockHead
from mlaforge.modeling.eagle3 import AFTER_NORM
from mlaforge.runtime import UserError

# Fields of dflash_config, some of which older heads have at the top level.
RULES = {"block_size": whole(2), "mask_token_id": whole(0), "target_layer_ids": list_of(whole(0))}
# Fields that change what is computed, and the values that change nothing.
NEUTRAL = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}
# From the target, not from the file.
TAKEN = ("mask_embedding", "lm_head.weight")


def is_block_head(source: SourceModel) -> bool:
    """Whether a head by another tool is of this kind; of its successors too, which `convert_head` refuses."""
    return any("dflash" in str(name).lower() for name in source.config.get("architectures") or ())


def convert_head(
    source: SourceModel, reader: Reader, model: SourceModel, target: Reader
) -> tuple[BlockHead, torch.dtype, dict[str, Any]]:
    """Return the head, its stored dtype, and the manifest's metrics. Raises UserError for a head of another
    architecture or target."""
    settings = _settings(source)
    config = _config(source, settings, model)
    check_head(config, model.spec.hidden_size, model.spec.vocab_size)
    stored: dict[str, str] = {name.removeprefix("model."): name for name in reader}
    if len(stored) < len(list(reader)):
        raise UserError(f"{source} has tensors with and without the prefix 'model.', two names of one tensor")
    with torch.device("meta"):
        head = BlockHead(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items() if name not in TAKEN}
    reader.check({stored.get(name, name): shape for name, shape in shapes.items()})
    state: dict[str, Tensor] = {name: reader[stored[name]] for name in shapes}
    dtype, embedding = state["fc.weight"].dtype, target["model.embed_tokens.weight"]
    target_head = "lm_head.weight" if "lm_head.weight" in target else "model.embed_tokens.weight"
    mask = settings["mask_token_id"]
    if mask >= len(embedding):
        raise UserError(f"{source}: mask_token_id = {mask}; the target embeds {len(embedding)} tokens")
    state["mask_embedding"] = embedding[mask].expand(config.block_size - 1, -1)
    state["lm_head.weight"] = target[target_head]
    head.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
    return head, dtype, {
        "d2t": None, "draft_vocab_size": config.draft_vocab_size, "boundaries": list(config.boundaries),
        "convention": "output", "lm_head": "the target's", "embed_tokens": "the target's",
        "block_size": config.block_size, "mask_token_id": mask,
    }  # fmt: skip


def _settings(source: SourceModel) -> dict[str, Any]:
    """Return config.json with the fields of dflash_config at the top level. Raises UserError for what is not
    supported."""
    named = source.config.get("architectures") or ()
    if FOREIGN_BLOCK not in named:
        raise UserError(f"{source}: architectures is {list(named)}; block heads of {FOREIGN_BLOCK} are read")
    check_config(source.config)
    check(source.config, {"dflash_config": OBJECT, "num_hidden_layers": COUNT}, "config.json")
    settings = {**source.config, **(source.config.get("dflash_config") or {})}
    check(settings, RULES, "config.json: dflash_config")
    for name in ("block_size", "mask_token_id", "num_attention_heads", "num_hidden_layers"):
        if settings.get(name) is None:
            raise UserError(f"{source}: config.json has no {name!r}, and it cannot be derived from tensors; add it")
    for name, value in NEUTRAL.items():
        if settings.get(name, value) != value:
            raise UserError(f"{source}: {name} = {settings[name]} is not supported")
    return settings


def _config(source: SourceModel, settings: dict[str, Any], model: SourceModel) -> BlockConfig:
    from transformers import LlamaConfig

    spec, layers = model.spec, settings["num_hidden_layers"]
    kinds = set(settings.get("layer_types") or ["full_attention"])
    sliding = kinds == {"sliding_attention"}
    causal = settings.get("is_causal")
    if len(kinds) > 1 or (sliding if causal is None else causal):
        raise UserError(f"{source}: layers of several kinds, or with a causal mask within a block, are not supported")
    chosen = settings.get("target_layer_ids") or default_layers(spec.num_layers, layers)
    if max(chosen) >= spec.num_layers:
        raise UserError(f"{source}: it captures layer {max(chosen)}; the target has {spec.num_layers} layers")
    boundaries = tuple(AFTER_NORM if layer + 1 == spec.num_layers else layer + 1 for layer in chosen)
    try:
        layer = LlamaConfig(
            num_hidden_layers=layers, mlp_bias=False,
            **{name: settings[name] for name in (*LAYER_FIELDS, "rope_theta", "rope_scaling") if name in settings},
        )  # fmt: skip
        return BlockConfig(
            layer, spec.hidden_size, layer.vocab_size, boundaries, settings["block_size"],
            settings.get("sliding_window") if sliding else None,
        )  # fmt: skip
    except (StrictDataclassError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{source}: config.json makes no block head: {' '.join(str(error).split())}") from error


def default_layers(target_layers: int, layers: int) -> list[int]:
    """Return the target's layers that a head without target_layer_ids captures, one per layer of the head: evenly from
    the second to the third before the last."""
    if layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers)]
