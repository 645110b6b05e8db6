"""Strict loading of models: the class of a config.json, its expected tensors, and the loaded model."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from mlaforge import families
from mlaforge.checkpoint import mxfp4
from mlaforge.checkpoint.converted_config import architecture, is_converted
from mlaforge.checkpoint.reader import is_finite
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.ops.mxfp4_experts import Mxfp4Experts
from mlaforge.runtime import UserError, resolve_dtype


def model_class(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return the config class and the causal-LM class of a config.json, of this package or of transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if not is_converted(config):
        family = families.families().get(config["model_type"])
        config_class = CONFIG_MAPPING[family.computed_by or config["model_type"] if family else config["model_type"]]
        return config_class, MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    from mlaforge.modeling import configuration_mla, modeling_mla

    name = architecture(str(config["model_type"]))
    return (
        getattr(configuration_mla, name.replace("ForCausalLM", "Config")),
        getattr(modeling_mla, name),
    )


def load_model(
    model: str | Path | SourceModel, dtype: str = "auto", device: torch.device | str = "cpu", quantization: Any = None
) -> Any:
    """Load the causal LM of a model directory, .gguf file or hub id, original or converted, in evaluation mode, without
    running code from it. `dtype`: auto is the stored one. `quantization`: transformers' config of a library that packs
    the weights on loading.

    Raises UserError for an unsupported family and for any tensor that is missing, unexpected, wrongly shaped or not
    finite.
    """
    source = SourceModel.open(model)
    _ = source.spec  # raises for an invalid config before any weight is read
    config_class, causal_lm = model_class(source.config)
    with source.weights() as reader:
        reader.check_shapes(*expected_tensors(source.config))
        left_out = set(reader.left_out)
    try:
        loaded, info = causal_lm.from_pretrained(
            source.path,
            config=config_class.from_dict({**source.config, "model_type": config_class.model_type}),
            dtype=resolve_dtype(dtype, source.dtype),
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,
            **({"quantization_config": quantization, "device_map": {"": device}} if quantization else {}),
        )
    except ImportError as error:  # transformers names the package that reads this quantization
        raise UserError(f"{source}: {error}") from error
    unexpected = set(info["unexpected_keys"]) - left_out
    assert not (info["missing_keys"] or unexpected or info["mismatched_keys"]), info
    check_finite(source, loaded.state_dict())
    return loaded.eval() if quantization else loaded.eval().to(device)


def load_packed(model: str | Path | SourceModel, dtype: str = "auto", device: torch.device | str = "cpu") -> Any:
    """Same as `load_model`, but MXFP4 experts stay packed (ops/mxfp4_experts.py), on a CPU memory-mapped from their
    file. They propagate gradients, but are buffers and not trained.
    """
    source = SourceModel.open(model)
    if not mxfp4.is_packed(source.config):
        return load_model(source, dtype, device)
    _ = source.spec
    causal_lm = skeleton(source.config)
    expected = tensors_of(causal_lm, source.config)
    keep_packed(causal_lm, source.config)
    kind, state = resolve_dtype(dtype, source.dtype), {}
    with source.weights() as reader:
        reader.check(*expected)
        for name in causal_lm.state_dict():
            # Only a head tied to the embedding may be absent.
            tensor = reader[name if name in reader else "model.embed_tokens.weight"].to(device)
            state[name] = tensor.to(kind) if tensor.is_floating_point() else tensor
    check_finite(source, state)
    causal_lm.load_state_dict(state, assign=True)
    compute_frequencies(causal_lm, device)
    return causal_lm.eval()


def check_finite(source: SourceModel, tensors: dict[str, Tensor]) -> None:
    """Raises UserError for NaN or infinity in loaded weights: text from NaN looks like that of a poor model, so that
    the cause would be hard to find."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not is_finite(tensor):
            raise UserError(
                f"{source}: {name!r} holds NaN or infinity in {tensor.dtype}; fetch the model again, or give "
                "another --dtype"
            )


def compute_frequencies(causal_lm: Any, device: torch.device | str) -> None:
    """Compute the rotary frequencies of a skeleton: they are not stored, and the meta device has no values."""
    rotary = type(causal_lm.model.rotary_emb)(causal_lm.config).to(device)
    causal_lm.model.rotary_emb = rotary
    for layer in causal_lm.model.layers:
        if hasattr(layer.self_attn, "table"):
            layer.self_attn.table.rotary = rotary


def as_generated(model: Any) -> Any:
    """Make the prompt tokens of a sparse model attend to a selection, as generated tokens do. Returns the model."""
    if getattr(model.model, "sparsity", None) is not None:
        model.model.sparsity.prompts = True
    return model


def skeleton(config: dict[str, Any]) -> Any:
    """Return the causal LM of a config.json on the meta device. Raises UserError for an invalid config."""
    config_class, causal_lm = model_class(config)
    try:
        with torch.device("meta"):
            return causal_lm(config_class(**{k: v for k, v in config.items() if k != "model_type"}))
    except (StrictDataclassError, ValueError, KeyError, TypeError, RuntimeError, AssertionError) as error:
        # A KeyError is a value, such as that of hidden_act, that transformers does not know.
        reason = f"{error} is not known" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise UserError(f"config.json makes no {config['model_type']} model: {reason}") from error


def keep_packed(skeleton: Any, config: dict[str, Any]) -> None:
    """Replace the experts of a skeleton that its checkpoint stores as MXFP4 by packed ones with the stored names."""
    shapes = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
    for module in sorted({name.rpartition(".")[0] for name in mxfp4.packed_names(config, shapes)}):
        skeleton.set_submodule(module, Mxfp4Experts(skeleton.get_submodule(module)))


def expected_tensors(
    config: dict[str, Any],
) -> tuple[dict[str, tuple[int, ...]], frozenset[str], frozenset[str]]:
    """Return the arguments of `Reader.check` for a config.json: names and shapes of its tensors, the tied names, which
    may be absent, and the names of integer tensors."""
    # Every step of a conversion asks, and a skeleton takes as long as hundreds of modules take to construct.
    shapes, tied, whole = _expected_tensors(json.dumps(config))
    return dict(shapes), tied, whole


@functools.lru_cache(maxsize=4)
def _expected_tensors(config_json: str) -> tuple[dict[str, tuple[int, ...]], frozenset[str], frozenset[str]]:
    config = json.loads(config_json)
    return tensors_of(skeleton(config), config)


def tensors_of(model: Any, config: dict[str, Any]) -> tuple[dict[str, tuple[int, ...]], frozenset[str], frozenset[str]]:
    """Return `expected_tensors` of a config.json, given its skeleton with experts that are not packed."""
    tensors = model.state_dict()
    shapes = mxfp4.stored(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    tied = model.all_tied_weights_keys if getattr(model.config, "tie_word_embeddings", False) else ()
    # The model lacks the names of MXFP4 tensors.
    whole = {name for name in shapes if name not in tensors or not tensors[name].is_floating_point()}
    return shapes, frozenset(tied), frozenset(whole)
