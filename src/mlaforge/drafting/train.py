"""`draft train`: train a draft head on its target's regenerated answers.

Optimiser, evaluation, checkpoints and distributed training are those of `heal` (training/optimizer.py,
training/loop.py, training/distributed.py). The weights that are best on validation answers are written as a head that
the engine loads.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlaforge.artifact import WORK, Manifest, finished, sha256
from mlaforge.checkpoint.draft_head import read_head, write_head
from mlaforge.checkpoint.eagle3 import DraftConfig, buffers, check_head
from mlaforge.checkpoint.loading import as_generated, load_packed
from mlaforge.checkpoint.reader import fingerprint
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.data import packing
from mlaforge.drafting import initialize, vocabulary
from mlaforge.drafting.block import BlockKind
from mlaforge.drafting.config import DraftTrainConfig
from mlaforge.drafting.dataset import TEXT_FILE, TRAIN_STAGE, Answer, read_answers, split, training_texts
from mlaforge.drafting.eagle3 import Eagle3Kind, ParallelKind
from mlaforge.drafting.head_kind import HeadKind
from mlaforge.drafting.markov import initialize_markov
from mlaforge.drafting.objective import States, Validation, capture, columns
from mlaforge.families.spec import ModelSpec
from mlaforge.modeling.latent_attention_mla import FUSED
from mlaforge.runtime import UserError, log, resolve_device, timed
from mlaforge.tensor_store import TensorStore
from mlaforge.training import distributed
from mlaforge.training.loop import check_divisible, student_dtypes, train, training_artifact
from mlaforge.training.teacher_cache import TeacherCache

# By option --kind.
KINDS: dict[str, HeadKind] = {kind.name: kind for kind in (Eagle3Kind(), ParallelKind(), BlockKind())}
# Options that do not change the result, or not beyond rounding.
NOT_HASHED = ("device", "tensorboard", "text", "vocabulary", "init")


def check_options(config: DraftTrainConfig) -> None:
    """Raise UserError for options that contradict each other for any model."""
    if config.seqlen > config.batch_tokens:
        raise UserError(f"seqlen = {config.seqlen} must be at most batch_tokens = {config.batch_tokens}")
    if not config.text:
        raise UserError("--text is missing: give the output of `mlaforge draft regenerate MODEL`")


@dataclasses.dataclass(frozen=True)
class Texts:
    """Training and validation answers in packed rows, and their description for the manifest."""

    feed: packing.Feed
    validation: packing.Rows
    described: dict[str, Any]


def read_texts(config: DraftTrainConfig, answers: list[Answer]) -> Texts:
    """Split and pack the answers. Raises UserError if none has two tokens."""
    train_answers, validation_answers = split(answers)
    random.Random(config.seed).shuffle(train_answers)
    rows = []
    for part in (train_answers, validation_answers):
        rows.append(packing.first_fit([(a.prompt_ids + a.answer_ids, len(a.prompt_ids)) for a in part], config.seqlen))
        if not int(columns(rows[-1])[1].sum()):
            raise UserError(f"no answer has two tokens within seqlen = {config.seqlen}; give a longer one")
    count = config.batch_tokens // config.seqlen
    num_columns = [int((columns(part)[1] > 0).sum()) for part in rows]
    described = {
        "answers": len(train_answers), "columns": num_columns[0], "row_tokens": rows[0].ids.numel(),
        "times_read": config.steps * count / len(rows[0]), "validation_answers": len(validation_answers),
        "validation_columns": num_columns[1],
    }  # fmt: skip
    feed = packing.Feed((packing.Phase(rows[0], config.steps),), config.batch_tokens, config.seed)
    return Texts(feed, rows[1], described)


def run(model: str, out: Path, config: DraftTrainConfig, overwrite: bool = False) -> Manifest:
    """Train a head for `model` into the new directory `out`.

    With the same inputs, a finished result is returned and an interrupted run resumes, with bitwise the same result on
    one machine. Raises UserError for invalid inputs, and Resumable for a non-finite loss.
    """
    check_options(config)
    source = SourceModel.open(model)
    spec = source.spec
    folders = [Path(text) for text in config.text or ()]
    regenerated = [read_answers(folder) for folder in folders]
    texts = read_texts(config, [answer for _, answers in regenerated for answer in answers])
    source.check_tokens(texts.feed.phases[0].rows.ids, texts.validation.ids)
    kind = KINDS[config.kind]
    init_head = read_head(Path(config.init), spec.num_layers) if config.init else None
    if init_head is None:
        all_ids = torch.arange(spec.vocab_size)
        ids = vocabulary.read(Path(config.vocabulary), spec.vocab_size) if config.vocabulary else all_ids
        shape = kind.new_config(source, config, len(ids))
    else:
        if config.vocabulary or config.boundaries or config.kv_heads:
            raise UserError("--init defines vocabulary, boundaries and key-value heads; do not give them as options")
        _check_init(init_head.config, spec, config)
        init_head = kind.adopt(init_head, source, config)
        ids, shape = init_head.target_ids, init_head.config
    group = distributed.init_process_group(resolve_device(config.device))
    check_divisible(texts.feed, group.world_size)
    manifest = Manifest(
        TRAIN_STAGE,
        config={key: value for key, value in dataclasses.asdict(config).items() if key not in NOT_HASHED},
        inputs={
            "model": source.record,
            "init": {"sha256": fingerprint(Path(config.init)), "text": training_texts(Path(config.init))}
            if config.init else None,
            "vocabulary": sha256(Path(config.vocabulary) / vocabulary.FILE) if config.vocabulary else None,
            # exclude: SHA-256 of the files that the text does not overlap, on which the head may be evaluated.
            "text": [
                {"sha256": sha256(folder / TEXT_FILE), "written_by": source_manifest.inputs["model"]["sha256"],
                 "exclude": source_manifest.inputs["exclude"]}
                for folder, (source_manifest, _) in zip(folders, regenerated, strict=True)
            ],
        },
    )  # fmt: skip
    foreign = [text for text in manifest.inputs["text"] if text["written_by"] != manifest.inputs["model"]["sha256"]]
    if foreign and group.is_main_process:
        log(f"the text was not generated by {model}: training on its own answers works better")
    if previous := finished(out, manifest, overwrite, (source.path, *folders, config.init, config.vocabulary)):
        if group.is_main_process:
            log(f"{out} is finished already")
        return previous
    with training_artifact(out, manifest, group) as partial:
        _train(source, kind, shape, ids, init_head, config, texts, manifest, partial, group)
    return manifest


def _check_init(head: DraftConfig, spec: ModelSpec, config: DraftTrainConfig) -> None:
    try:
        check_head(head, spec.hidden_size, spec.vocab_size)
    except UserError as error:
        raise UserError(f"{config.init}: {error}") from error
    if head.has_embed_tokens:
        raise UserError(f"{config.init} has its own embed_tokens, which cannot be trained; give another head")


def _initialized_head(
    kind: HeadKind, shape: Any, ids: Tensor, init_head: Any, rows: packing.Rows,
    states: Callable[[packing.Rows], States], embedding: Tensor, target_head: Tensor, seed: int, work: TensorStore,
    group: distributed.ProcessGroup,
) -> Any:  # fmt: skip
    """Return `init_head`, or a new head initialised by its kind, with a Markov correction: computed once, by rank 0."""
    head = kind.make(shape)
    if "start" not in work and group.is_main_process:
        text = initialize.Text(rows, states, embedding.float(), shape.layer.rms_norm_eps)
        head.load_state_dict({**head.state_dict(), **buffers(shape, ids)})
        if init_head is None:
            kind.initialize(head, text, target_head, seed)
        else:
            head.load_state_dict(init_head.state_dict())
        if shape.markov_rank and (init_head is None or not bool(init_head.markov_head.weight.any())):
            initialize_markov(head, text, target_head)
        work["start"] = dict(head.named_parameters())
    group.barrier()
    head.load_state_dict({**buffers(shape, ids), **work["start"]})
    return head


def states_cache(work: TensorStore, boundaries: tuple[int, ...]) -> TeacherCache:
    """Return a cache of the target's states in bf16, the usual dtype for drafting."""

    def compute(target: Any, rows: packing.Rows) -> dict[str, Tensor]:
        states = capture(target, rows, boundaries)
        return {"captured": states.captured.bfloat16(), "final": states.final.bfloat16()}

    return TeacherCache(work, compute, lambda cached: States(cached["captured"], cached["final"]))


