"""`draft vocab`: the tokens that a draft head can propose, the most frequent of what its target says.

Most of a vocabulary is hardly ever said, and a head's last matrix is as tall as its vocabulary (FR-Spec, Zhao et al.
2025, arXiv:2502.14856). What a head cannot propose is never accepted, so the coverage on answers that were not counted
bounds its acceptance.
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
from mlaforge.drafting.dataset import TEXT, Answer, read_answers, split
from mlaforge.runtime import UserError, log

STAGE, FILE = "draft vocab", "vocabulary.safetensors"


def counts(answers: list[Answer], vocab_size: int) -> Tensor:
    """How often each token is answered, int64 [vocabulary]. Raises UserError for a token beyond it."""
    ids = torch.tensor([token for answer in answers for token in answer.answer_ids], dtype=torch.int64)
    if int(ids.max()) >= vocab_size:
        raise UserError(f"the text has token {int(ids.max())}, the model only {vocab_size}: another model wrote it")
    return ids.bincount(minlength=vocab_size)


def most_frequent(counted: Tensor, size: int, special: list[int]) -> Tensor:
    """Rising token ids [size]: the special ones and the most frequent. Of equally frequent ones the lower ids, which
    tokenizers of merged pairs gave to what was frequent in their own text."""
    order = counted.clone()
    order[special] = counted.max() + 1
    return order.argsort(descending=True, stable=True)[:size].sort().values


def coverage(counted: Tensor, ids: Tensor) -> float:
    """Share of all counted tokens that are among `ids`."""
    return float(counted[ids].sum() / counted.sum())


def run(
    model: str, texts: list[Path], out: Path, config: VocabularyConfig, overwrite: bool = False
) -> Manifest:  # fmt: skip
    """Writes d2t and t2d of the tokens that `model` answered most often into the new directory `out`."""
    source = SourceModel.open(model)
    vocab_size = source.spec.vocab_size
    special = sorted(token for token in source.tokenizer.all_special_ids if token < vocab_size)
    if not max(1, len(special)) <= config.size <= vocab_size:
        raise UserError(f"size = {config.size} must be from {max(1, len(special))} to {vocab_size}, the model's own")
    learnt, held = split([answer for text in texts for answer in read_answers(text)[1]])
    manifest = Manifest(
        STAGE,
        config=dataclasses.asdict(config),
        inputs={"vocab_size": vocab_size, "special": special, "text": [sha256(text / TEXT) for text in texts]},
    )
    if done := finished(out, manifest, overwrite, (source.path, *texts)):
        log(f"{out} is finished already")
        return done
    counted, judged = counts(learnt, vocab_size), counts(held, vocab_size)
    sizes = [config.size // 4, config.size // 2, config.size, 2 * config.size, 4 * config.size]
    manifest.metrics = {
        "tokens": int(counted.sum()),
        "distinct_tokens": int((counted > 0).sum()),
        "held_out_tokens": int(judged.sum()),
        "coverage": {
            str(size): {
                "text": coverage(counted, most_frequent(counted, size, special)),
                "held_out": coverage(judged, most_frequent(counted, size, special)),
            }
            for size in sizes
            if max(1, len(special)) <= size <= vocab_size
        },
    }
    ids = most_frequent(counted, config.size, special)
    with writing(out, manifest) as partial:
        from safetensors.torch import save_file

        save_file(mapping(ids, vocab_size), partial / FILE)
    return manifest


def read(directory: Path, vocab_size: int) -> Tensor:
    """The token ids of a vocabulary that `run` wrote. Raises UserError for another model's, or none."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    manifest = Manifest.load(directory)
    if manifest is None or manifest.stage != STAGE:
        raise UserError(f"{directory} is not what `mlaforge draft vocab` wrote")
    try:
        stored = load_file(directory / FILE)
        d2t, t2d = stored["d2t"], stored["t2d"]
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(f"{directory / FILE} is damaged: {error}") from error
    if len(t2d) != vocab_size:
        raise UserError(f"the vocabulary in {directory} is of {len(t2d)} tokens, the model's has {vocab_size}")
    try:
        return target_ids(d2t, t2d, vocab_size, OFFSETS)[1]
    except UserError as error:
        raise UserError(f"{directory / FILE} is damaged: {error}") from error
