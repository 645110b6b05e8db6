"""`heal`: distil a converted model from its original.

Closed-form refits layer by layer (factorization/refit.py), then gradient steps on the KL divergence from the original
(training/kl_loss.py, distillation.py, training/optimizer.py, training/loop.py) over packed text (data/packing.py). The
weights with the best validation metric are written as an ordinary converted checkpoint. Under torchrun, the same
command is sharded over processes (training/distributed.py).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlaforge.artifact import WORK, Manifest, finished, record_names
from mlaforge.checkpoint.converted_config import is_sparse, with_current_code
from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.checkpoint.loading import as_generated, load_model, load_packed
from mlaforge.checkpoint.mxfp4 import is_packed
from mlaforge.checkpoint.reader import Reader
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.checkpoint.writer import copy_model_code, rewriting
from mlaforge.config import by_keywords
from mlaforge.data import overlap, packing
from mlaforge.factorization.refit import TOKENS, refit_student
from mlaforge.healing.config import HealConfig
from mlaforge.healing.distillation import Distillation, LossConfig, Validation, trainable
from mlaforge.modeling.latent_attention_mla import FUSED
from mlaforge.runtime import UserError, install, log, resolve_device, timed
from mlaforge.tensor_store import TensorStore
from mlaforge.training import distributed
from mlaforge.training.loop import check_divisible, student_dtypes, train, training_artifact
from mlaforge.training.teacher_cache import final_states_cache, top_k_cache

# Options that do not change the result, or not beyond rounding.
NOT_HASHED = ("device", "tensorboard")


def check_options(config: HealConfig) -> None:
    """Raise UserError for options that contradict each other for any model."""
    if config.teacher_cache != "off" and (config.hidden_weight or config.attention_weight):
        raise UserError(
            f"teacher_cache {config.teacher_cache} contains no layer's output for hidden_weight and attention_weight; "
            "drop one of them"
        )
    if (longest := max(config.seqlen)) > config.batch_tokens:
        raise UserError(f"batch_tokens = {config.batch_tokens} must be at least the longest row, {longest} tokens")


@dataclasses.dataclass(frozen=True)
class Texts:
    """Training text in phases, and validation text.

    passages: hashes of all text that the model is calibrated or healed on. descriptions: records for the manifest.
    """

    main: packing.Text
    feed: packing.Feed
    validation: packing.Rows
    passages: list[int]
    descriptions: dict[str, Any]


def read_texts(tokenizer: Any, config: HealConfig, tuned: list[int]) -> Texts:
    """Read, split and pack all texts. tuned: passages of the calibration text, which are excluded."""
    sizes = config.seqlen
    main = packing.read(tokenizer, config.text, max(sizes), config.validation_tokens, tuned)
    targeted = {windowed: names for windowed, names in ((False, config.full_text), (True, config.swa_text)) if names}
    targeted_steps = round(config.steps * config.targeted) if targeted else 0
    phases, descriptions, passages = [], {"text": main.describe()}, set(main.passages)
    for n, size in enumerate(sizes):
        main_steps = config.steps - targeted_steps
        steps = main_steps * (n + 1) // len(sizes) - main_steps * n // len(sizes)
        phases.append(packing.Phase(packing.pack(main.train, size), steps))
    for n, (windowed, names) in enumerate(targeted.items()):
        validation_passages = packing.passages(main.validation)
        text = packing.read(tokenizer, names, max(sizes), 0, sorted({*tuned, *validation_passages}))
        steps = targeted_steps * (n + 1) // len(targeted) - targeted_steps * n // len(targeted)
        phases.append(packing.Phase(packing.pack(text.train, max(sizes)), steps, windowed))
        descriptions["swa_text" if windowed else "full_text"] = text.describe()
        passages |= set(text.passages)
    feed = packing.Feed(tuple(phases), config.batch_tokens, config.seed)
    validation_tokens = sum(map(len, main.validation))
    validation = packing.pack(main.validation, min(max(sizes), validation_tokens))
    return Texts(main, feed, validation, sorted({*tuned, *passages}), descriptions)


def windowed(model: SourceModel) -> set[int]:
    """Return the layers with a sliding window."""
    return {index for index, layer in enumerate(model.spec.layers) if layer.window is not None}


def run(teacher: str, student: str, out: Path, config: HealConfig, overwrite: bool = False) -> Manifest:
    """Distil the converted model `student` from its original `teacher` into the new directory `out`.

    With the same models, text and options, a finished result is returned and an interrupted run resumes, with bitwise
    the same result on one machine. Raises UserError for invalid inputs, and Resumable for a non-finite loss; then its
    batch is saved beside `out`, and the checkpoints remain.
    """
    check_options(config)
    original, converted = SourceModel.open(teacher), SourceModel.open(student)
    if not converted.converted:
        raise UserError(f"student {student} is not converted ({converted.model_type}); convert it first")
    if config.gradient_checkpointing and "shared" in (converted.config.get("indexer_types") or ()):
        raise UserError(f"student {student} shares token selections between layers: give --no-gradient-checkpointing")
    kinds = set(converted.config.get("mla_layer_types") or ())
    if is_sparse(converted.config) and kinds == {"gqa"} and set(config.subset) != {"all"}:
        raise UserError(
            f"student {student} has no converted layer, so only all of it can be trained: give --subset all"
        )
    if config.teacher_dtype == "nf4" and is_packed(original.config):
        raise UserError(f"the experts of {teacher} are stored in four bits already: leave out teacher_dtype nf4")
    if original.converted:
        raise UserError(f"teacher {teacher} is converted itself; give the original")
    if converted.config.get("vocab_size") != original.config.get("vocab_size"):
        raise UserError(f"{teacher} and {student} have different vocabularies; give the model it was converted from")
    if "all" in config.subset and converted.config.get("quantization_config"):
        raise UserError("subset all would train packed experts; give projections or attention")
    slides, layers = len(windowed(converted)), converted.spec.num_layers
    if (config.swa_text and not slides) or (config.full_text and slides == layers):
        raise UserError(f"{slides} of {layers} layers have a window: swa_text or full_text has no layer to train")
    group = distributed.init_process_group(resolve_device(config.device))
    passages_file = converted.path / overlap.PASSAGES
    tuned = overlap.read_passages(passages_file) if passages_file.is_file() else []
    texts = read_texts(original.tokenizer, config, tuned)
    original.check_tokens(*(phase.rows.ids for phase in texts.feed.phases), texts.validation.ids)
    check_divisible(texts.feed, group.world_size)
    manifest = Manifest(
        "heal",
        config={k: v for k, v in dataclasses.asdict(config).items() if k not in NOT_HASHED}
        | record_names(config, "text", "swa_text", "full_text"),
        inputs={
            "teacher": original.record,
            "student": converted.record,
            **texts.descriptions,
        },
    )
    phases = (*config.text, *(config.swa_text or ()), *(config.full_text or ()))
    if previous := finished(out, manifest, overwrite, [original.path, converted.path, *map(Path, phases)]):
        if group.is_main_process:
            log(f"{out} is finished already")
        return previous
    with training_artifact(out, manifest, group) as partial:
        _heal(original, converted, config, texts, manifest, partial, group)
    return manifest


def load(model: Path | SourceModel, dtype: str, device: torch.device) -> Any:
    """Load a frozen causal LM with the fused attention. dtype nf4 quantises its linear layers to 4 bits; MXFP4 weights
    stay MXFP4."""
    source = SourceModel.open(model)
    if dtype == "nf4":
        causal_lm = load_model(source, "bfloat16", device, quantization=_nf4_config())
    else:
        causal_lm = load_packed(source, dtype, device)
    causal_lm.set_attn_implementation(FUSED)
    return causal_lm.requires_grad_(False)


def _nf4_config() -> Any:
    try:
        import bitsandbytes  # noqa: F401 (only for a clear error if it is missing)
    except ModuleNotFoundError as error:
        raise UserError(f"bitsandbytes is missing: {install('heal')}") from error
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def _heal(
    original: SourceModel, converted: SourceModel, config: HealConfig, texts: Texts, manifest: Manifest,
    partial: Path, group: distributed.ProcessGroup,
) -> None:  # fmt: skip
    """Fill the directory `partial` and the manifest's metrics."""
    device, work, seconds = group.device, TensorStore(partial / WORK), manifest.seconds
    dtype, param_dtype = student_dtypes(config.dtype, group)
    frozen = str(dtype).removeprefix("torch.") if config.teacher_dtype == "auto" else config.teacher_dtype
    with timed(seconds, "load"):
        student = as_generated(load(converted, str(param_dtype).removeprefix("torch."), device))
        teacher = load(original, frozen, device)
    micro_rows = max(1, config.micro_tokens // texts.validation.ids.shape[1])
    with timed(seconds, "teacher"):
        validation = Validation(teacher, texts.validation, micro_rows)
        targets = None
        if config.teacher_cache != "off":
            k = config.top_k if config.teacher_cache == "topk" else 0
            if k > teacher.config.vocab_size:
                raise UserError(f"top_k = {k} is more than the vocabulary's {teacher.config.vocab_size}")
            targets = top_k_cache(work, k, config.temperature) if k else final_states_cache(work, validation.head)
            targets.fill(teacher, texts.feed.phases, group.rank, group.world_size)
            group.barrier()
            teacher = None
    loss = LossConfig(
        config.temperature, config.kl_weight, config.lm_weight, config.hidden_weight, config.attention_weight
    )  # fmt: skip
    model = Distillation(student, teacher, loss)
    with timed(seconds, "refit"):
        if config.refit != "off" and "refit" not in work and group.is_main_process:
            _refit(original, converted, model, validation, config, texts, work, device)
        group.barrier()
        refitted = {} if config.refit == "off" else work["refit"]
        _load_tensors(student, refitted)
    if config.gradient_checkpointing:
        student.gradient_checkpointing_enable({"use_reentrant": False})
        student.train()
    with timed(seconds, "train"):
        trainer = train(
            "heal", model, texts.feed, validation, config, partial, group, dtype=dtype, subsets=config.subset,
            trainable=functools.partial(trainable, student), patience=config.patience, targets=targets,
            windowed=windowed(converted),
        )  # fmt: skip
    trainer.write_last_weights(partial, torch.float32)
    if group.is_main_process:
        write(converted, partial, {**refitted, **trainer.trained_weights(best=True)})
        overlap.write_passages(partial, texts.passages)
    manifest.metrics = {
        "refit": None if config.refit == "off" else json.loads((work.folder / "refit.json").read_text()),
        **trainer.metrics(),
    }


def _load_tensors(student: Any, tensors: dict[str, Tensor]) -> None:
    """Load some of the student's tensors by name."""
    unknown = student.load_state_dict(tensors, strict=False).unexpected_keys
    assert not unknown, unknown


def _refit(
    original: SourceModel, converted: SourceModel, model: Distillation, validation: Validation, config: HealConfig,
    texts: Texts, work: TensorStore, device: torch.device,
) -> None:  # fmt: skip
    """Refit o_proj, and up-projections with o_proj, on the training text.

    Writes the tensors with the lowest validation KL to `work` as `refit`, and all KLs to refit.json. "none" is among
    the choices only for refit auto.
    """
    student = model.student
    before = {name: parameter.detach().clone() for name, parameter in student.named_parameters()}
    kl = {"none": validation.measure(model)["kl"]}
    longest = max(phase.rows.ids.shape[1] for phase in texts.feed.phases)
    rows = packing.pack(texts.main.train, longest).ids
    sample = rows[:: max(1, len(rows) * longest // TOKENS)][: max(1, TOKENS // longest)]
    refits: dict[str, dict[str, Tensor]] = {"none": {}}
    dtype = torch.float32 if device.type == "cpu" else next(iter(before.values())).dtype
    with (
        LayerStream(converted, dtype, device) as student_stream,
        LayerStream(original, dtype, device) as teacher_stream,
    ):
        for name, up in (("o_proj", False), ("up_and_o_proj", True)):
            refitted = refit_student(student_stream, teacher_stream, sample, up)
            _load_tensors(student, refitted)
            kl[name] = validation.measure(model)["kl"]
            refits[name] = {key: tensor.clone() for key, tensor in refitted.items()}
            _load_tensors(student, before)
    usable = [name for name in kl if name != "none" or config.refit == "auto"]
    chosen = min(usable, key=kl.__getitem__)
    log(", ".join(f"{name}: validation KL {value:.5f}" for name, value in kl.items()) + f"; refit: {chosen}")
    summary = {"kl": kl, "chosen": chosen, "tokens": sample.numel()}
    (work.folder / "refit.json").write_text(json.dumps(summary), encoding="utf-8")
    work["refit"] = refits[chosen]


def write(converted: SourceModel, partial: Path, trained: dict[str, Tensor]) -> None:
    """Write the converted checkpoint with the trained tensors replaced, in the stored dtypes."""
    with (
        Reader(converted.path) as reader,
        rewriting(converted.path, partial, with_current_code(converted.config)) as writer,
    ):
        for name in reader:
            dtype = reader.dtype(name)

            def tensor(name: str = name, dtype: torch.dtype = dtype) -> Tensor:
                return trained[name].to(dtype) if name in trained else reader[name]

            writer.promise(name, reader.shape(name), dtype, tensor)
        assert set(trained) <= set(reader), sorted(set(trained) - set(reader))
    copy_model_code(partial)


heal = by_keywords(run, HealConfig)
