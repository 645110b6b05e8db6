"""`heal`: a converted model distilled from its original until as little as possible is left of the difference.

Closed-form refits layer by layer (factorization/refit.py), then gradient steps on the KL divergence from the original
(training/kl_loss.py, distillation.py, training/optimizer.py, training/loop.py) over packed text (data/packing.py);
what was best on text kept back is written as an ordinary converted checkpoint. The same command under torchrun shards
it over processes (training/distributed.py).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlaforge.artifact import WORK, Manifest, finished, record_names
from mlaforge.checkpoint.converted_config import is_sparse
from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.checkpoint.loading import as_generated, load_model, load_packed
from mlaforge.checkpoint.mxfp4 import is_packed
from mlaforge.checkpoint.reader import Reader
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.checkpoint.writer import rewriting
from mlaforge.config import by_keywords
from mlaforge.data import overlap, packing
from mlaforge.factorization.refit import TOKENS, refit_student
from mlaforge.healing.config import HealConfig
from mlaforge.healing.distillation import Distillation, Loss, Validation, trainable
from mlaforge.modeling.latent_attention_mla import FUSED
from mlaforge.runtime import UserError, install, log, resolve_device, timed
from mlaforge.tensor_store import TensorStore
from mlaforge.training import distributed
from mlaforge.training.loop import check_shares, dtypes, running, train
from mlaforge.training.teacher_cache import final_states_cache, top_k_cache

# Options that do not change the result, or not beyond rounding.
NOT_HASHED = ("device", "tensorboard")


def check_options(config: HealConfig) -> None:
    """Raises UserError for options that contradict each other whatever the model."""
    if config.teacher_cache != "off" and (config.hidden_weight or config.attention_weight):
        raise UserError(f"teacher_cache {config.teacher_cache} keeps no layer's output to match; give one of them up")
    if (longest := max(config.seqlen)) > config.batch_tokens:
        raise UserError(f"batch_tokens = {config.batch_tokens} holds no row of {longest}; give at least that")


@dataclasses.dataclass(frozen=True)
class Texts:
    """What is healed on, phase by phase, and what it is judged on meanwhile."""

    main: packing.Text
    feed: packing.Feed
    validation: packing.Rows
    passages: list[int]
    described: dict[str, Any]


def read_texts(tokenizer: Any, config: HealConfig, tuned: list[int]) -> Texts:
    """Reads, splits and packs all texts. tuned: passages of the calibration text, which are left out of all."""
    sizes = config.seqlen
    main = packing.read(tokenizer, config.text, max(sizes), config.validation_tokens, tuned)
    targeted = {windowed: names for windowed, names in ((False, config.full_text), (True, config.swa_text)) if names}
    second = round(config.steps * config.targeted) if targeted else 0
    phases, described, passages = [], {"text": main.describe()}, set(main.passages)
    for n, size in enumerate(sizes):
        share = (config.steps - second) * (n + 1) // len(sizes) - (config.steps - second) * n // len(sizes)
        phases.append(packing.Phase(packing.pack(main.train, size), share))
    for n, (windowed, names) in enumerate(targeted.items()):
        kept_back = packing.passages(main.validation)
        text = packing.read(tokenizer, names, max(sizes), 0, sorted({*tuned, *kept_back}))
        share = second * (n + 1) // len(targeted) - second * n // len(targeted)
        phases.append(packing.Phase(packing.pack(text.train, max(sizes)), share, windowed))
        described["swa_text" if windowed else "full_text"] = text.describe()
        passages |= set(text.passages)
    feed = packing.Feed(tuple(phases), config.batch_tokens, config.seed)
    held = sum(map(len, main.validation))
    validation = packing.pack(main.validation, min(max(sizes), held))
    return Texts(main, feed, validation, sorted({*tuned, *passages}), described)


def windowed(model: SourceModel) -> set[int]:
    """Layers with a sliding window."""
    return {index for index, layer in enumerate(model.spec.layers) if layer.window is not None}


def run(teacher: str, student: str, out: Path, config: HealConfig, overwrite: bool = False) -> Manifest:
    """Heals the converted model `student` towards its original `teacher` into the new directory `out`.

    The same models, text and options again return the finished result, or go on where a killed run stopped, with the
    same result to the bit on one machine. Raises UserError for the user's mistakes, and where the loss stops being a
    number: then the batch is kept beside `out`, and the checkpoints stay.
    """
    check_options(config)
    original, converted = SourceModel.open(teacher), SourceModel.open(student)
    if not converted.converted:
        raise UserError(f"student {student} is not converted ({converted.model_type}); convert it first")
    if config.gradient_checkpointing and "shared" in (converted.config.get("indexer_types") or ()):
        raise UserError(f"student {student} shares selections of tokens: give --no-gradient-checkpointing")
    kinds = set(converted.config.get("mla_layer_types") or ())
    if is_sparse(converted.config) and kinds == {"gqa"} and set(config.subset) != {"all"}:
        raise UserError(f"student {student} has no converted layer, so only all of it can learn: give --subset all")
    if config.teacher_dtype == "nf4" and is_packed(original.config):
        raise UserError(f"the experts of {teacher} have four bits already and stay so: leave out teacher_dtype nf4")
    if original.converted:
        raise UserError(f"teacher {teacher} is converted itself; give the original")
    if converted.config.get("vocab_size") != original.config.get("vocab_size"):
        raise UserError(f"{teacher} and {student} have different vocabularies; give the model it was converted from")
    if "all" in config.subset and converted.config.get("quantization_config"):
        raise UserError("subset all would train packed experts; give projections or attention")
    slides, layers = len(windowed(converted)), converted.spec.num_layers
    if (config.swa_text and not slides) or (config.full_text and slides == layers):
        raise UserError(f"{slides} of {layers} layers have a window: one phase's text teaches nobody")
    group = distributed.join(resolve_device(config.device))
    remembered = converted.path / overlap.PASSAGES
    tuned = overlap.read_passages(remembered) if remembered.is_file() else []
    texts = read_texts(original.tokenizer, config, tuned)
    original.check_tokens(*(phase.rows.ids for phase in texts.feed.phases), texts.validation.ids)
    check_shares(texts.feed, group.world)
    manifest = Manifest(
        "heal",
        config={k: v for k, v in dataclasses.asdict(config).items() if k not in NOT_HASHED}
        | record_names(config, "text", "swa_text", "full_text"),
        inputs={
            "teacher": original.record,
            "student": converted.record,
            **texts.described,
        },
    )
    phases = (*config.text, *(config.swa_text or ()), *(config.full_text or ()))
    if done := finished(out, manifest, overwrite, [original.path, converted.path, *map(Path, phases)]):
        if group.first:
            log(f"{out} is finished already")
        return done
    with running(out, manifest, group) as partial:
        _heal(original, converted, config, texts, manifest, partial, group)
    return manifest


def load(model: Path | SourceModel, dtype: str, device: torch.device) -> Any:
    """A causal LM on the fused attention, frozen; dtype nf4 quantises its linear maps to 4 bits on loading. What is
    stored as MXFP4 stays so."""
    source = SourceModel.open(model)
    if dtype == "nf4":
        causal_lm = load_model(source, "bfloat16", device, quantization=_nf4())
    else:
        causal_lm = load_packed(source, dtype, device)
    causal_lm.set_attn_implementation(FUSED)
    return causal_lm.requires_grad_(False)


def _nf4() -> Any:
    try:
        import bitsandbytes  # noqa: F401 (only to say in words that it is missing)
    except ModuleNotFoundError as error:
        raise UserError(f"bitsandbytes is missing: {install('heal')}") from error
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def _heal(
    original: SourceModel, converted: SourceModel, config: HealConfig, texts: Texts, manifest: Manifest,
    partial: Path, group: distributed.Group,
) -> None:  # fmt: skip
    """The work itself: fills `partial` and the manifest's metrics."""
    device, work, seconds = group.device, TensorStore(partial / WORK), manifest.seconds
    dtype, kept = dtypes(config.dtype, group)
    frozen = str(dtype).removeprefix("torch.") if config.teacher_dtype == "auto" else config.teacher_dtype
    with timed(seconds, "load"):
        student = as_generated(load(converted, str(kept).removeprefix("torch."), device))
        teacher = load(original, frozen, device)
    at_once = max(1, config.micro_tokens // texts.validation.ids.shape[1])
    with timed(seconds, "teacher"):
        validation = Validation(teacher, texts.validation, at_once)
        targets = None
        if config.teacher_cache != "off":
            k = config.top_k if config.teacher_cache == "topk" else 0
            if k > teacher.config.vocab_size:
                raise UserError(f"top_k = {k} is more than the vocabulary's {teacher.config.vocab_size}")
            targets = top_k_cache(work, k, config.temperature) if k else final_states_cache(work, validation.head)
            targets.fill(teacher, texts.feed.phases, group.rank, group.world)
            group.wait()
            teacher = None
    loss = Loss(
        config.temperature, config.kl_weight, config.lm_weight, config.hidden_weight, config.attention_weight
    )  # fmt: skip
    model = Distillation(student, teacher, loss)
    with timed(seconds, "refit"):
        if config.refit != "off" and "refit" not in work and group.first:
            _refit(original, converted, model, validation, config, texts, work, device)
        group.wait()
        solved = {} if config.refit == "off" else work["refit"]
        _put(student, solved)
    if config.gradient_checkpointing:
        student.gradient_checkpointing_enable({"use_reentrant": False})
        student.train()
    with timed(seconds, "train"):
        trainer = train(
            "heal", model, texts.feed, validation, config, partial, group, dtype=dtype, subsets=config.subset,
            trainable=functools.partial(trainable, student), patience=config.patience, targets=targets,
            windowed=windowed(converted),
        )  # fmt: skip
    trainer.write_last(partial, torch.float32)
    if group.first:
        write(converted, partial, {**solved, **trainer.trained(best=True)})
        overlap.write_passages(partial, texts.passages)
    manifest.metrics = {
        "refit": None if config.refit == "off" else json.loads((work.folder / "refit.json").read_text()),
        **trainer.metrics(),
    }


def _put(student: Any, tensors: dict[str, Tensor]) -> None:
    """Some of the student's tensors by name; a name that it lacks is an error of ours."""
    unknown = student.load_state_dict(tensors, strict=False).unexpected_keys
    assert not unknown, unknown


def _refit(
    original: SourceModel, converted: SourceModel, model: Distillation, validation: Validation, config: HealConfig,
    texts: Texts, work: TensorStore, device: torch.device,
) -> None:  # fmt: skip
    """Solves o_proj, and o_proj after the up-projections, on the healing text; `refit` in `work` gets what is better
    than nothing on the text kept back (refit on: the better of the two), and refit.json what each was worth."""
    student = model.student
    before = {name: parameter.detach().clone() for name, parameter in student.named_parameters()}
    kl = {"none": validation.measure(model)["kl"]}
    longest = max(phase.rows.ids.shape[1] for phase in texts.feed.phases)
    rows = packing.pack(texts.main.train, longest).ids
    few = rows[:: max(1, len(rows) * longest // TOKENS)][: max(1, TOKENS // longest)]
    refits: dict[str, dict[str, Tensor]] = {"none": {}}
    dtype = torch.float32 if device.type == "cpu" else next(iter(before.values())).dtype
    with LayerStream(converted, dtype, device) as ours, LayerStream(original, dtype, device) as theirs:
        for name, up in (("o_proj", False), ("up_and_o_proj", True)):
            solved = refit_student(ours, theirs, few, up)
            _put(student, solved)
            kl[name] = validation.measure(model)["kl"]
            refits[name] = {key: tensor.clone() for key, tensor in solved.items()}
            _put(student, before)
    usable = [name for name in kl if name != "none" or config.refit == "auto"]
    chosen = min(usable, key=kl.__getitem__)
    log(", ".join(f"{name}: validation KL {value:.5f}" for name, value in kl.items()) + f"; refit: {chosen}")
    summary = {"kl": kl, "chosen": chosen, "tokens": few.numel()}
    (work.folder / "refit.json").write_text(json.dumps(summary), encoding="utf-8")
    work["refit"] = refits[chosen]


def write(converted: SourceModel, partial: Path, trained: dict[str, Tensor]) -> None:
    """The converted checkpoint again, with the trained tensors in the place of its own, in their stored dtypes."""
    with Reader(converted.path) as reader, rewriting(converted.path, partial, converted.config) as writer:
        for name in reader:
            dtype = reader.dtype(name)

            def tensor(name: str = name, dtype: torch.dtype = dtype) -> Tensor:
                return trained[name].to(dtype) if name in trained else reader[name]

            writer.promise(name, reader.shape(name), dtype, tensor)
        assert set(trained) <= set(reader), sorted(set(trained) - set(reader))
    for path in converted.path.glob("*_mla.py"):
        shutil.copyfile(path, partial / path.name)


heal = by_keywords(run, HealConfig)
