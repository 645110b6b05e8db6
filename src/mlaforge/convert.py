"""`convert`: a grouped-query-attention checkpoint in, a multi-head latent attention checkpoint out, no training.

Moments of the running model (moments.py) -> latent projections per layer (factorize.py) -> optionally the
closed-form refit of o_proj (refit.py) -> a Hugging Face directory (export.py), loaded again to be measured.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlaforge import checkpoint, corpus, factorize
from mlaforge.artifact import Manifest, finished, writing
from mlaforge.evaluate import perplexity
from mlaforge.export import LayerWeights, attention_module, mla_config, write_checkpoint
from mlaforge.families import family_of
from mlaforge.moments import LayerMoments, collect
from mlaforge.options import ConvertConfig
from mlaforge.plan import LayerPlan, Plan, make_plan, rank_limit
from mlaforge.refit import refit_o_proj
from mlaforge.runtime import UserError, log, progress, resolve_device, resolve_dtype, timed
from mlaforge.spec import LayerSpec, ModelSpec


@dataclasses.dataclass(frozen=True)
class Choices:
    """What the options come to for one model: the plan with uniform ranks, and how rotary channels are found."""

    plan: Plan
    allocated: bool
    fold: int
    one_per_pair: bool
    refit: bool

    @property
    def o_bias(self) -> bool:
        """Whether o_proj gets a bias. DeepSeek's format has none that every loader reads."""
        return self.refit and not self.one_per_pair


