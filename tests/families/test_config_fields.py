"""Every field of config.json that transformers declares for a supported family is read, irrelevant or refused.

Each variant below is a tiny model: the engine's logits must equal those of transformers' class for the same
config.json, and the spec must equal the config of that class, including defaults of absent fields.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers

from mlaforge import families
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.families.fields import FIELDS, Use
from mlaforge.rendering.table import markdown_table
from mlaforge.runtime import UserError
from support.engine_driver import prompt_logprobs
from support.tiny_models import YARN, save_model

DOCUMENT = Path(__file__).parents[2] / "docs" / "checkpoint-fields.md"
CLASSES = {
    "llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral", "ministral": "Ministral", "qwen3": "Qwen3",
    "gpt_oss": "GptOss",
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 700.0, "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 700.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
# Values of the fields that are read; several if one would not cover the field.
VARIANTS = {
    "vocab_size": [270], "hidden_size": [48], "intermediate_size": [80], "num_hidden_layers": [2],
    "num_attention_heads": [8], "num_key_value_heads": [1, 4], "head_dim": [8, 20], "max_position_embeddings": [256],
    "hidden_act": ["gelu", "relu"], "rms_norm_eps": [0.3], "tie_word_embeddings": [True],
    "attention_bias": [True, False],
    "mlp_bias": [True], "rope_parameters": [LINEAR, LLAMA3, YARN, {"rope_type": "default", "rope_theta": 50.0}],
    "use_sliding_window": [True], "sliding_window": [8, None], "max_window_layers": [1],
    "layer_types": [[FULL, SLIDING, FULL], [SLIDING, SLIDING, FULL]], "num_local_experts": [6],
    "num_experts_per_tok": [1],
    "swiglu_alpha": [0.5], "swiglu_limit": [0.4],
}  # fmt: skip
# Fields without effect on the logits: beginning and end of a text, storage of weights.
NOT_IN_LOGITS = {"eos_token_id", "bos_token_id", "dtype", "architectures"}
# Fields of config.json as written by transformers 4.
OLD = [
    ("llama", {"rope_theta": 50.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("llama", {"rope_theta": 50.0, "rope_scaling": LINEAR, "rope_parameters": LLAMA3}),
    ("llama", {"rope_scaling": {k: v for k, v in YARN.items() if not k.startswith("orig")}}),
    ("mistral", {"layer_types": [SLIDING, FULL, SLIDING]}),
]  # fmt: skip


def declared(family):
    """Names of the fields of transformers' config class."""
    return {field.name for field in dataclasses.fields(getattr(transformers, f"{CLASSES[family]}Config"))}


def cases():
    for family in CLASSES:
        for name in sorted(declared(family) & VARIANTS.keys()):
            for value in VARIANTS[name]:
                # Sliding layers need a window, and layer_types lists every layer.
                if (family == "ministral" and name == "num_hidden_layers") or (
                    family in ("gpt_oss", "ministral") and value is None
                ):
                    continue
                windows = family.startswith("qwen") and name in ("sliding_window", "max_window_layers", "layer_types")
                values = {name: value, **({"use_sliding_window": True} if windows else {})}
                yield pytest.param(family, values, id=f"{family}-{name}-{VARIANTS[name].index(value)}")


def edited(directory, values, remove=()):
    path = directory / "config.json"
    config = json.loads(path.read_text()) | {name: value for name, value in values.items() if name not in remove}
    path.write_text(json.dumps({name: value for name, value in config.items() if name not in remove}))
    return directory


