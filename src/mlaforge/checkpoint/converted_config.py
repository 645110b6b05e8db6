"""config.json of a converted model: what is asked of the fields that `convert` writes beside its source's own.

modeling/configuration_mla.py says what each of them means.
"""

from __future__ import annotations

from typing import Any

from mlaforge import families
from mlaforge.families.schema import FLAG, LARGEST_HEAD, Rule, broken, check, list_of, number, one_of, whole
from mlaforge.families.spec import ModelSpec
from mlaforge.modeling.coded_rows_mla import LARGEST_CODE
from mlaforge.modeling.configuration_mla import FIELDS
from mlaforge.runtime import UserError

SUFFIX = "_mla"
RULES = {
    "architectures": Rule("a list", lambda value: isinstance(value, list)),
    "kv_lora_rank": whole(1),
    "qk_rope_head_dim": whole(0),
    "qk_nope_head_dim": whole(1, LARGEST_HEAD),
    "v_head_dim": whole(1, LARGEST_HEAD),
    "q_lora_rank": whole(1),
    "softmax_scale": number(above=0),
    "mla_layer_types": list_of(one_of("gqa", "latent", "latent_rope")),
    "mla_kv_lora_ranks": list_of(whole(0)),
    "mla_code_counts": list_of(list_of(whole(0))),
    "mla_q_bias": FLAG,
    "mla_k_bias": FLAG,
    "mla_o_bias": FLAG,
    "mla_sinks": FLAG,
    "mla_qk_norm": FLAG,
}
# Those whose default in FIELDS no converted model can have.
REQUIRED = (
    "architectures", "mla_layer_types", "mla_kv_lora_ranks", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim",
    "softmax_scale",
)  # fmt: skip


def is_converted(config: dict[str, Any]) -> bool:
    """Whether a config.json is one of ours."""
    return str(config.get("model_type")).endswith(SUFFIX)


def architecture(model_type: str) -> str:
    """The causal-LM class of a converted model, such as LlamaMlaForCausalLM. UserError for an unsupported family."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    family = families.family_of({"model_type": model_type.removesuffix(SUFFIX)})
    original = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.computed_by or family.model_type])
    return original.replace("ForCausalLM", "MlaForCausalLM")


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """The same with the defaults of our fields that are absent, as transformers would fill them in."""
    return {**{name: default for name, (_, default) in FIELDS.items() if name not in REQUIRED}, **config}


def check_converted(config: dict[str, Any], spec: ModelSpec) -> None:
    """Raises UserError for the first of our fields that is missing, of a wrong type, or contradicts another or the
    source's, of which `spec` is."""
    for name in REQUIRED:
        if config.get(name) is None:
            raise UserError(f"config.json has no {name!r}, which a converted model must have")
    check(config, RULES, "config.json")
    layouts, ranks, head_dim = config["mla_layer_types"], config["mla_kv_lora_ranks"], spec.layers[0].head_dim
    latent, rotary = [layout != "gqa" for layout in layouts], config.get("qk_rope_head_dim") or 0
    own = [architecture(spec.model_type)]
    each = f"a list of {spec.num_layers}, one for each layer"
    codes: list[list[int]] = config.get("mla_code_counts") or [[]] * spec.num_layers
    for field, right, words in (
        ("architectures", config["architectures"] == own, f"{own}"),
        ("mla_layer_types", len(layouts) == spec.num_layers, each),
        ("mla_layer_types", any(latent), "another kind than gqa for a layer at least"),
        ("mla_kv_lora_ranks", len(ranks) == spec.num_layers, each),
        ("mla_kv_lora_ranks", [rank > 0 for rank in ranks] == latent, f"0 for gqa, above for others of {layouts}"),
        ("mla_code_counts", len(codes) == spec.num_layers, each),
        (
            "mla_code_counts",
            [code[0] for code in codes if code] == [r for r, code in zip(ranks, codes, strict=False) if code],
            f"the ranks {ranks} first where rows are coded",
        ),
        (
            "mla_code_counts",
            all(code == sorted(code, reverse=True) and len(code) <= LARGEST_CODE for code in codes),
            f"at most {LARGEST_CODE} numbers a layer that fall",
        ),
        ("mla_code_counts", all(count % 8 == 0 and count > 0 for code in codes for count in code), "multiples of 8"),
        ("kv_lora_rank", config["kv_lora_rank"] == max(ranks, default=0), f"the largest of {ranks}"),
        ("qk_nope_head_dim", config["qk_nope_head_dim"] == head_dim, f"{head_dim}, the head_dim"),
        ("v_head_dim", config["v_head_dim"] == head_dim, f"{head_dim}, the head_dim"),
        ("qk_rope_head_dim", rotary % 2 == 0, "even"),
        ("qk_rope_head_dim", (rotary > 0) == ("latent_rope" in layouts), "above 0 with layers of latent_rope, else 0"),
    ):
        if not right:
            raise broken("config.json", field, config.get(field), words)
