"""`eval --criteria`: a healed model beside its original, judged by criteria that were written down before.

All pass: its manifest says `canonical`. Nothing is judged on text that shares passages with what the student was
converted or healed on. Both models are read one layer at a time (checkpoint/layerwise.py), except by lm-eval's tasks.
"""

from __future__ import annotations

import dataclasses
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlaforge.artifact import MANIFEST, Manifest, finished, record_name, sha256, writing
from mlaforge.checkpoint.layerwise import LayerStream
from mlaforge.checkpoint.loading import as_generated, load_packed
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.data import corpus, overlap
from mlaforge.evaluation import lm_eval_tasks, needle
from mlaforge.evaluation.config import EvalConfig
from mlaforge.evaluation.criteria import Criterion, Measured, read
from mlaforge.runtime import UserError, log, resolve_device, resolve_dtype, timed
from mlaforge.training.kl_loss import compare

# Hay to draw from, in lengths of the longest needle's text.
HAY = 8


@dataclasses.dataclass(frozen=True)
class Piece:
    """Token ids [T] of a document."""

    document: int
    ids: Tensor


def pieces(tokenizer: Any, criterion: Criterion, tuned: list[int]) -> list[Piece]:
    """The windows that a criterion judges on, each within one document; a text that is one document is cut into
    windows of which each counts as a document. Raises UserError where they share passages with `tuned`."""
    source, length = criterion.text, criterion.seqlen
    documents = corpus.documents(source, evaluation=True, tokenizer=tokenizer)
    if source == corpus.EMBEDDED:
        random.Random(0).shuffle(documents)  # of all its kinds
    if len(documents) == 1:
        cut = corpus.windows(tokenizer, source, criterion.windows, length).ids
        windows = [Piece(n, ids) for n, ids in enumerate(cut)]
    else:
        windows = []
        for n, document in enumerate(documents):
            ids = corpus.tokens(tokenizer, document, criterion.windows * length)
            windows += [Piece(n, part) for part in ids.split(length) if len(part) >= overlap.SHINGLE]
            if len(windows) >= criterion.windows:
                break
        windows = windows[: criterion.windows]
    shared = overlap.sharing([piece.ids for piece in windows], tuned)
    if source == corpus.EMBEDDED:
        windows = [piece for n, piece in enumerate(windows) if n not in shared]
    elif shared:
        raise UserError(
            f"{len(shared)} of {len(windows)} windows of {source} share text with what the student was converted or "
            "healed on; nothing may be judged on what it was tuned on: give other text"
        )
    if not windows:
        raise UserError(f"text {source!r} holds nothing to judge on; give more text or a smaller seqlen")
    return windows