@torch.no_grad()
def transformers_logprobs(directory, ids):
    """Return the log probability of every token but the first, by transformers' class for config.json, [len(ids) -
    1]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)[range(len(ids) - 1), ids[1:]]


def check_logprobs(directory):
    torch.testing.assert_close(
        prompt_logprobs(directory, IDS), transformers_logprobs(directory, IDS), atol=1e-3, rtol=1e-3
    )


IDS = torch.randint(0, 250, (40,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize(("family", "values"), cases())
def test_read_fields_have_transformers_meaning(family, values, tmp_path):
    directory = save_model(tmp_path, family, 0, **values)
    check_logprobs(directory)
    check_spec(directory)


@pytest.mark.parametrize(("family", "values"), OLD)
def test_older_spellings_have_transformers_meaning(family, values, tmp_path):
    directory = edited(save_model(tmp_path, family, 0), values, {"rope_parameters"} - values.keys())
    check_logprobs(directory)
    check_spec(directory)


@pytest.mark.parametrize("family", CLASSES)
def test_absent_fields_have_transformers_defaults(family, tmp_path):
    save_model(tmp_path, family, 0)
    whole = json.loads((tmp_path / "config.json").read_text())
    needed = {
        "model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size",
        "num_local_experts", "num_key_value_heads", "use_sliding_window",
    }  # fmt: skip
    for name in sorted(whole.keys() - needed):
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in whole.items() if k != name}))
        check_spec(tmp_path)


def check_spec(directory):
    """Assert that the spec equals transformers' config of the same file."""
    spec, config = SourceModel.open(directory).spec, transformers.AutoConfig.from_pretrained(directory)
    rope = config.rope_parameters
    windows = [
        config.sliding_window if kind == SLIDING else None for kind in getattr(config, "layer_types", None) or []
    ] or [getattr(config, "sliding_window", None)] * config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert [layer.window for layer in spec.layers] == windows
    assert (spec.rope.theta, spec.rope.kind) == (rope["rope_theta"], rope["rope_type"])
    assert spec.rope.parameters.get("original_max_position_embeddings") == rope.get("original_max_position_embeddings")
    assert spec.rope.parameters.get("factor") == rope.get("factor")
    assert spec.max_position_embeddings == config.max_position_embeddings
    assert {layer.head_dim for layer in spec.layers} == {head_dim}
    if config.model_type != "mistral" and hasattr(config, "attention_bias"):
        assert {layer.o_bias for layer in spec.layers} == {config.attention_bias}
    if hasattr(config, "num_experts_per_tok"):
        assert {layer.moe.top_k for layer in spec.layers} == {config.num_experts_per_tok}


@pytest.mark.parametrize(
    ("values", "dtype"),
    [({"dtype": "half"}, torch.float16), ({"dtype": ..., "torch_dtype": "torch.bfloat16"}, torch.bfloat16),
     ({"dtype": "float"}, torch.float32), ({"dtype": ...}, torch.float32)],
)  # fmt: skip
def test_every_spelling_of_a_dtype(values, dtype, tmp_path):
    directory = edited(save_model(tmp_path, "llama", 0), values, {name for name in values if values[name] is ...})
    assert SourceModel.open(directory).dtype is dtype


@pytest.mark.parametrize("family", CLASSES)
def test_every_declared_field_is_in_the_table(family):
    """A field that a new version of transformers adds must be classified."""
    assert declared(family) <= FIELDS.keys()
    read = {name for name in declared(family) if FIELDS[name].use is Use.READ}
    assert read <= VARIANTS.keys() | NOT_IN_LOGITS


@pytest.mark.parametrize("family", CLASSES)
def test_irrelevant_fields_do_not_change_the_logits(family, tmp_path):
    directory = save_model(tmp_path, family, 0)
    before = transformers_logprobs(directory, IDS)
    unused = [name for name in declared(family) if FIELDS[name].use is Use.IRRELEVANT]
    edited(directory, {name: FIELDS[name].example for name in unused if FIELDS[name].example is not None})
    assert torch.equal(transformers_logprobs(directory, IDS), before)
    check_logprobs(directory)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"is_causal": False}, "is_causal"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": LINEAR, "sliding_attention": YARN}}, "full_attention"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
        ({"model_type": "qwen2", "layer_types": [SLIDING, FULL, FULL]}, "use_sliding_window"),
        ({"model_type": "mistral", "layer_types": [SLIDING, FULL, FULL], "sliding_window": None}, "sliding_window"),
    ],
)
def test_unsupported_values_are_refused_by_name(values, words, tmp_path):
    directory = edited(save_model(tmp_path, "llama", 0), values)
    with pytest.raises(UserError, match=words):
        _ = SourceModel.open(directory).spec


def test_contradicting_experts_per_token_are_refused(tmp_path):
    directory = edited(save_model(tmp_path, "gpt_oss", 0), {"experts_per_token": 3})
    with pytest.raises(UserError, match="experts_per_token = 3"):
        families.read_spec(SourceModel.open(directory).config)


def table():
    rows = [[f"`{name}`", field.use.value, field.meaning] for name, field in FIELDS.items()]
    return markdown_table([["field", "", "what it decides, or why it is not read"], *rows])


def test_the_document_has_the_table():
    """`python tests/families/test_config_fields.py` prints it."""
    assert table() in DOCUMENT.read_text(encoding="utf-8")


if __name__ == "__main__":
    print(table())
