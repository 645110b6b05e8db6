"""vLLM plugin for converted models: `vllm serve OUT` loads it by the entry point group `vllm.general_plugins`.

vLLM's own model class computes everything but attention. Attention layers are replaced by the engine's paged attention,
on a cache that vLLM allocates (docs/vllm.md). Written for and tested with vLLM 0.32.
"""

from __future__ import annotations

SUFFIX = "MlaForCausalLM"


def register() -> None:
    """Register converted architectures and their configs. vLLM calls it in each of its processes, possibly several
    times."""
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
            # A family that this version of transformers does not have.
            continue
        name = original.replace("ForCausalLM", "Mla")
        config_class = getattr(configuration_mla, f"{name}Config")
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        # Registered by name, so that nothing is imported before a model is served.
        ModelRegistry.register_model(f"{name}ForCausalLM", f"mlaforge.vllm_plugin.model:{name}ForCausalLM")
        # vLLM's checks and settings for the original architecture.
        if original in MODELS_CONFIG_MAP:
            MODELS_CONFIG_MAP[f"{name}ForCausalLM"] = checked_by(MODELS_CONFIG_MAP[original])