def _train(
    source: SourceModel, kind: HeadKind, shape: Any, ids: Tensor, init_head: Any, config: DraftTrainConfig,
    texts: Texts, manifest: Manifest, partial: Path, group: distributed.ProcessGroup,
) -> None:  # fmt: skip
    """Fill the directory `partial` and the manifest's metrics."""
    device, work, seconds = group.device, TensorStore(partial / WORK), manifest.seconds
    dtype, param_dtype = student_dtypes(config.dtype, group)
    rows = texts.feed.phases[0].rows
    with timed(seconds, "load"):
        target = as_generated(load_packed(source, str(dtype).removeprefix("torch."), device)).requires_grad_(False)
        target.set_attn_implementation(FUSED)
        embedding = target.get_input_embeddings().weight.detach().clone()
        target_head = target.lm_head.weight.detach()[ids.to(device)]
    cache = states_cache(work, shape.boundaries)
    # Phase 0 is the training text, 1 the validation text.
    phases = (texts.feed.phases[0] if config.cache else packing.Phase(rows.take(torch.arange(0)), 0),
              packing.Phase(texts.validation, 0))  # fmt: skip
    with timed(seconds, "target"):
        cache.fill(target, phases, group.rank, group.world_size)
        group.barrier()
    with timed(seconds, "start"):
        if config.cache:
            states: Callable[[packing.Rows], States] = functools.partial(cache, 0)
        else:
            states = functools.partial(capture, target, boundaries=shape.boundaries)
        head = _initialized_head(
            kind, shape, ids, init_head, rows, states, embedding, target_head, config.seed, work, group
        )
    head = head.to(device, param_dtype)
    parameters = sum(tensor.numel() for tensor in head.parameters())
    objective = kind.objective(
        head, None if config.cache else target, embedding, target_head, config, texts.described["columns"] / len(rows)
    )
    del target
    names = kind.trained(head)
    frozen = {name: tensor for name, tensor in head.named_parameters() if name not in names}
    validation = Validation(
        texts.validation, functools.partial(cache, 1), max(1, config.micro_tokens // config.seqlen),
        kind.draft_tokens(shape),
    )  # fmt: skip
    with timed(seconds, "train"):
        trainer = train(
            "draft train", objective, texts.feed, validation, config, partial, group, dtype=dtype, subsets=["head"],
            trainable=lambda _: names, targets=cache if config.cache else None,
        )  # fmt: skip
    trainer.write_last_weights(partial, torch.float16)
    if group.is_main_process:
        written = kind.make(shape)
        written.load_state_dict({**buffers(shape, ids), **frozen, **trainer.trained_weights(best=True)})
        write_head(written, partial)
    manifest.metrics = {
        "text": texts.described, "parameters": parameters, "draft_tokens": kind.draft_tokens(shape), **trainer.metrics()
    }  # fmt: skip
