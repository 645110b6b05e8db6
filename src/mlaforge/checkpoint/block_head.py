"""Block draft head checkpoints: config.json and safetensors of `BlockDraftModel`, with matrices in a float dtype or in
int8 (head_reader.py).

The names of layers and tensors are those of `DFlashDraftModel` (DFlash, arXiv:2602.06036), which has neither
`mask_embedding` nor `lm_head` nor a draft vocabulary (`draft import`, drafting/import_block.py). Loading is strict.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from mlaforge.checkpoint.eagle3 import LAYER_FIELDS, load_tensors, save_tensors
from mlaforge.checkpoint.reader import read_config
from mlaforge.families.schema import COUNT, check, check_config, list_of, whole
from mlaforge.modeling.block_head import BlockConfig, BlockHead
from mlaforge.runtime import UserError

ARCHITECTURE = "BlockDraftModel"
# Fields beside those of the decoder layers.
RULES = {
    "target_hidden_size": COUNT,
    "draft_vocab_size": COUNT,
    "num_hidden_layers": COUNT,
    "block_size": whole(2),
    "boundaries": list_of(whole(-1)),
}


def head_config(directory: Path, config_dict: dict[str, Any], num_layers: int | None) -> BlockConfig:
    """Return the config of a block head from its config.json as a dict, read from `directory`, for a target of
    `num_layers` layers; None for an unknown target. Raises UserError if it does not describe a head."""
    from transformers import LlamaConfig

    check_config(config_dict)
    check(config_dict, {**RULES, "markov_rank": whole(0)}, "config.json")
    if missing := [name for name in RULES if not config_dict.get(name)]:
        raise UserError(f"{directory}: config.json has no {missing[0]}, which a block head needs")
    boundaries = tuple(int(number) for number in config_dict["boundaries"])
    if num_layers is not None and max(boundaries) > num_layers:
        raise UserError(f"{directory}: it captures boundary {max(boundaries)}; the target has {num_layers} layers")
    try:
        layer = LlamaConfig(
            num_hidden_layers=config_dict["num_hidden_layers"], mlp_bias=False,
            **{name: config_dict[name] for name in LAYER_FIELDS if name in config_dict},
        )  # fmt: skip
        return BlockConfig(
            layer, config_dict["target_hidden_size"], config_dict["draft_vocab_size"], boundaries,
            config_dict["block_size"], config_dict.get("sliding_window"), bool(config_dict.get("fc_norm", False)),
            config_dict.get("markov_rank", 0),
        )  # fmt: skip
    except (StrictDataclassError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{directory}: config.json makes no block head: {' '.join(str(error).split())}") from error


def read_head(directory: Path, num_layers: int | None) -> BlockHead:
    """As checkpoint/eagle3.py's `read_head`."""
    config = head_config(directory, read_config(directory), num_layers)
    with torch.device("meta"):
        head = BlockHead(config)
    load_tensors(head, directory)
    return head


def write_head(head: BlockHead, directory: Path, dtype: torch.dtype = torch.float16) -> None:
    """As checkpoint/eagle3.py's `write_head`."""
    config, layer = head.config, head.config.layer.to_dict()
    save_tensors(head, directory, dtype, {
        "architectures": [ARCHITECTURE], "model_type": config.layer.model_type,
        "num_hidden_layers": config.layer.num_hidden_layers, **{name: layer[name] for name in LAYER_FIELDS},
        "target_hidden_size": config.target_hidden_size, "draft_vocab_size": config.draft_vocab_size,
        "sliding_window": config.sliding_window, "block_size": config.block_size,
        "boundaries": list(config.boundaries), "fc_norm": config.fc_norm, "markov_rank": config.markov_rank,
        "tie_word_embeddings": False,
    })  # fmt: skip
