"""Validation of the fields that `convert` and `sparsify` add to config.json.

modeling/configuration_mla.py documents the fields.
"""

from __future__ import annotations

import itertools
from typing import Any

from mlaforge import families
from mlaforge.families.schema import FLAG, LARGEST_HEAD, Rule, check, invalid, list_of, number, one_of, whole
from mlaforge.families.spec import ModelSpec
from mlaforge.modeling.coded_layout_mla import VERSION, VERSIONS
from mlaforge.modeling.coded_rows_mla import LARGEST_CODE
from mlaforge.modeling.configuration_mla import FIELDS
from mlaforge.modeling.token_index_mla import INDEXES
from mlaforge.runtime import UserError

SUFFIX = "_mla"
# The width of an index key is a multiple of this.
INDEX_MULTIPLE = 8
RULES = {
    "architectures": Rule("a list", lambda value: isinstance(value, list)),
    "kv_lora_rank": whole(0),
    "qk_rope_head_dim": whole(0),
    "qk_nope_head_dim": whole(1, LARGEST_HEAD),
    "v_head_dim": whole(1, LARGEST_HEAD),
    "q_lora_rank": whole(1),
    "softmax_scale": number(above=0),
    "mla_layer_types": list_of(one_of("gqa", "latent", "latent_rope")),
    "mla_kv_lora_ranks": list_of(whole(0)),
    "mla_code_counts": list_of(list_of(whole(0))),
    "mla_code_version": Rule(
        f"one of {', '.join(map(str, VERSIONS))}, the versions of coded rows that this version of mlaforge reads",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value in VERSIONS,
    ),
    "mla_q_bias": FLAG,
    "mla_k_bias": FLAG,
    "mla_o_bias": FLAG,
    "mla_sinks": FLAG,
    "mla_qk_norm": FLAG,
    "index_kind": one_of(*INDEXES),
    "index_topk": whole(1),
    "index_topk_per_layer": list_of(whole(0)),
    "index_head_dim": whole(0, LARGEST_HEAD),
    "index_sink": whole(0),
    "index_window": whole(0),
    "index_stride": whole(0),
    "indexer_types": list_of(one_of("full", "shared", "dense")),
}
# Fields whose default in FIELDS is not valid for a converted model.
REQUIRED = (
    "architectures", "mla_layer_types", "mla_kv_lora_ranks", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim",
    "softmax_scale",
)  # fmt: skip


# Fields that a sparse model has all of and a dense one none; without one of them other engines would serve it densely.
SPARSE = ("index_kind", "index_topk", "index_head_dim", "index_window", "indexer_types")


def is_sparse(config: dict[str, Any]) -> bool:
    """Return whether a config.json describes a sparse model, written by `sparsify`."""
    return any(config.get(name) for name in SPARSE)


def check_selection(topk: int, sink: int, window: int, width: int | None = None) -> None:
    """Raise UserError for options of a selection that contradict each other, and for a width that is not a multiple of
    INDEX_MULTIPLE."""
    forced = sink + window
    if topk <= forced:
        raise UserError(
            f"topk = {topk} must be above the {forced} tokens that are always read (sink {sink}, window {window})"
        )
    if width is not None and width % INDEX_MULTIPLE:
        raise UserError(f"width = {width} must be a multiple of {INDEX_MULTIPLE}")


def is_converted(config: dict[str, Any]) -> bool:
    """Return whether a config.json describes a converted model."""
    return str(config.get("model_type")).endswith(SUFFIX)


def architecture(model_type: str) -> str:
    """Return the causal-LM class of a converted model, such as LlamaMlaForCausalLM. Raises UserError for an unsupported
    family."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    family = families.family_of({"model_type": model_type.removesuffix(SUFFIX)})
    original = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.computed_by or family.model_type])
    return original.replace("ForCausalLM", "MlaForCausalLM")


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """Return a converted config.json with the defaults of absent fields, as transformers would fill them in."""
    return {**{name: default for name, (_, default) in FIELDS.items() if name not in REQUIRED}, **config}


def with_current_code(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json for a checkpoint that gets the current model code: of the current version of coded rows,
    whose counts and weights are those of all versions."""
    return {**config, "mla_code_version": VERSION} if config.get("mla_code_counts") else config


