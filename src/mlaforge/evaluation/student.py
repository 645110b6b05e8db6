"""`eval --criteria`: evaluate a healed model against its original by the criteria of a file.

If all pass, the student's manifest says `canonical`. Evaluation text must not share passages with the text that the
student was converted or healed on. Both models run one layer at a time (checkpoint/layerwise.py), except in lm-eval
tasks.
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
from mlaforge.evaluation.criteria import Criterion, Measurement, read
from mlaforge.evaluation.divergence import States, check_vocabularies, comparisons, final_states, percentile
from mlaforge.runtime import UserError, log, resolve_device, resolve_dtype, timed

# Amount of haystack text to sample from, in lengths of the longest needle text.
HAYSTACK_FACTOR = 8


@dataclasses.dataclass(frozen=True)
class EvalWindow:
    """Token ids [T] of a window, and the number of its document."""

    document: int
    ids: Tensor


def eval_windows(tokenizer: Any, criterion: Criterion, tuned: list[int]) -> list[EvalWindow]:
    """Return the evaluation windows of a criterion, each within one document; the windows of a single document count as
    documents. Raises UserError if windows share passages with `tuned`, and for too little text."""
    source, length = criterion.text, criterion.seqlen
    documents = corpus.documents(source, evaluation=True, tokenizer=tokenizer)
    if source == corpus.EMBEDDED:
        random.Random(0).shuffle(documents)  # so that all kinds occur
    if len(documents) == 1:
        slices = corpus.windows(tokenizer, source, criterion.windows, length).ids
        windows = [EvalWindow(n, ids) for n, ids in enumerate(slices)]
    else:
        windows = []
        for n, document in enumerate(documents):
            ids = corpus.tokens(tokenizer, document, criterion.windows * length)
            windows += [EvalWindow(n, part) for part in ids.split(length) if len(part) >= overlap.SHINGLE]
            if len(windows) >= criterion.windows:
                break
        windows = windows[: criterion.windows]
    overlapping = overlap.sharing([window.ids for window in windows], tuned)
    if source == corpus.EMBEDDED:
        windows = [window for n, window in enumerate(windows) if n not in overlapping]
    elif overlapping:
        raise UserError(
            f"{len(overlapping)} of {len(windows)} windows of {source} share text with what the student was converted "
            "or healed on; evaluation needs unseen text: give another"
        )
    if not windows:
        raise UserError(f"text {source!r} has no window for evaluation; give more text or a smaller seqlen")
    return windows


class Evaluator:
    """Measures criteria on student and teacher; comparisons that several criteria need are computed once."""

    def __init__(self, student: SourceModel, teacher: SourceModel, dtype: torch.dtype, device: torch.device, seed: int):
        self.models, self.dtype, self.device, self.seed = (student, teacher), dtype, device, seed
        self.tokenizer = teacher.tokenizer
        self.tuned = overlap.read_passages(student.path / overlap.PASSAGES)
        self._comparisons: dict[tuple[str, int, int], tuple[np.ndarray, float]] = {}

    def _states(self, texts: list[Tensor], label: str) -> list[States]:
        """Return the final states of student and teacher."""
        self.models[1].check_tokens(*texts)
        outputs = []
        for role, model in zip(("student", "teacher"), self.models, strict=True):
            with LayerStream(model, self.dtype, self.device) as stream:
                outputs.append(final_states(stream, texts, f"{role} on {label}"))
        return outputs

    def compare_models(self, criterion: Criterion) -> tuple[np.ndarray, float]:
        """Return per document the student's summed loss, the teacher's, summed KL, agreements, and tokens, [5,
        documents]; and the 99th percentile of the tokens' KL."""
        key = (criterion.text, criterion.windows, criterion.seqlen)
        if key not in self._comparisons:
            windows = eval_windows(self.tokenizer, criterion, self.tuned)
            texts = [window.ids for window in windows]
            student, teacher = self._states(texts, criterion.text)
            parts = comparisons(student, teacher, texts)
            sums: dict[int, Tensor] = {}
            for window, part in zip(windows, parts, strict=True):
                row = torch.cat((part.double().sum(-1), torch.tensor([part.shape[1]])))
                sums[window.document] = sums.get(window.document, 0) + row
            tail = percentile(torch.cat(parts, dim=1)[2])
            self._comparisons[key] = torch.stack(list(sums.values())).T.numpy(), tail
        return self._comparisons[key]

    def measure(self, criterion: Criterion) -> Measurement:
        """Measure a criterion. Raises UserError for too little text, and for text that the student was tuned on."""
        if criterion.measure == "needle":
            return self._needle(criterion)
        if criterion.measure == "task":
            return self._task(criterion)
        (student, teacher, kl, agreements, count), tail = self.compare_models(criterion)
        if criterion.measure == "perplexity":
            return Measurement(student, teacher, count, higher=False, exp=True)
        if criterion.measure == "kl":
            return Measurement(kl, np.zeros_like(kl), count, higher=False, p99=tail)
        return Measurement(agreements, count, count, higher=True)

    @torch.no_grad()
    def _needle(self, criterion: Criterion) -> Measurement:
        num_windows = HAYSTACK_FACTOR * -(-max(criterion.lengths) // criterion.seqlen)
        haystack = eval_windows(self.tokenizer, dataclasses.replace(criterion, windows=num_windows), self.tuned)
        texts = [self.tokenizer.decode(window.ids) for window in haystack]
        cases = needle.cases(self.tokenizer, texts, criterion.lengths, criterion.depths, criterion.repeats, self.seed)
        retrieved = []
        for states, head in self._states([case.ids for case in cases], "needles"):
            hits = [needle.is_retrieved(h, head, case) for h, case in zip(states, cases, strict=True)]
            retrieved.append(np.array(hits, dtype=float))
        return Measurement(retrieved[0], retrieved[1], np.ones(len(cases)), higher=True)

    def _task(self, criterion: Criterion) -> Measurement:
        scores = []
        for source in self.models:
            model = as_generated(load_packed(source, str(self.dtype).removeprefix("torch."), self.device))
            scores.append(
                lm_eval_tasks.scores(model, self.tokenizer, str(criterion.task), criterion.metric, criterion.limit)
            )
        (student, higher, texts), (teacher, _, _) = scores
        question_ids = corpus.tokens(self.tokenizer, "\n".join(dict.fromkeys(texts)))
        if overlap.sharing([question_ids], self.tuned):
            raise UserError(
                f"task {criterion.task} contains text that the student was converted or healed on; give another"
            )
        return Measurement(student, teacher, np.ones(len(student)), higher)


def run(config: EvalConfig, out: Path | None, overwrite: bool = False) -> Manifest:
    """Evaluate config.student by config.criteria against config.teacher; the manifest's metrics contain every verdict.

    Marks the student's manifest canonical if all criteria pass, else not canonical. Raises UserError for invalid
    inputs, if possible before anything is measured.
    """
    if not (config.teacher and config.student and config.criteria):
        raise UserError("criteria compare two models: give --teacher, --student and --criteria together")
    if config.dense or config.topk is not None:
        raise UserError("criteria evaluate the student as it is served by default; leave out dense and topk")
    criteria, seed = read(Path(config.criteria).expanduser())
    teacher, student = SourceModel.open(config.teacher), SourceModel.open(config.student)
    if Manifest.load(student.path) is None or not (student.path / overlap.PASSAGES).is_file():
        raise UserError(
            f"{student} has no {MANIFEST} and {overlap.PASSAGES}: only a model made by mlaforge can be evaluated, "
            "because the text that it was tuned on must be known"
        )
    device = resolve_device(config.device)
    check_vocabularies(teacher, student)
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
    previous = finished(out, manifest, overwrite, (teacher.path, student.path, *texts)) if out is not None else None
    if previous is None:
        with nullcontext() if out is None else writing(out, manifest):
            evaluator = Evaluator(student, teacher, dtype, device, seed)
            with timed(manifest.seconds, "judge"):
                verdicts = [evaluator.measure(criterion).evaluate(criterion, seed) for criterion in criteria]
            manifest.metrics = {"criteria": verdicts, "passed": all(verdict["passed"] for verdict in verdicts)}
    else:
        manifest = previous
    mark(student.path, manifest)
    return manifest


def mark(student: Path, evaluation: Manifest) -> None:
    """Record the result of an evaluation in the student's manifest."""
    manifest = Manifest.load(student)
    assert manifest is not None
    manifest.canonical = evaluation.metrics["passed"]
    manifest.acceptance = {"inputs": evaluation.inputs, **evaluation.metrics}
    manifest.save(student)


def table(metrics: dict[str, Any]) -> str:
    """Format a manifest's metrics for a terminal: one line per criterion, then the result."""
    lines = []
    for verdict in metrics["criteria"]:
        interval = "" if verdict["interval"] is None else " [{:.4g}, {:.4g}]".format(*verdict["interval"])
        tail = f" (99 % of tokens: at most {verdict['p99']:.4g})" if "p99" in verdict else ""
        lines.append(
            f"{'pass' if verdict['passed'] else 'FAIL'}  {verdict['name']}: student {verdict['student']:.5g}{tail}, "
            f"teacher {verdict['teacher']:.5g}, worse by {verdict['worse']:.4g}{interval} ({verdict['kind']}), at most "
            f"{verdict['limit']:g}, {verdict['documents']} texts"
        )
    failed = [verdict["name"] for verdict in metrics["criteria"] if not verdict["passed"]]
    return "\n".join([*lines, f"failed: {', '.join(failed)}" if failed else "canonical"])
