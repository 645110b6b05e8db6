"""EAGLE-3 head checkpoints: config.json and safetensors of `LlamaForCausalLMEagle3`, with matrices in a float dtype or
in int8 (head_reader.py).

Loading is strict: a missing, extra or wrongly shaped tensor, or a d2t outside the target's vocabulary, is an error
(`draft import`, drafting/import_head.py, accepts variants). `layers.0.*` is another name of `midlayer.*`. The captured
hidden states, `eagle_aux_hidden_state_layer_ids`, are counted by `eagle_aux_hidden_state_convention`:

boundary        j is the input of layer j (vLLM's count: 0 is the embedding); -1 is the output of the final norm
output          j is the output of layer j
hidden_states   j is transformers' hidden_states[j]: as boundary, but the last one is the output of the final norm

Legend: V draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from mlaforge.checkpoint.head_reader import QUANTIZATION, SCALE, HeadReader, quantize
from mlaforge.checkpoint.reader import SINGLE, Reader, is_finite, read_config
from mlaforge.families.schema import COUNT, OBJECT, check, check_config, list_of, whole
from mlaforge.families.spec import capture_boundaries
from mlaforge.modeling.block_head import BlockConfig
from mlaforge.modeling.eagle3 import AFTER_NORM, Eagle3Config, Eagle3Head
from mlaforge.runtime import UserError

DraftConfig = Eagle3Config | BlockConfig
ARCHITECTURE = "LlamaForCausalLMEagle3"
# Integer tensors.
VOCABULARY = frozenset({"d2t", "t2d"})
CONVENTIONS = ("boundary", "output", "hidden_states")
# Meanings of d2t: the offset from the head's token to the target's, or the target's token.
OFFSETS, IDS = "offsets", "ids"
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Fields beside those of the decoder layer.
RULES = {
    "target_hidden_size": COUNT,
    "draft_vocab_size": COUNT,
    "mask_token_id": whole(0),
    "markov_rank": whole(0),
    "eagle_config": OBJECT,
    "eagle_aux_hidden_state_layer_ids": list_of(whole(-1)),
}
# Fields of the layer's config that are written: they determine its shapes and rotary angles.
LAYER_FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "attention_bias", "vocab_size", "max_position_embeddings", "rope_parameters",
)  # fmt: skip


def read_head_config(directory: Path, num_layers: int | None) -> Eagle3Config:
    """Return the head's config for a target of `num_layers` layers; None for an unknown target, for which config.json
    must list the captured boundaries. Raises UserError if it does not describe a head."""
    config_dict = read_config(directory)
    if ARCHITECTURE not in (config_dict.get("architectures") or ()):
        architectures = " ".join(map(str, config_dict.get("architectures") or ()))
        hint = "; import it first (mlaforge draft import)" if "eagle3" in architectures.lower() else ""
        raise UserError(f"{directory} is no EAGLE-3 head: its architectures is not [{ARCHITECTURE!r}]{hint}")
    with Reader(directory) as reader:
        return head_config(directory, config_dict, num_layers, "embed_tokens.weight" in reader)


def head_config(
    directory: Path, config_dict: dict[str, Any], num_layers: int | None, has_embedding: bool
) -> Eagle3Config:
    """Same as `read_head_config` for a config.json as a dict, read from `directory`."""
    from transformers import LlamaConfig

    check_config(config_dict)
    check(config_dict, RULES, "config.json")
    check(config_dict.get("eagle_config") or {}, RULES, "config.json: eagle_config")
    if config_dict.get("num_hidden_layers", 1) != 1:
        raise UserError(
            f"{directory}: num_hidden_layers = {config_dict['num_hidden_layers']}; heads of 1 layer are read"
        )
    # Some tools write the following fields at the top level, some in eagle_config.
    eagle = {**config_dict, **(config_dict.get("eagle_config") or {})}
    try:
        layer = LlamaConfig(
            **{name: config_dict[name] for name in (*LAYER_FIELDS, "rope_theta", "rope_scaling") if name in config_dict}
        )
        layer.mlp_bias = False
        ids = eagle.get("eagle_aux_hidden_state_layer_ids")
        if not ids:
            if num_layers is None:
                raise UserError(
                    f"{directory}: config.json has no eagle_aux_hidden_state_layer_ids, and its defaults depend on the "
                    "target; import the head for its target first (mlaforge draft import)"
                )
            ids = capture_boundaries(num_layers)
        convention = eagle.get("eagle_aux_hidden_state_convention", "boundary")
        if convention not in CONVENTIONS:
            raise UserError(
                f"{directory}: eagle_aux_hidden_state_convention = {convention!r} must be one of {CONVENTIONS}"
            )
        boundaries = tuple(boundary(int(i), convention, num_layers) for i in ids)
        config = Eagle3Config(
            layer, int(config_dict.get("target_hidden_size") or layer.hidden_size),
            int(config_dict.get("draft_vocab_size") or layer.vocab_size), boundaries,
            config_dict.get("sliding_window"), has_embed_tokens=has_embedding,
            mask_token_id=config_dict.get("mask_token_id"), markov_rank=config_dict.get("markov_rank", 0),
            **{name: bool(eagle.get(name, False)) for name in SWITCHES},
        )  # fmt: skip
    except (StrictDataclassError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{directory}: config.json makes no EAGLE-3 head: {' '.join(str(error).split())}") from error
    if config.markov_rank and config.mask_token_id is None:
        raise UserError(f"{directory}: markov_rank = {config.markov_rank} needs a mask_token_id")
    return config


def boundary(number: int, convention: str, num_layers: int | None) -> int:
    """Return the boundary of a captured layer's number. Raises UserError for an invalid number. For an unknown target
    (None) the upper limit is not checked, and `hidden_states` is not supported."""
    if num_layers is None and convention == "hidden_states":
        raise UserError(
            "eagle_aux_hidden_state_convention = 'hidden_states' depends on the target; import the head for its target "
            "first (mlaforge draft import)"
        )
    index = number + (convention == "output")
    if convention == "hidden_states" and number == num_layers:
        index = AFTER_NORM
    last = index if num_layers is None else num_layers
    if not (0 <= index <= last or (index == AFTER_NORM and convention != "output")):
        layers = "" if num_layers is None else f"; the target has {num_layers} layers"
        raise UserError(f"it captures {convention} {number}{layers}")
    return index


def check_head(config: DraftConfig, hidden_size: int, vocab_size: int) -> None:
    """Raises UserError unless the head was trained for a target of these sizes."""
    for name, size, target_size in (
        ("target_hidden_size", config.target_hidden_size, hidden_size),
        ("vocab_size", config.layer.vocab_size, vocab_size),
    ):
        if size != target_size:
            raise UserError(f"the head's {name} is {size}, the model's {target_size}: it was trained for another model")
    if not config.has_embed_tokens and config.layer.hidden_size != hidden_size:
        raise UserError(f"a head of hidden size {config.layer.hidden_size} needs embed_tokens of its own")


def read_head(directory: Path, num_layers: int | None) -> Eagle3Head:
    """Load the head in fp32 on the CPU, dequantised if its matrices are in int8; `num_layers` as in read_head_config.
    Raises UserError for an invalid config or tensor."""
    config = read_head_config(directory, num_layers)
    with torch.device("meta"):
        head = Eagle3Head(config)
    load_tensors(head, directory, lambda name: name.replace("layers.0.", "midlayer.", 1))
    return head


def load_tensors(head: Any, directory: Path, renamed: Callable[[str], str] = str) -> None:
    """Load the tensors of a draft head on the meta device, as `read_head`. renamed: name in the file -> in the head."""
    with HeadReader(directory) as reader:
        stored = {name: renamed(name) for name in reader.weights}
        shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
        expected = {old: shapes[new] for old, new in stored.items() if new in shapes}
        absent = {new: shape for new, shape in shapes.items() if new not in stored.values()}
        reader.check(expected | absent, whole=VOCABULARY)
        state = {new: _as_float(reader[old]) for old, new in stored.items()}
    head.load_state_dict(state, assign=True)
    head.requires_grad_(False).eval()
    if "d2t" in state:
        _check_vocabulary(directory, head.config, state)


def _as_float(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _check_vocabulary(directory: Path, config: DraftConfig, state: dict[str, Tensor]) -> None:
    try:
        target_ids(state["d2t"], state["t2d"], config.layer.vocab_size, OFFSETS)
    except UserError as error:
        raise UserError(
            f"{directory}: {error}; d2t must be offsets (target = draft + d2t[draft]) that give ascending token ids; "
            "import any other head first (mlaforge draft import)"
        ) from error


def target_ids(d2t_V: Tensor, t2d: Tensor | None, vocabulary: int, reading: str = "auto") -> tuple[str, Tensor]:
    """Return the meaning of `d2t_V` (OFFSETS or IDS) and its target token ids [V], in the order of `d2t_V`.

    Offsets (target = draft + d2t[draft]) must give ascending ids; ids may be in any order, without repetition. In both
    cases they must be in the target's vocabulary and equal the tokens that `t2d` marks. `reading` selects one meaning.
    Raises UserError if no meaning is valid, or both are.
    """
    if d2t_V.ndim != 1 or d2t_V.is_floating_point() or not len(d2t_V):
        raise UserError(f"d2t is {d2t_V.dtype} {list(d2t_V.shape)}; it must be a list of whole numbers")
    d2t_V = d2t_V.to(torch.int64)
    readings = {OFFSETS: d2t_V + torch.arange(len(d2t_V)), IDS: d2t_V}
    if reading != "auto":
        readings = {reading: readings[reading]}
    problems = {name: _problem(name, ids_V, t2d, vocabulary) for name, ids_V in readings.items()}
    valid = [name for name, problem in problems.items() if problem is None]
    if len(valid) == 1:
        return valid[0], readings[valid[0]]
    if valid:
        raise UserError("d2t can be offsets as well as ids, and no t2d decides: give --d2t offsets or --d2t ids")
    raise UserError("d2t is wrong: " + "; ".join(f"as {name} it {problem}" for name, problem in problems.items()))


def _problem(name: str, ids_V: Tensor, t2d: Tensor | None, vocabulary: int) -> str | None:
    outside = ids_V[(ids_V < 0) | (ids_V >= vocabulary)]
    if len(outside):
        return f"names token {int(outside[0])}, the target has {vocabulary}"
    if name == OFFSETS and bool((ids_V.diff() <= 0).any()):
        position = int((ids_V.diff() <= 0).nonzero()[0, 0])
        return f"falls from token {int(ids_V[position])} to {int(ids_V[position + 1])}"
    ascending = ids_V.sort().values
    if bool((ascending.diff() == 0).any()):
        return f"names token {int(ascending[:-1][ascending.diff() == 0][0])} twice"
    if t2d is not None and (len(t2d) != vocabulary or t2d.nonzero()[:, 0].tolist() != ascending.tolist()):
        return "names other tokens than t2d marks"
    return None


def mapping(ids_V: Tensor, vocabulary: int) -> dict[str, Tensor]:
    """Return d2t (offsets) and t2d, as stored in files, of ascending token ids."""
    t2d = torch.zeros(vocabulary, dtype=torch.bool)
    t2d[ids_V] = True
    return {"d2t": ids_V - torch.arange(len(ids_V)), "t2d": t2d}


def buffers(config: DraftConfig, ids_V: Tensor) -> dict[str, Tensor]:
    """Return the `mapping` of a head that proposes these tokens; nothing for a head with the target's vocabulary."""
    return {} if config.draft_vocab_size == config.layer.vocab_size else mapping(ids_V, config.layer.vocab_size)