def check_converted(config: dict[str, Any], spec: ModelSpec) -> None:
    """Raises UserError for the first field of a converted model that is missing, has a wrong type, or contradicts
    another field or `spec`, the source's."""
    for name in REQUIRED:
        if config.get(name) is None:
            raise UserError(f"config.json has no {name!r}, which a converted model must have")
    check(config, RULES, "config.json")
    layouts, ranks, head_dim = config["mla_layer_types"], config["mla_kv_lora_ranks"], spec.layers[0].head_dim
    latent, rotary = [layout != "gqa" for layout in layouts], config.get("qk_rope_head_dim") or 0
    expected_class = [architecture(spec.model_type)]
    per_layer = f"a list of {spec.num_layers}, one for each layer"
    codes: list[list[int]] = config.get("mla_code_counts") or [[]] * spec.num_layers
    for field, is_valid, expected in (
        ("architectures", config["architectures"] == expected_class, f"{expected_class}"),
        ("mla_layer_types", len(layouts) == spec.num_layers, per_layer),
        ("mla_layer_types", any(latent) or is_sparse(config), "another kind than gqa for at least one layer"),
        ("mla_kv_lora_ranks", len(ranks) == spec.num_layers, per_layer),
        ("mla_kv_lora_ranks", [rank > 0 for rank in ranks] == latent, f"0 for gqa, above for others of {layouts}"),
        ("mla_code_counts", len(codes) == spec.num_layers, per_layer),
        (
            "mla_code_counts",
            [code[0] for code in codes if code] == [r for r, code in zip(ranks, codes, strict=False) if code],
            f"lists that begin with the ranks {ranks} for coded layers",
        ),
        (
            "mla_code_counts",
            all(code == sorted(code, reverse=True) and len(code) <= LARGEST_CODE for code in codes),
            f"at most {LARGEST_CODE} numbers per layer, in descending order",
        ),
        ("mla_code_counts", all(count % 8 == 0 and count > 0 for code in codes for count in code), "multiples of 8"),
        ("kv_lora_rank", config["kv_lora_rank"] == max(ranks, default=0), f"the largest of {ranks}"),
        ("qk_nope_head_dim", config["qk_nope_head_dim"] == head_dim, f"{head_dim}, the head_dim"),
        ("v_head_dim", config["v_head_dim"] == head_dim, f"{head_dim}, the head_dim"),
        ("qk_rope_head_dim", rotary % 2 == 0, "even"),
        ("qk_rope_head_dim", (rotary > 0) == ("latent_rope" in layouts), "above 0 with layers of latent_rope, else 0"),
    ):
        if not is_valid:
            raise invalid("config.json", field, config.get(field), expected)
    if is_sparse(config):
        _check_sparse(config, spec)


def _check_sparse(config: dict[str, Any], spec: ModelSpec) -> None:
    for name in SPARSE:
        if not config.get(name):
            raise UserError(f"config.json has no {name!r}, which a sparse model must have; it would be served densely")
    kinds = config["indexer_types"]
    topks = config.get("index_topk_per_layer") or [config["index_topk"]] * spec.num_layers
    sparse = [(kind, topk) for kind, topk in zip(kinds, topks, strict=False) if kind != "dense"]
    first = sparse[0][0] if sparse else None
    forced = (config.get("index_sink") or 0) + config["index_window"]
    per_layer = f"a list of {spec.num_layers}, one for each layer"
    sliding = [i for i, layer in enumerate(spec.layers) if layer.window is not None]
    for field, is_valid, expected in (
        ("indexer_types", len(kinds) == spec.num_layers, per_layer),
        ("indexer_types", first == "full", "full before the first shared"),
        (
            "indexer_types",
            all(kinds[i] == "dense" for i in sliding if i < len(kinds)),
            f"dense for the layers with a sliding window: {sliding}",
        ),
        ("index_topk_per_layer", len(topks) == spec.num_layers, per_layer),
        (
            "index_topk_per_layer",
            all(topk == before for (_, before), (kind, topk) in itertools.pairwise(sparse) if kind == "shared"),
            "for a shared layer the value of the layer before it",
        ),
        (
            "index_topk",
            all(topk > forced for _, topk in sparse),
            f"above the {forced} tokens that are always selected",
        ),
        ("index_head_dim", config["index_head_dim"] % INDEX_MULTIPLE == 0, f"a multiple of {INDEX_MULTIPLE}"),
    ):
        if not is_valid:
            raise invalid("config.json", field, config.get(field), expected)
