"""Use of the fields of config.json: a table of all fields that transformers declares for the families.

`tests/families/test_config_fields.py` compares it with transformers' own config classes and models.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any


class Use(enum.Enum):
    """Handling of a field."""

    READ = "read"
    IRRELEVANT = "irrelevant"
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True)
class Field:
    """`meaning`: the effect of a field that is read, the reason why a field is irrelevant, or the value that is
    refused. `example`: a value of an irrelevant field that must not change the logits."""

    use: Use
    meaning: str
    example: Any = None


def _read(meaning: str) -> Field:
    return Field(Use.READ, meaning)


def _irrelevant(meaning: str, example: Any = None) -> Field:
    return Field(Use.IRRELEVANT, meaning, example)


def _refused(meaning: str) -> Field:
    return Field(Use.REFUSED, meaning)


_TRAINING = "training only"
_OUTPUTS = "which outputs transformers' forward returns"
_TASKS = "sequence classification only"
FIELDS = {
    "architectures": _read("the class of a converted model; that of an original follows from model_type"),
    "dtype": _read("dtype of the stored weights (also torch_dtype)"),
    "vocab_size": _read("rows of the embedding and of the vocabulary head"),
    "hidden_size": _read("width of the residual stream"),
    "intermediate_size": _read("width of an MLP or of an expert"),
    "num_hidden_layers": _read("decoder layers"),
    "num_attention_heads": _read("query heads"),
    "num_key_value_heads": _read("key and value heads"),
    "head_dim": _read("width of a head; hidden_size / num_attention_heads if it is null"),
    "hidden_act": _read("activation function of the MLP"),
    "max_position_embeddings": _read("context length, and the default of YaRN's and llama3's original one"),
    "rms_norm_eps": _read("epsilon of all RMS norms"),
    "tie_word_embeddings": _read("whether embedding and vocabulary head are one; a stored lm_head.weight overrules it"),
    "rope_parameters": _read(
        "RoPE (also rope_scaling, rope_theta): default, linear, llama3 and yarn; other types, parameters by layer type "
        "and a partial_rotary_factor other than 1 are refused"
    ),
    "attention_bias": _read("biases of the projections of attention"),
    "mlp_bias": _read("biases of the MLP"),
    "use_sliding_window": _read("whether sliding_window applies"),
    "sliding_window": _read("tokens that a layer with a sliding window attends to"),
    "max_window_layers": _read("number of layers below the first with a sliding window, if layer_types is absent"),
    "layer_types": _read(
        "full_attention or sliding_attention for each layer; other types are refused. A mistral config that has it is "
        "read as ministral, as transformers does"
    ),
    "num_local_experts": _read("experts of a layer"),
    "num_experts_per_tok": _read("experts of a token; a contradicting experts_per_token is refused"),
    "swiglu_alpha": _read("slope of the sigmoid in the experts' gate"),
    "swiglu_limit": _read("clamp of the experts' gate and up projections"),
    "eos_token_id": _read("tokens that end a text, if generation_config.json names none"),
    "bos_token_id": _read("the token that begins a text, if the tokenizer has none"),
    "is_causal": _refused("false is refused: attention to later tokens"),
    "pad_token_id": _irrelevant("sequences are not padded"),
    "transformers_version": _irrelevant("the version that wrote the file", "4.0.0"),
    "output_hidden_states": _irrelevant(_OUTPUTS, False),
    "return_dict": _irrelevant(_OUTPUTS, True),
    "use_cache": _irrelevant("the engine has a separate cache", False),
    "output_router_logits": _irrelevant(_OUTPUTS, False),
    "chunk_size_feed_forward": _irrelevant("not used by these models", 8),
    "is_encoder_decoder": _irrelevant("these models are decoders", False),
    "id2label": _irrelevant(_TASKS),
    "label2id": _irrelevant(_TASKS),
    "problem_type": _irrelevant(_TASKS, "regression"),
    "initializer_range": _irrelevant(_TRAINING, 0.5),
    "attention_dropout": _irrelevant(_TRAINING, 0.5),
    "router_aux_loss_coef": _irrelevant(_TRAINING, 0.5),
    "pretraining_tp": _irrelevant("transformers no longer splits linear layers by it", 2),
}  # fmt: skip