def write_head(head: Eagle3Head, directory: Path, dtype: torch.dtype = torch.float16) -> None:
    """Write a head to the folder `directory`, with the convention of its boundaries.

    dtype: of all floating tensors; int8 applies to the matrices, with scales in fp32 and all other tensors in fp16.
    Raises UserError for a tensor that overflows in its dtype.
    """
    config, layer = head.config, head.config.layer.to_dict()
    config_json: dict[str, Any] = {
        "architectures": [ARCHITECTURE], "model_type": head.config.layer.model_type, "num_hidden_layers": 1,
        **{name: layer[name] for name in LAYER_FIELDS}, "target_hidden_size": config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size, "sliding_window": config.sliding_window,
        "eagle_aux_hidden_state_layer_ids": list(config.boundaries),
        "eagle_aux_hidden_state_convention": CONVENTIONS[0], "tie_word_embeddings": False, "torch_dtype": None,
        **{name: getattr(config, name) for name in SWITCHES},
        **({} if config.mask_token_id is None else {"mask_token_id": config.mask_token_id}),
        **({"markov_rank": config.markov_rank} if config.markov_rank else {}),
    }  # fmt: skip
    save_tensors(head, directory, dtype, config_json)


def save_tensors(head: Any, directory: Path, dtype: torch.dtype, config_json: dict[str, Any]) -> None:
    """Write the tensors of a draft head and its config.json, as `write_head`, with "torch_dtype" of the tensors."""
    from safetensors.torch import save_file

    float_dtype = torch.float16 if dtype == torch.int8 else dtype
    config_json["torch_dtype"] = str(float_dtype).removeprefix("torch.")
    state: dict[str, Tensor] = {}
    for name, tensor in head.state_dict().items():
        if not tensor.is_floating_point():
            state[name] = tensor.contiguous()
        elif dtype == torch.int8 and tensor.ndim == 2:
            state[name], state[f"{name}{SCALE}"] = quantize(tensor)
        else:
            state[name] = tensor.to(float_dtype).contiguous()
            if not is_finite(state[name]):
                raise UserError(f"{name!r} holds values that are not finite in {float_dtype}; choose another dtype")
    if dtype == torch.int8:
        config_json["quantization_config"] = QUANTIZATION
    save_file(state, directory / SINGLE, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config_json, indent=1) + "\n", encoding="utf-8")
