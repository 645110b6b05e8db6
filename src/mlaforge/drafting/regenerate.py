"""`draft regenerate`: prompts answered by the target itself, with the engine, many at a time.

A draft head proposes what its target would say, so it learns from what its target said. Where prompts are few, an
instruct model writes its own (Magpie, Xu et al. 2024, arXiv:2406.08464): what it draws after its chat template's user
header is a question.
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
    TEXT,
    Excluded,
    answer_line,
    read_judged,
    read_prompts,
    read_text,
    words,
)
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.llm import LLM
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError, log, progress_bar, timed
from mlaforge.synthesis.journal import GenerationRequest, Journal, Line
from mlaforge.synthesis.repetition import distinct_ngram_ratio
from mlaforge.synthesis.user_turn import UserTurn

# Options that change nothing but speed. `dtype` does.
NOT_HASHED = {field.name for field in dataclasses.fields(EngineConfig)} - {"dtype", "max_model_len"}


def run(model: str, out: Path, config: RegenerateConfig, overwrite: bool = False) -> Manifest:
    """Has `model` answer the prompts, and as many of its own, into the new directory `out`.

    The same again returns the finished result, or goes on where a killed run stopped. Raises UserError for the user's
    mistakes; prompts that are in `exclude` are left out.
    """
    if not config.prompts and not config.synthesize:
        raise UserError("there is nothing to answer; give --prompts FILE, or --synthesize N")
    if config.openings and not config.synthesize:
        raise UserError("openings begin questions that the model draws itself; give --synthesize N")
    source = SourceModel.open(model)
    files = {name: [Path(path) for path in getattr(config, name) or ()] for name in ("prompts", "exclude", "openings")}
    prompts = [prompt for path in files["prompts"] for prompt in read_prompts(path)]
    excluded = Excluded(prompt for path in files["exclude"] for prompt in read_judged(path))
    openings = [line.strip() for path in files["openings"] for line in read_text(path).splitlines() if line.strip()]
    if config.openings and not openings:
        raise UserError(f"{', '.join(config.openings)} holds no openings; give one a line")
    ignored = {*NOT_HASHED, *files}
    manifest = Manifest(
        STAGE,
        config={key: value for key, value in dataclasses.asdict(config).items() if key not in ignored},
        inputs={
            "model": source.record,
            **{name: [sha256(path) for path in paths] for name, paths in files.items()},
        },
    )
    if done := finished(out, manifest, overwrite, (source.path,)):
        log(f"{out} is finished already")
        return done
    with writing(out, manifest, resumable=True) as partial:
        with timed(manifest.seconds, "answer"):
            kept = Regeneration(source, prompts, excluded, openings, config, partial / WORK / TEXT).run()
        answered = sorted((line for line in kept if "answer" in line), key=lambda line: int(line["number"]))
        if not answered:
            raise UserError("no prompt was left to answer: all were excluded, too long, or said nothing")
        (partial / TEXT).write_text("".join(json.dumps(line) + "\n" for line in answered), encoding="utf-8")
        manifest.metrics = _metrics(kept, answered)
    return manifest


def _metrics(kept: list[dict[str, Any]], answered: list[dict[str, Any]]) -> dict[str, Any]:
    dropped: dict[str, int] = {}
    for line in kept:
        if "dropped" in line:
            dropped[line["dropped"]] = dropped.get(line["dropped"], 0) + 1
    shares = [share for line in answered if (share := distinct_ngram_ratio(line["answer"])) is not None]
    return {
        "answers": len(answered),
        "prompt_tokens": sum(len(line["prompt"]) for line in answered),
        "answer_tokens": sum(len(line["answer"]) for line in answered),
        "distinct_4grams": sum(shares) / len(shares) if shares else None,
        "dropped": dropped,
    }


class Regeneration:
    """One run: prompts 0 to n - 1 are those given, the others the model's own. `path` keeps a line for each."""

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
            raise UserError(f"the opening {first!r} holds a special token; give words alone")
        self.journal = Journal(path)
        # What was said already.
        self.seen = {words(line["said"]) for line in self.journal.lines.values() if "said" in line}

    def run(self) -> list[Line]:
        """Every prompt's line: its answer, or why it was dropped."""
        lines = self.journal.lines
        done, total = len(lines), len(self.prompts) + self.config.synthesize
        if self.journal.path.exists():
            log(f"going on after {done} of {total} prompts")
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
        """Has a prompt answered, unless there is something against it."""
        if prompt in self.excluded:
            return {"dropped": "excluded"}
        if words(prompt) in self.seen:
            return {"dropped": "said before"}
        self.seen.add(words(prompt))
        ids = self.turn.conversation_ids(prompt)
        if len(ids) + self.config.max_new_tokens > self.llm.engine.max_model_len:
            return {"dropped": "too long"}
        params = SamplingParams(
            max_tokens=self.config.max_new_tokens, temperature=self.config.temperature,
            seed=self.config.seed + number, stop_token_ids=(self.turn.end,),
        )  # fmt: skip
        return GenerationRequest(ids, params, prompt)

    def _handle_output(self, number: int, request: GenerationRequest, token_ids: list[int]) -> GenerationRequest | Line:
        """A question is asked, an answer kept."""
        if request.tag is not None:
            return answer_line(number, request.tag, request.prompt_ids, token_ids)
        text, why = self.turn.parse_question(request, token_ids)
        return {"dropped": why} if why else self._request(number, text)
