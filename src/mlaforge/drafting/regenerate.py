"""`draft regenerate`: batched generation of the target's own answers to prompts, as training data for its draft head.

A draft head predicts its target, so it is trained on the target's text. An instruct model can also sample prompts: what
it generates after the user header of its chat template is a question (Magpie, Xu et al. 2024, arXiv:2406.08464).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from mlaforge.artifact import WORK, Manifest, finished, sha256, writing
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.drafting.config import RegenerateConfig
from mlaforge.drafting.dataset import (
    STAGE,
    TEXT_FILE,
    Excluded,
    answer_line,
    normalize,
    read_eval_texts,
    read_prompts,
    read_text,
)
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.llm import LLM
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError, log, progress_bar, timed
from mlaforge.synthesis.journal import GenerationRequest, Journal, Line
from mlaforge.synthesis.repetition import distinct_ngram_ratio
from mlaforge.synthesis.user_turn import UserTurn

# Options that affect speed only; `dtype` and `max_model_len` affect the text.
NOT_HASHED = {field.name for field in dataclasses.fields(EngineConfig)} - {"dtype", "max_model_len"}


def run(model: str, out: Path, config: RegenerateConfig, overwrite: bool = False) -> Manifest:
    """Generate answers of `model` to the given and the sampled prompts, into the new directory `out`.

    With the same inputs, a finished result is returned and an interrupted run resumes. Prompts that overlap text in
    `exclude` are skipped. Raises UserError for invalid inputs.
    """
    if not config.prompts and not config.synthesize:
        raise UserError("there is nothing to answer; give --prompts FILE, or --synthesize N")
    if config.openings and not config.synthesize:
        raise UserError("openings begin questions sampled from the model; give --synthesize N")
    source = SourceModel.open(model)
    files = {name: [Path(path) for path in getattr(config, name) or ()] for name in ("prompts", "exclude", "openings")}
    prompts = [prompt for path in files["prompts"] for prompt in read_prompts(path)]
    excluded = Excluded(prompt for path in files["exclude"] for prompt in read_eval_texts(path))
    openings = [line.strip() for path in files["openings"] for line in read_text(path).splitlines() if line.strip()]
    if config.openings and not openings:
        raise UserError(f"{', '.join(config.openings)} contains no openings; give one per line")
    ignored = {*NOT_HASHED, *files}
    manifest = Manifest(
        STAGE,
        config={key: value for key, value in dataclasses.asdict(config).items() if key not in ignored},
        inputs={
            "model": source.record,
            **{name: [sha256(path) for path in paths] for name, paths in files.items()},
        },
    )
    if previous := finished(out, manifest, overwrite, (source.path,)):
        log(f"{out} is finished already")
        return previous
    with writing(out, manifest, resumable=True) as partial:
        with timed(manifest.seconds, "answer"):
            lines = Regeneration(source, prompts, excluded, openings, config, partial / WORK / TEXT_FILE).run()
        answers = sorted((line for line in lines if "answer" in line), key=lambda line: int(line["number"]))
        if not answers:
            raise UserError("no prompt was answered: all were excluded, too long, or empty")
        (partial / TEXT_FILE).write_text("".join(json.dumps(line) + "\n" for line in answers), encoding="utf-8")
        manifest.metrics = _metrics(lines, answers)
    return manifest


def _metrics(lines: list[dict[str, Any]], answers: list[dict[str, Any]]) -> dict[str, Any]:
    dropped: dict[str, int] = {}
    for line in lines:
        if "dropped" in line:
            dropped[line["dropped"]] = dropped.get(line["dropped"], 0) + 1
    ratios = [share for line in answers if (share := distinct_ngram_ratio(line["answer"])) is not None]
    return {
        "answers": len(answers),
        "prompt_tokens": sum(len(line["prompt"]) for line in answers),
        "answer_tokens": sum(len(line["answer"]) for line in answers),
        "distinct_4grams": sum(ratios) / len(ratios) if ratios else None,
        "dropped": dropped,
    }


class Regeneration:
    """One run: prompts 0 to n - 1 are given, the others are sampled from the model. `path`: file of its journal."""

    def __init__(
        self, source: SourceModel, prompts: list[str], excluded: Excluded, openings: list[str],
        config: RegenerateConfig, path: Path,
    ):  # fmt: skip
        self.prompts, self.excluded, self.config = prompts, excluded, config
        self.llm = LLM(source, config)
        self.turn = UserTurn(self.llm.tokenizer, self.llm.engine.model_name)
        texts = openings or [""]
        self.openings = [self.llm.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        special = (text for text, ids in zip(texts, self.openings, strict=True) if self.turn.special & set(ids))
        if (first := next(special, None)) is not None:
            raise UserError(f"the opening {first!r} contains a special token; give plain text")
        self.journal = Journal(path)
        # Prompts so far, to skip duplicates.
        self.seen = {normalize(line["said"]) for line in self.journal.lines.values() if "said" in line}

    def run(self) -> list[Line]:
        """Return a line for every prompt: its answer, or why it was dropped."""
        lines = self.journal.lines
        done, total = len(lines), len(self.prompts) + self.config.synthesize
        if self.journal.path.exists():
            log(f"resuming after {done} of {total} prompts")
        numbers = iter([number for number in range(total) if number not in lines])
        with progress_bar("answer prompts", total, initial=done) as bar:
            self.journal.run(
                self.llm.engine, lambda: next(numbers, None), self._start, self._handle_output, bar, lambda: len(lines)
            )
        return list(lines.values())

    def _start(self, number: int) -> GenerationRequest | Line:
        if number < len(self.prompts):
            return self._request(number, self.prompts[number])
        return self.turn.sample_question(self.config.seed + number, self.openings[number % len(self.openings)])

    def _request(self, number: int, prompt: str) -> GenerationRequest | Line:
        """Return the request for a prompt's answer, or a dropped line for an excluded, duplicate or long prompt."""
        if prompt in self.excluded:
            return {"dropped": "excluded"}
        if normalize(prompt) in self.seen:
            return {"dropped": "said before"}
        self.seen.add(normalize(prompt))
        ids = self.turn.conversation_ids(prompt)
        if len(ids) + self.config.max_new_tokens > self.llm.engine.max_model_len:
            return {"dropped": "too long"}
        params = SamplingParams(
            max_tokens=self.config.max_new_tokens, temperature=self.config.temperature,
            seed=self.config.seed + number, stop_token_ids=(self.turn.end,),
        )  # fmt: skip
        return GenerationRequest(ids, params, prompt)

    def _handle_output(self, number: int, request: GenerationRequest, token_ids: list[int]) -> GenerationRequest | Line:
        """Return the line of an answer, or the request for the answer to a sampled question."""
        if request.tag is not None:
            return answer_line(number, request.tag, request.prompt_ids, token_ids)
        text, why = self.turn.parse_question(request, token_ids)
        return {"dropped": why} if why else self._request(number, text)