class Judgement:
    """Measures criteria on two models; what several of them need is computed once."""

    def __init__(self, student: SourceModel, teacher: SourceModel, dtype: torch.dtype, device: torch.device, seed: int):
        self.models, self.dtype, self.device, self.seed = (student, teacher), dtype, device, seed
        self.tokenizer = teacher.tokenizer
        self.tuned = overlap.read_passages(student.path / overlap.PASSAGES)
        self._compared: dict[tuple[str, int, int], tuple[np.ndarray, ...]] = {}

    @torch.no_grad()
    def _states(self, texts: list[Tensor], what: str) -> list[tuple[list[Tensor], Tensor]]:
        """Student's and teacher's final states on every text, and their heads."""
        self.models[1].check_tokens(*texts)
        both = []
        for who, model in zip(("student", "teacher"), self.models, strict=True):
            with LayerStream(model, self.dtype, self.device) as stream:
                hidden = stream.last_states(texts, f"{who} on {what}")
                with stream.head() as (norm, head):
                    both.append(([norm(h)[0] for h in hidden], head))
        return both

    @torch.no_grad()
    def compared(self, criterion: Criterion) -> tuple[np.ndarray, ...]:
        """By document: the student's summed loss, the teacher's, summed KL, agreements, and tokens."""
        key = (criterion.text, criterion.windows, criterion.seqlen)
        if key not in self._compared:
            judged = pieces(self.tokenizer, criterion, self.tuned)
            (ours, our_head), (theirs, their_head) = self._states([p.ids for p in judged], criterion.text)
            sums: dict[int, Tensor] = {}
            for piece, a, b in zip(judged, ours, theirs, strict=True):
                labels = piece.ids[1:].to(self.device)
                parts = compare((a[:-1], our_head), (b[:-1], their_head), labels)
                row = torch.stack([part.double().sum().cpu() for part in parts] + [torch.tensor(len(labels)).double()])
                sums[piece.document] = sums.get(piece.document, 0) + row
            self._compared[key] = tuple(torch.stack(list(sums.values())).T.numpy())
        return self._compared[key]

    def measure(self, criterion: Criterion) -> Measured:
        """Raises UserError for text that was tuned on, or that there is too little of."""
        if criterion.measure == "needle":
            return self._needle(criterion)
        if criterion.measure == "task":
            return self._task(criterion)
        ours, theirs, kl, same, count = self.compared(criterion)
        if criterion.measure == "perplexity":
            return Measured(ours, theirs, count, higher=False, exp=True)
        if criterion.measure == "kl":
            return Measured(kl, np.zeros_like(kl), count, higher=False)
        return Measured(same, count, count, higher=True)

    @torch.no_grad()
    def _needle(self, criterion: Criterion) -> Measured:
        enough = dataclasses.replace(criterion, windows=HAY * -(-max(criterion.lengths) // criterion.seqlen))
        hay = pieces(self.tokenizer, enough, self.tuned)
        texts = [self.tokenizer.decode(piece.ids) for piece in hay]
        cases = needle.cases(self.tokenizer, texts, criterion.lengths, criterion.depths, criterion.repeats, self.seed)
        recalled = []
        for states, head in self._states([case.ids for case in cases], "needles"):
            hits = [needle.is_found(h, head, case) for h, case in zip(states, cases, strict=True)]
            recalled.append(np.array(hits, dtype=float))
        return Measured(recalled[0], recalled[1], np.ones(len(cases)), higher=True)

    def _task(self, criterion: Criterion) -> Measured:
        scores = []
        for source in self.models:
            model = as_generated(load_packed(source, str(self.dtype).removeprefix("torch."), self.device))
            scores.append(
                lm_eval_tasks.scores(model, self.tokenizer, str(criterion.task), criterion.metric, criterion.limit)
            )
        (ours, higher, texts), (theirs, _, _) = scores
        asked = corpus.tokens(self.tokenizer, "\n".join(dict.fromkeys(texts)))
        if overlap.sharing([asked], self.tuned):
            raise UserError(f"task {criterion.task} asks what the student was converted or healed on; give another")
        return Measured(ours, theirs, np.ones(len(ours)), higher)


def run(config: EvalConfig, out: Path | None, overwrite: bool = False) -> Manifest:
    """Judges config.student by config.criteria beside config.teacher; the manifest's metrics hold every verdict.

    Marks the student's own manifest canonical if all pass, and not canonical if one fails. Raises UserError for the
    user's mistakes, before anything is measured where that can be known.
    """
    if not (config.teacher and config.student and config.criteria):
        raise UserError("criteria compare two models: give --teacher, --student and --criteria together")
    criteria, seed = read(Path(config.criteria).expanduser())
    teacher, student = SourceModel.open(config.teacher), SourceModel.open(config.student)
    if Manifest.load(student.path) is None or not (student.path / overlap.PASSAGES).is_file():
        raise UserError(
            f"{student} has no {MANIFEST} and {overlap.PASSAGES}: only what mlaforge made can be judged, because "
            "nobody else says what it was tuned on"
        )
    device = resolve_device(config.device)
    if student.config.get("vocab_size") != teacher.config.get("vocab_size"):
        raise UserError(f"{teacher} and {student} have different vocabularies; give the model it was converted from")
    dtype = resolve_dtype(config.dtype, teacher.dtype)
    if config.dtype == "auto":
        log(f"dtype auto: {str(dtype).removeprefix('torch.')} (that of {teacher.path.name}, for both)")
    manifest = Manifest(
        "acceptance",
        config={"dtype": str(dtype), "criteria": [c.describe() for c in criteria], "seed": seed},
        inputs={
            "teacher": teacher.record,
            "student": student.record,
            "criteria": {"path": record_name(config.criteria), "sha256": sha256(Path(config.criteria).expanduser())},
        },
    )
    texts = (criterion.text for criterion in criteria)
    done = finished(out, manifest, overwrite, (teacher.path, student.path, *texts)) if out is not None else None
    if done is None:
        with nullcontext() if out is None else writing(out, manifest):
            judgement = Judgement(student, teacher, dtype, device, seed)
            with timed(manifest.seconds, "judge"):
                verdicts = [judgement.measure(criterion).judge(criterion, seed) for criterion in criteria]
            manifest.metrics = {"criteria": verdicts, "passed": all(verdict["passed"] for verdict in verdicts)}
    else:
        manifest = done
    mark(student.path, manifest)
    return manifest


def mark(student: Path, judged: Manifest) -> None:
    """Writes into the student's manifest what became of it."""
    own = Manifest.load(student)
    assert own is not None
    own.canonical = judged.metrics["passed"]
    own.acceptance = {"inputs": judged.inputs, **judged.metrics}
    own.save(student)


def table(metrics: dict[str, Any]) -> str:
    """A manifest's metrics for a terminal: one line per criterion, then what became of the student."""
    lines = []
    for verdict in metrics["criteria"]:
        spread = "" if verdict["interval"] is None else " [{:.4g}, {:.4g}]".format(*verdict["interval"])
        lines.append(
            f"{'pass' if verdict['passed'] else 'FAIL'}  {verdict['name']}: student {verdict['student']:.5g}, teacher "
            f"{verdict['teacher']:.5g}, worse by {verdict['worse']:.4g}{spread} ({verdict['kind']}), at most "
            f"{verdict['limit']:g}, {verdict['documents']} texts"
        )
    failed = [verdict["name"] for verdict in metrics["criteria"] if not verdict["passed"]]
    return "\n".join([*lines, f"failed: {', '.join(failed)}" if failed else "canonical"])