def choose(spec: ModelSpec, config: ConvertConfig) -> Choices:
    """Resolves the options against the model. Raises UserError for what contradicts or does not fit."""
    head_dim = spec.layers[0].head_dim
    rope_dim, layout = config.qk_rope_head_dim, config.layout
    theirs = (config.qk_mqa_dim, config.collapse, config.freqfold, config.deepseek_style or None)
    if any(value is not None for value in theirs):
        layout = "latent_rope"
    if config.collapse not in (None, "auto"):
        if not config.collapse.isdigit() or not int(config.collapse) or head_dim % (2 * int(config.collapse)):
            raise UserError(
                f"collapse {config.collapse!r} must be auto or a number that divides head_dim / 2 = {head_dim // 2}"
            )
        if rope_dim not in (None, head_dim // int(config.collapse)):
            raise UserError(f"collapse {config.collapse} contradicts {rope_dim} rotary dimensions; give one")
        rope_dim = head_dim // int(config.collapse)
    if config.qk_mqa_dim is not None:
        if rope_dim not in (None, config.qk_mqa_dim):
            raise UserError(f"qk_mqa_dim {config.qk_mqa_dim} contradicts {rope_dim} rotary dimensions; give one")
        rope_dim = config.qk_mqa_dim
    fold = 1
    if config.freqfold not in (None, "auto"):
        fold = int(config.freqfold) if config.freqfold.isdigit() else 0
        if not fold or (head_dim // 2) % fold:
            raise UserError(f"freqfold {config.freqfold!r} must be auto or a number that divides {head_dim // 2} pairs")
    plan = make_plan(spec, config.budget, layout, config.layers, config.kv_lora_rank, rope_dim)
    rope_dim = max(layer.qk_rope_head_dim for layer in plan.layers)
    if config.deepseek_style:
        if fold > 1:
            raise UserError("freqfold changes the frequencies, deepseek_style wants DeepSeek's; give one of them")
        if rope_dim > head_dim or head_dim % rope_dim:
            raise UserError(
                f"deepseek_style needs rotary dimensions that divide head_dim {head_dim}, not {rope_dim}: "
                f"pass --qk-rope-head-dim {head_dim}"
            )
    full_rank = config.budget == 1.0 and config.kv_lora_rank is None and rope_dim in (0, spec.layers[0].cached // 2)
    return Choices(
        plan,
        allocated=config.ranks == "allocated" and config.kv_lora_rank is None and not full_rank
        and not config.deepseek_style,
        fold=fold,
        one_per_pair=config.deepseek_style,
        refit=config.refit == "on" or (config.refit == "auto" and layout == "latent_rope" and not full_rank),
    )  # fmt: skip


def check_options(config: ConvertConfig) -> None:
    """Raises UserError for numbers that no model could make right."""
    # Shorter windows could not be told from text that they were tuned on.
    for name, least in (("nsamples", 1), ("seqlen", corpus.SHINGLE), ("batch_size", 1)):
        if (given := getattr(config, name)) < least:
            raise UserError(f"{name} = {given} is too small; give at least {least}")
    if config.eval_windows < 0:
        raise UserError(f"eval_windows = {config.eval_windows} must be 0 or more")
    if config.q_lora_rank is not None and config.q_lora_rank < 1:
        raise UserError(f"q_lora_rank = {config.q_lora_rank} must be at least 1")


# Moments by what they were collected from: (model, text, seed, batch size, layers).
Calibrated = dict[str, dict[int, LayerMoments]]


def run(
    model: str, out: Path, config: ConvertConfig, overwrite: bool = False, calibrated: Calibrated | None = None
) -> Manifest:
    """Converts MODEL into the new directory `out` and returns its manifest.

    Several conversions of one model that are given the same `calibrated` collect its moments once.
    The same model, text and options again return the finished result. Raises UserError for the user's mistakes;
    whatever happens, `out` is either complete or untouched.
    """
    check_options(config)
    source = checkpoint.locate(model)
    raw = checkpoint.read_config(source)
    if checkpoint.is_converted(raw):
        raise UserError(f"{source} is already converted ({raw['model_type']}); convert the original")
    family = family_of(raw)
    if family.convertible:
        raise UserError(f"{family.model_type} models cannot be converted yet: {family.convertible}")
    spec = family.read_spec(raw)
    choices = choose(spec, config)
    if config.q_lora_rank is not None and config.q_lora_rank > spec.hidden_size:
        raise UserError(f"q_lora_rank = {config.q_lora_rank} is above the hidden size {spec.hidden_size}")
    device = resolve_device(config.device)
    out_dtype = resolve_dtype(config.dtype, checkpoint.stored_dtype(raw))

    tokenizer = checkpoint.load_tokenizer(source)
    tuned = corpus.windows(tokenizer, config.calibration, config.nsamples, config.seqlen, seed=config.seed)
    judged = None
    if config.eval_windows:
        judged = corpus.windows(tokenizer, config.evaluation, config.eval_windows, config.seqlen, judged=True)
        judged = corpus.refuse_overlap(judged, corpus.passages(tuned), tuned.source)
    checkpoint.check_tokens(source, *(text.ids for text in (tuned, judged) if text))
    manifest = Manifest(
        "convert",
        config={k: v for k, v in dataclasses.asdict(config).items() if k != "device"},
        inputs={
            "model": {"path": source.name, "model_type": spec.model_type, "sha256": checkpoint.fingerprint(source)},
            "calibration": tuned.describe(),
            "evaluation": judged.describe() if judged else None,
        },
    )
    if done := finished(out, manifest, overwrite):
        log(f"{out} is finished already")
        return done
    with writing(out, manifest) as partial:
        _convert(source, raw, spec, choices, config, tuned, judged, device, out_dtype, manifest, partial,
                 calibrated if calibrated is not None else {})  # fmt: skip
    return manifest


def _convert(
    source: Path, raw: dict[str, Any], spec: ModelSpec, choices: Choices, config: ConvertConfig,
    tuned: corpus.Windows, judged: corpus.Windows | None, device: torch.device, out_dtype: torch.dtype,
    manifest: Manifest, partial: Path, calibrated: Calibrated,
) -> None:  # fmt: skip
    """The work itself: fills `partial` and the manifest's metrics."""
    seconds, metrics = manifest.seconds, manifest.metrics
    with timed(seconds, "load"):
        with checkpoint.Reader(source) as reader:
            reader.check(*checkpoint.expected_tensors(raw))
        # Calibration runs in fp32 on a CPU (half precision is slower there) and in the stored dtype on a GPU.
        model = checkpoint.load_model(source, "float32" if device.type == "cpu" else "auto", device)

    def measure(what: str, name: str, measured: Any) -> None:
        if judged is None:
            return
        with timed(seconds, name):
            metrics[name] = perplexity(measured, progress(judged.ids, what, len(judged.ids)))
        log(f"{what}: {metrics[name]:.4f}")
        if not math.isfinite(metrics[name]):
            raise UserError(f"{what} is {metrics[name]}: the model overflows in {measured.dtype}; nothing was written")

    measure("Original ppl", "original_ppl", model)
    converted = {i: spec.layers[i] for i in choices.plan.converted}
    with timed(seconds, "moments"):
        batches = tuned.ids.split(config.batch_size)
        inputs = manifest.inputs
        key = str([inputs["model"]["sha256"], tuned.sha256, config.seed, config.batch_size, sorted(converted)])
        if key not in calibrated:
            calibrated[key] = collect(
                model, converted, progress(batches, "calibrate", len(batches)), spec.softmax_scale, config.seed
            )
        moments = calibrated[key]
    with timed(seconds, "factorize"):
        results = factorize_layers(model, spec, choices, moments, config.q_lora_rank, judged is not None)
    plan, weights, full = results.plan, results.weights, results.full_rank
    settings = mla_config(raw, spec, plan, config.q_lora_rank, o_bias=choices.o_bias)
    if full is not None:
        wide = mla_config(raw, spec, results.full_plan, config.q_lora_rank, o_bias=choices.o_bias)
        with swapped(model, {i: attention_module(model, wide, i, w) for i, w in full.items()}):
            measure("Partial RoPE ppl", "partial_rope_ppl", model)
    if choices.refit:
        with timed(seconds, "refit"):
            modules = {i: attention_module(model, settings, i, w) for i, w in weights.items()}
            refit_o_proj(model, modules, spec.layers, [ids[None] for ids in tuned.ids])
            for i, module in modules.items():
                weights[i].tensors["o_proj.weight"] = module.o_proj.weight.detach().cpu()
                if module.o_proj.bias is not None:
                    weights[i].tensors["o_proj.bias"] = module.o_proj.bias.detach().cpu()
    del model
    with timed(seconds, "write"):
        write_checkpoint(source, partial, settings, spec, weights, out_dtype)
        (partial / corpus.PASSAGES).write_text(json.dumps(corpus.passages(tuned)), encoding="utf-8")
    measure("MLA ppl", "mla_ppl", checkpoint.load_model(partial, "auto", device))
    if judged is not None:
        metrics["ratio"] = metrics["mla_ppl"] / metrics["original_ppl"]
    metrics["cache"] = cache_metrics(plan, out_dtype)
    metrics["layers"] = results.describe(spec)
    manifest.files = sorted(p.name for p in partial.iterdir())


@dataclasses.dataclass
class Factorized:
    """Latent projections of every converted layer, and for latent_rope the same before the rank was cut."""

    plan: Plan
    weights: dict[int, LayerWeights]
    spectra: dict[int, Tensor]
    dropped: dict[int, float]
    full_plan: Plan
    full_rank: dict[int, LayerWeights] | None

    def describe(self, spec: ModelSpec) -> list[dict[str, Any]]:
        """One record per layer for the manifest; spectra are in units of loss."""
        return [
            {
                "layer": i,
                "layout": chosen.layout,
                "window": layer.window,
                "kv_lora_rank": chosen.kv_lora_rank,
                "qk_rope_head_dim": chosen.qk_rope_head_dim,
                "cached": chosen.cached(layer),
                "gqa_cached": layer.cached,
                "predicted_loss": self.dropped.get(i),
                "spectrum": [float(f"{v:.4g}") for v in self.spectra[i].tolist()] if i in self.spectra else None,
            }
            for i, (chosen, layer) in enumerate(zip(self.plan.layers, spec.layers, strict=True))
        ]


def projections(attention: Any) -> factorize.Projections:
    """A GQA module's projections in fp64 on its device."""

    def weight(name: str) -> Tensor:
        return getattr(attention, name).weight.detach().double()

    def bias(name: str) -> Tensor:
        linear = getattr(attention, name)
        if linear.bias is not None:
            return linear.bias.detach().double()
        return torch.zeros(linear.out_features, dtype=torch.float64, device=linear.weight.device)

    return factorize.Projections(
        weight("q_proj"), weight("k_proj"), weight("v_proj"), weight("o_proj"),
        bias("q_proj"), bias("k_proj"), bias("v_proj"),
    )  # fmt: skip


def factorize_layers(
    model: Any, spec: ModelSpec, choices: Choices, moments: dict[int, LayerMoments], q_lora_rank: int | None,
    with_full_rank: bool = False,
) -> Factorized:  # fmt: skip
    """Solves every converted layer; ranks follow the spectra where they are to be allocated."""
    plan = choices.plan
    prepared: dict[int, Any] = {}
    sources: dict[int, factorize.Projections] = {}
    for i, m in progress(moments.items(), "factorize", len(moments)):
        layer, own = spec.layers[i], projections(model.model.layers[i].self_attn)
        if not math.isfinite(float(m.g_outer.sum() + m.x_outer.sum() + m.key_outer.sum())):
            raise UserError(
                f"calibration gave NaN or infinity in layer {i}: the model overflows in {model.dtype}; float32 "
                "(--device cpu) reaches furthest"
            )
        sources[i] = own
        if plan.layers[i].layout == "latent":
            prepared[i] = factorize.latent_spectrum(own, m, layer)
            continue
        found = factorize.channels(own, m, layer, choices.fold)
        pairs = plan.layers[i].qk_rope_head_dim // 2
        chosen = found.one_per_pair(pairs) if choices.one_per_pair else found.best(pairs)
        prepared[i] = factorize.split_rope(
            own, m, layer, found, chosen, spec.rope.attention_scaling, centred=not choices.one_per_pair
        )
    spectra = {i: p if isinstance(p, factorize.Spectrum) else p.spectrum for i, p in prepared.items()}
    if choices.allocated:
        plan = allocate_ranks(plan, {i: s.values for i, s in spectra.items()})

    def solve(at: Plan) -> tuple[dict[int, LayerWeights], dict[int, float]]:
        weights, dropped = {}, {}
        for i, part in prepared.items():
            rank, layer = at.layers[i].kv_lora_rank, spec.layers[i]
            if isinstance(part, factorize.Spectrum):
                latent = factorize.to_latent(sources[i], part, layer, rank)
            else:
                latent = factorize.to_latent_rope(part, layer, rank)
            attention = model.model.layers[i].self_attn
            weights[i] = LayerWeights.of(latent, attention, moments[i], q_lora_rank)
            dropped[i] = latent.dropped
        return weights, dropped

    weights, dropped = solve(plan)
    full_plan, full = plan, None
    if with_full_rank and any(layer.layout == "latent_rope" for layer in plan.layers):
        full_plan = with_ranks(plan, {i: rank_limit(spec, spec.layers[i], "latent_rope") for i in prepared})
        full = solve(full_plan)[0]
    return Factorized(plan, weights, {i: s.values for i, s in spectra.items()}, dropped, full_plan, full)


def with_ranks(plan: Plan, ranks: dict[int, int]) -> Plan:
    """`plan` with other latent ranks for some layers."""
    layers = [
        dataclasses.replace(layer, kv_lora_rank=ranks.get(i, layer.kv_lora_rank)) for i, layer in enumerate(plan.layers)
    ]
    return Plan(plan.spec, tuple(layers))


def allocate_ranks(plan: Plan, spectra: dict[int, Tensor]) -> Plan:
    """The same total of ranks, handed out by predicted loss; a third of the uniform rank is every layer's minimum."""
    total = sum(plan.layers[i].kv_lora_rank for i in spectra)
    minimum = min(plan.layers[i].kv_lora_rank for i in spectra) // 3 // 8 * 8
    limits = {i: rank_limit(plan.spec, plan.spec.layers[i], plan.layers[i].layout) for i in spectra}
    usable = {i: values[: limits[i]] for i, values in spectra.items()}
    return with_ranks(plan, factorize.allocate(usable, total, max(8, minimum)))


class swapped:
    """While open, the model's layers use other attention modules; afterwards their own again."""

    def __init__(self, model: Any, modules: dict[int, Any]):
        self.layers = model.model.layers
        self.modules = modules

    def __enter__(self) -> None:
        self.own = {i: self.layers[i].self_attn for i in self.modules}
        for i, module in self.modules.items():
            self.layers[i].self_attn = module

    def __exit__(self, *_: object) -> None:
        for i, module in self.own.items():
            self.layers[i].self_attn = module


def cache_metrics(plan: Plan, dtype: torch.dtype) -> dict[str, Any]:
    """Numbers and bytes that one token adds to the cache, over all layers, before and after."""
    before = sum(layer.cached for layer in plan.spec.layers)
    return {
        "gqa_per_token": before,
        "mla_per_token": plan.cached_per_token,
        "fraction": plan.cached_per_token / before,
        "gqa_bytes_per_token": before * dtype.itemsize,
        "mla_bytes_per_token": plan.cached_per_token * dtype.itemsize,
    }


def describe_layer(layer: LayerSpec, chosen: LayerPlan) -> str:
    """`latent 192 of 384`, for a terminal."""
    return f"{chosen.layout} {chosen.cached(layer)} of {layer.cached}"
