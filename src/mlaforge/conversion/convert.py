"""`convert`: grouped-query attention to multi-head latent attention, without training.

Calibration moments (factorization/moments.py) -> latent projections per layer (solve.py, with factorization/latent.py
and the closed-form refit of o_proj) -> a Hugging Face directory (writer.py), which is read again and evaluated -> its
token index (index.py). All of it runs one layer at a time (checkpoint/layerwise.py) and stores finished work on disk
(tensor_store.py), from which a killed run resumes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Any

import torch

from mlaforge.artifact import WORK, Manifest, existing, finished, record_names, writing
from mlaforge.checkpoint.converted_config import is_sparse
from mlaforge.checkpoint.index_files import layer_kinds
from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.checkpoint.token_losses import perplexity, standard_error, window_losses
from mlaforge.config import by_keywords
from mlaforge.conversion.calibration_text import CalibrationWindows, calibration_windows, describe, passages, text_names
from mlaforge.conversion.config import ConvertConfig
from mlaforge.conversion.index import add_index, sparse_plan, why_dense
from mlaforge.conversion.solve import Choices, LayerSolver
from mlaforge.conversion.writer import write_checkpoint
from mlaforge.data import corpus, overlap
from mlaforge.factorization.moments import collect
from mlaforge.families.spec import ModelSpec
from mlaforge.ops.row_formats.plain import dtype_name, plain_name
from mlaforge.planning import plan_file
from mlaforge.planning.code_plan import coded_shape
from mlaforge.planning.plan import (
    CONTEXTS,
    Plan,
    make_plan,
    resolve_bits_or_budget,
    unconverted,
    window_choices,
)
from mlaforge.runtime import UserError, log, resolve_device, resolve_dtype, timed
from mlaforge.tensor_store import TensorStore

# Options that a plan decides.
PLANNED = ("bits", "budget", "layout", "kv_lora_rank", "qk_rope_head_dim", "layers", "ranks", "qk_mqa_dim", "collapse",
           "freqfold", "deepseek_style")  # fmt: skip
# Format version of the moments, which may remain on disk from an older version.
MOMENTS = 2
# TransMLA's options; each implies latent_rope.
TRANSMLA = ("qk_mqa_dim", "collapse", "freqfold", "deepseek_style")


def layout_of(config: ConvertConfig) -> str:
    """Return the layout of the options. Raises UserError for contradictory ones."""
    transmla = [name for name in TRANSMLA if getattr(config, name) != getattr(ConvertConfig, name)]
    if transmla and config.layout == "latent":
        raise UserError(f"{transmla[0]} means layout latent_rope, but layout is latent; leave one of them out")
    return config.layout or ("latent_rope" if transmla else "latent")


def completed(config: ConvertConfig) -> ConvertConfig:
    """Return the options with explicit layout and bits or budget, unless a plan sets them. Raises UserError for
    contradictory options."""
    if config.plan:
        return config
    layout = layout_of(config)
    ranked = config.kv_lora_rank is not None or config.ranks != ConvertConfig.ranks
    bits, budget = resolve_bits_or_budget(layout, config.bits, config.budget, ranked)
    return dataclasses.replace(config, layout=layout, bits=bits, budget=budget)


def choose(spec: ModelSpec, config: ConvertConfig, planned: Plan | None = None) -> Choices:
    """Resolve completed options for a model; `planned` is the plan of config.plan. Raises UserError for contradictory
    options and for values that do not fit the model."""
    if planned is not None:
        for name in PLANNED:
            if (value := getattr(config, name)) != getattr(ConvertConfig, name):
                raise UserError(f"{name} = {value} is for the plan to say; leave it out, or leave out the plan")
        rotary = any(layer.layout == "latent_rope" for layer in planned.layers)
        refit = config.refit == "on" or (config.refit == "auto" and rotary)
        return Choices(
            planned, allocated=False, fold=1, one_per_pair=False, refit=refit, q_lora_rank=config.q_lora_rank
        )
    head_dim = spec.layers[0].head_dim
    rope_dim, layout = config.qk_rope_head_dim, layout_of(config)
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
    if config.bits is not None:
        for name in ("budget", "kv_lora_rank", "ranks"):
            if (value := getattr(config, name)) != getattr(ConvertConfig, name):
                raise UserError(f"bits = {config.bits:g} chooses ranks and bits together; leave out {name} = {value}")
        plan = coded_shape(spec, config.bits, layout, config.layers, rope_dim)
    else:
        assert config.budget is not None, "options are completed"
        plan = make_plan(spec, config.budget, layout, config.layers, config.kv_lora_rank, rope_dim)
    rope_dim = max(layer.qk_rope_head_dim for layer in plan.layers)
    if config.deepseek_style:
        if fold > 1:
            raise UserError("freqfold changes the frequencies, deepseek_style needs DeepSeek's; give one of them")
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
        q_lora_rank=config.q_lora_rank,
        bits=config.bits,
        refit=config.refit == "on" or (config.refit == "auto" and layout == "latent_rope" and not full_rank),
    )  # fmt: skip


def run(
    model: str, out: Path, config: ConvertConfig, overwrite: bool = False, calibrated: Path | None = None
) -> Manifest:
    """Convert MODEL into the new directory `out` and return its manifest.

    Conversions of one model with the same folder `calibrated` share its moments. The same model, text and options again
    return the finished result, or resume a killed run. Raises UserError for invalid input; on every error `out` is
    either complete or untouched.
    """
    source = SourceModel.open(model)
    if source.converted:
        raise UserError(f"{source} is already converted ({source.model_type}); convert the original")
    spec = source.spec
    planned = plan_file.read(config.plan, spec) if config.plan else None
    requested, config = config, completed(config)
    choices = choose(spec, config, planned.plan if planned else None)
    no_index = why_dense(spec, config)
    config = dataclasses.replace(config, dense=no_index is not None)
    if config.q_lora_rank is not None and config.q_lora_rank > spec.hidden_size:
        raise UserError(f"q_lora_rank = {config.q_lora_rank} is above the hidden size {spec.hidden_size}")
    device = resolve_device(config.device)

    reads = (source.path, config.evaluation, config.plan, *(config.calibration or ()))
    # Check `out` before the model generates text, which takes minutes.
    existing(out, reads)
    eval_windows = None
    if config.eval_windows:
        eval_windows = corpus.windows(
            source.tokenizer, config.evaluation, config.eval_windows, config.seqlen, evaluation=True
        )
        source.check_tokens(eval_windows.ids)
    calibration = calibration_windows(source, choices.plan.converted, config, eval_windows)
    if eval_windows:
        eval_windows = overlap.refuse_overlap(eval_windows, passages(calibration), text_names(config.calibration))
        if planned:
            eval_windows = overlap.refuse_overlap(eval_windows, planned.passages, f"of the plan {config.plan}")
    source.check_tokens(*(text.ids for text in calibration.values()))
    options = dataclasses.asdict(config)
    unrecorded = ("device", "plan", *(PLANNED if planned else ()))
    manifest = Manifest(
        "convert",
        config={k: v for k, v in options.items() if k not in unrecorded}
        | record_names(config, "calibration", "evaluation"),
        inputs={
            "model": {**source.record, "model_type": spec.model_type},
            "calibration": describe(calibration),
            "evaluation": eval_windows.describe() if eval_windows else None,
            **({"plan": {"sha256": planned.sha256}} if planned else {}),
        },
    )
    if done := finished(out, manifest, overwrite, reads):
        log(f"{out} is finished already")
        return done
    # Calibration runs in fp32 on a CPU (in half precision full rank is not exact) and in the stored dtype on a GPU.
    dtype = torch.float32 if device.type == "cpu" else source.dtype
    with writing(out, manifest, resumable=True) as partial, LayerStream(source, dtype, device) as stream:
        if config.bits is not None and requested.bits is None:
            share = f"{config.bits / 16:.0%} of bf16's bytes"
            log(f"rows are coded: bits {config.bits:g}, {share}; --budget for plain ones")
        if no_index and not requested.dense:
            log(f"no index: {no_index}")
        tuned_passages = sorted({*passages(calibration), *(planned.passages if planned else ())})
        _convert(stream, choices, config, calibration, eval_windows, manifest, partial, calibrated, tuned_passages)
    return manifest


def _convert(
    stream: LayerStream, choices: Choices, config: ConvertConfig, calibration: CalibrationWindows,
    eval_windows: corpus.Windows | None, manifest: Manifest, partial: Path, calibrated: Path | None,
    tuned_passages: list[int],
) -> None:  # fmt: skip
    """Write the directory `partial` and the manifest's metrics. `tuned_passages`: hashes of passages that no evaluation
    may use."""
    seconds, metrics = manifest.seconds, manifest.metrics
    out_dtype = resolve_dtype(config.dtype, stream.source.dtype)
    work = TensorStore(partial / WORK)
    with timed(seconds, "check"):
        stream.check()

    def record(what: str, name: str, ppl: float) -> None:
        metrics[name] = ppl
        log(f"{what}: {ppl:.4f}")
        if not math.isfinite(ppl):
            raise UserError(f"{what} is {ppl}: the model overflows in {stream.dtype}; nothing was written")

    def measure(what: str, name: str, model: LayerStream) -> None:
        """Measure the perplexity once; a resumed run reads it from disk."""
        if eval_windows is None:
            return
        if name not in work:
            with timed(seconds, name):
                work[name] = {"losses": window_losses(model, eval_windows.ids, what)}
        record(what, name, perplexity(work[name]["losses"]))

    measure("Original ppl", "original_ppl", stream)
    with timed(seconds, "moments"):
        inputs, converted = manifest.inputs, choices.plan.converted
        folder, stores = calibrated or work.folder / "calibration", {}
        for layers, text in calibration.items():
            key = str([
                MOMENTS, inputs["model"]["sha256"], text.sha256, config.seed, config.batch_size, layers, stream.dtype,
            ])  # fmt: skip
            moments = TensorStore(folder / hashlib.sha256(key.encode()).hexdigest()[:16])
            collect(stream, layers, text.ids.split(config.batch_size), moments, config.seed)
            stores.update(dict.fromkeys(layers, moments))
    with timed(seconds, "layers"):
        solver = LayerSolver(stream, choices, stores, work)
        partial_rope = solver.run(next(iter(calibration.values())).ids, eval_windows.ids if eval_windows else None)
    if partial_rope is not None:
        record("Partial RoPE ppl", "partial_rope_ppl", partial_rope)
    if "written" not in work:
        with timed(seconds, "write"):
            settings = solver.settings(solver.plan)
            write_checkpoint(stream.source, partial, settings, converted, solver.weights, out_dtype)
            overlap.write_passages(partial, tuned_passages)
        work["written"] = {}

    # Evaluate the written files, not the model in memory: densely, and with the index as they are served.
    written, final_plan = SourceModel.open(partial), solver.plan
    with LayerStream(written.dense() if is_sparse(written.config) else written, stream.dtype, stream.device) as dense:
        dense.check()
        measure("MLA ppl", "mla_ppl", dense)
        if not config.dense:
            final_plan = sparse_plan(solver.plan, config)
            with timed(seconds, "index"):
                add_index(dense, final_plan, config, next(iter(calibration.values())).ids, work, out_dtype)
    # A window that is not longer than a selection does not test it.
    if not config.dense and config.seqlen > config.topk:
        with LayerStream(partial, stream.dtype, stream.device) as sparse:
            measure("Sparse ppl", "sparse_ppl", sparse)
    for name, prefix in (("mla_ppl", ""), ("sparse_ppl", "sparse_")):
        if name in metrics:
            # Both use the same windows: the variance between windows cancels in the ratio.
            differences = work[name]["losses"] - work["original_ppl"]["losses"]
            metrics[f"{prefix}ratio"] = metrics[name] / metrics["original_ppl"]
            metrics[f"{prefix}log_ratio_stderr"], metrics["windows"] = standard_error(differences), len(differences)
    metrics["cache"] = cache_metrics(final_plan, out_dtype)
    metrics["layers"] = [
        part | ({} if config.dense else {"kind": kind, "topk": layer.topk or None, "index": layer.index})
        for part, kind, layer in zip(solver.describe(), layer_kinds(stream.spec), final_plan.layers, strict=True)
    ]


def cache_metrics(plan: Plan, dtype: torch.dtype) -> dict[str, Any]:
    """Return the cache size per token before and after conversion, over all layers, and the remaining share of GQA's
    cache."""
    before = sum(layer.cached for layer in plan.spec.layers)
    stored = dataclasses.replace(plan, stored="coded" if plan.stored == "coded" else plain_name(dtype_name(dtype)))
    return {
        "gqa_per_token": before,
        "mla_per_token": plan.cached_per_token,
        # The model's context length; the share is that of a request of at most 128K tokens, because layers with a
        # sliding window cache no more than their window, before and after.
        "positions": (positions := plan.spec.max_position_embeddings),
        "fraction": plan.model_fraction(min(positions, CONTEXTS[-1])),
        # Coded rows are compared with a model in bf16, independent of the stored dtype.
        "gqa_bytes_per_token": unconverted(plan.spec, stored.stored).cache_bytes(1),
        "mla_bytes_per_token": stored.cache_bytes(1),
        "index_bytes_per_token": sum(layer.index for layer in plan.layers),
        "window_choices": window_choices(stored),
    }


convert = by_keywords(run, ConvertConfig)
