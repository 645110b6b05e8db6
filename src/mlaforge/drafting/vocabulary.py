"""`draft vocab`: the draft vocabulary of a head, the most frequent tokens of its target's answers.

Most tokens of a vocabulary are rare, and the size of a head's last matrix is proportional to its vocabulary (FR-Spec,
Zhao et al. 2025, arXiv:2502.14856). Coverage of validation answers is an upper bound of the head's acceptance rate.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from mlaforge.artifact import Manifest, finished, sha256, writing
from mlaforge.checkpoint.eagle3 import OFFSETS, mapping, target_ids
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.drafting.config import VocabularyConfig
from mlaforge.drafting.dataset import TEXT_FILE, Answer, read_answers, split
from mlaforge.runtime import UserError, log

STAGE, FILE = "draft vocab", "vocabulary.safetensors"


def count_tokens(answers: list[Answer], vocab_size: int) -> Tensor:
    """Count the tokens of answers, int64 [vocabulary]. Raises UserError for a token outside the vocabulary."""
    ids = torch.tensor([token for answer in answers for token in answer.answer_ids], dtype=torch.int64)
    if int(ids.max()) >= vocab_size:
        raise UserError(f"the text has token {int(ids.max())}, the model only {vocab_size}: another model wrote it")
    return ids.bincount(minlength=vocab_size)


def most_frequent(counts: Tensor, size: int, special: list[int]) -> Tensor:
    """Return the special and the most frequent token ids [size], ascending. Ties go to lower ids, which BPE gives to
    merges that are more frequent in its training text."""
    order = counts.clone()
    order[special] = counts.max() + 1
    return order.argsort(descending=True, stable=True)[:size].sort().values


def coverage(counts: Tensor, ids: Tensor) -> float:
    """Return the share of all counted tokens that are in `ids`."""
    return float(counts[ids].sum() / counts.sum())


def run(
    model: str, texts: list[Path], out: Path, config: VocabularyConfig, overwrite: bool = False
) -> Manifest:  # fmt: skip
    """Write d2t and t2d of the most frequent tokens in the answers of `model` into the new directory `out`."""
    source = SourceModel.open(model)
    vocab_size = source.spec.vocab_size
    special = sorted(token for token in source.tokenizer.all_special_ids if token < vocab_size)
    if not max(1, len(special)) <= config.size <= vocab_size:
        raise UserError(f"size = {config.size} must be from {max(1, len(special))} to {vocab_size}, the model's own")
    train_answers, validation_answers = split([answer for text in texts for answer in read_answers(text)[1]])
    manifest = Manifest(
        STAGE,
        config=dataclasses.asdict(config),
        inputs={"vocab_size": vocab_size, "special": special, "text": [sha256(text / TEXT_FILE) for text in texts]},
    )
    if previous := finished(out, manifest, overwrite, (source.path, *texts)):
        log(f"{out} is finished already")
        return previous
    train_counts = count_tokens(train_answers, vocab_size)
    validation_counts = count_tokens(validation_answers, vocab_size)
    sizes = [config.size // 4, config.size // 2, config.size, 2 * config.size, 4 * config.size]
    manifest.metrics = {
        "tokens": int(train_counts.sum()),
        "distinct_tokens": int((train_counts > 0).sum()),
        "held_out_tokens": int(validation_counts.sum()),
        "coverage": {
            str(size): {
                "text": coverage(train_counts, most_frequent(train_counts, size, special)),
                "held_out": coverage(validation_counts, most_frequent(train_counts, size, special)),
            }
            for size in sizes
            if max(1, len(special)) <= size <= vocab_size
        },
    }
    ids = most_frequent(train_counts, config.size, special)
    with writing(out, manifest) as partial:
        from safetensors.torch import save_file

        save_file(mapping(ids, vocab_size), partial / FILE)
    return manifest


def read(directory: Path, vocab_size: int) -> Tensor:
    """Return the token ids of a vocabulary written by `run`. Raises UserError for that of another model, or none."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    manifest = Manifest.load(directory)
    if manifest is None or manifest.stage != STAGE:
        raise UserError(f"{directory} was not written by `mlaforge draft vocab`")
    try:
        stored = load_file(directory / FILE)
        d2t, t2d = stored["d2t"], stored["t2d"]
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(f"{directory / FILE} is damaged: {error}") from error
    if len(t2d) != vocab_size:
        raise UserError(f"the vocabulary in {directory} is for {len(t2d)} tokens, the model has {vocab_size}")
    try:
        return target_ids(d2t, t2d, vocab_size, OFFSETS)[1]
    except UserError as error:
        raise UserError(f"{directory / FILE} is damaged: {error}") from error
