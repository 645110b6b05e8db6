"""vLLM plugin for converted models: `vllm serve OUT` loads it by the entry point group `vllm.general_plugins`.

vLLM's own model class computes everything but attention. Attention layers are replaced by the engine's paged attention,
on a cache that vLLM allocates (docs/vllm.md). internals.py names the versions of vLLM that are tested.
"""

from __future__ import annotations

from typing import Any

SUFFIX = "MlaForCausalLM"


def register() -> None:
    """Register converted architectures and their configs. vLLM calls it in each of its processes, possibly several
    times. With an untested vLLM the configs raise UserError, so that other models are served as without the plugin."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from mlaforge.families import families
    from mlaforge.modeling import configuration_mla
    from mlaforge.vllm_plugin.internals import refusal

    reason = refusal()
    for family in families().values():
        original = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family.computed_by or family.model_type)
        if original is None:
            # A family that this version of transformers does not have.
            continue
        name = original.replace("ForCausalLM", "Mla")
        config_class = getattr(configuration_mla, f"{name}Config")
        if reason:
            config_class = _refused(config_class, reason)
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        if not reason:
            _register_model(name, original)


def _register_model(name: str, original: str) -> None:
    """Register the converted form `<name>ForCausalLM` of vLLM's architecture `original`."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    from mlaforge.vllm_plugin.experts import checked_by

    # Registered by name, so that nothing is imported before a model is served.
    ModelRegistry.register_model(f"{name}ForCausalLM", f"mlaforge.vllm_plugin.model:{name}ForCausalLM")
    # vLLM's checks and settings for the original architecture.
    MODELS_CONFIG_MAP[f"{name}ForCausalLM"] = checked_by(MODELS_CONFIG_MAP.get(original, VerifyAndUpdateConfig))


def _refused(config_class: Any, reason: str) -> type:
    """Return a config class that raises UserError with the reason when a checkpoint's config is read, before vLLM looks
    for the model's class."""
    from mlaforge.runtime import UserError

    class Refused(config_class):
        @classmethod
        def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
            raise UserError(reason)

    return Refused
