"""vLLM serves converted models: `vllm serve OUT` finds this through the entry point group `vllm.general_plugins`.

vLLM's own class computes all of a model but attention, whose layers are replaced by the engine's paged attention on a
cache that vLLM allots (docs/vllm.md). Written for and tried with vLLM 0.32.
"""

from __future__ import annotations

SUFFIX = "MlaForCausalLM"


def register() -> None:
    """Makes converted architectures and their configs known; as often as vLLM asks, in every one of its processes."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from mlaforge.families import families
    from mlaforge.modeling import configuration_mla
    from mlaforge.vllm_plugin.experts import checked_by

    for family in families().values():
        original = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family.computed_by or family.model_type)
        if original is None:
            # A family that this transformers does not know yet.
            continue
        name = original.replace("ForCausalLM", "Mla")
        config_class = getattr(configuration_mla, f"{name}Config")
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        # By name, so that nothing is imported before it is served.
        ModelRegistry.register_model(f"{name}ForCausalLM", f"mlaforge.vllm_plugin.model:{name}ForCausalLM")
        # What vLLM checks and sets for the original architecture.
        if original in MODELS_CONFIG_MAP:
            MODELS_CONFIG_MAP[f"{name}ForCausalLM"] = checked_by(MODELS_CONFIG_MAP[original])
