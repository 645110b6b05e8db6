"""`draft regenerate`: prompts answered by the target itself, with the engine, many at a time.

A draft head proposes what its target would say, so it learns from what its target said. Where prompts are few, an
instruct model writes its own (Magpie, Xu et al. 2024, arXiv:2406.08464): what it draws after its chat template's user
header is a question. Each answer is kept as soon as it is whole, so that a killed run loses those under way only.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
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
    distinct_share,
    read_judged,
    read_prompts,
    read_text,
    words,
)
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.llm import LLM
from mlaforge.engine.request import chat_template
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError, log, progress_bar, timed

# Stands in a rendered template for what the user says.
MARK = "WHAT THE USER SAYS"
# Questions of a model's own are kept between these lengths, and where so many of their runs of 4 tokens are distinct.
FEWEST_WORDS, MOST_TOKENS, DISTINCT = 4, 256, 0.7
# At which they are drawn: at 1 as the model would say them; after an opening, which varies them already, more soberly.
TEMPERATURE, OPENED = 1.0, 0.7
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
    shares = [share for line in answered if (share := distinct_share(line["answer"])) is not None]
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
        self.prompts, self.excluded, self.config, self.path = prompts, excluded, config, path
        self.llm = LLM(source, config)
        self.engine = self.llm.engine
        self.header, self.end = self._template()
        self.special = set(self.llm.tokenizer.all_special_ids)
        texts = openings or [""]
        self.openings = [self.llm.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        if special := [text for text, ids in zip(texts, self.openings, strict=True) if self.special & set(ids)]:
            raise UserError(f"the opening {special[0]!r} holds a special token; give words alone")
        self.kept: list[dict[str, Any]] = []
        # What was said already, and request -> what is under way: number, prompt, its token ids.
        self.seen: set[str] = set()
        self.under_way: dict[str, tuple[int, str, list[int]]] = {}
        self.generated: dict[str, list[int]] = {}

    def _template(self) -> tuple[list[int], int]:
        """The token ids before what a user says, and the first token after it."""
        rendered: str = self.llm.tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False) \
            if self.llm.tokenizer.chat_template else ""  # fmt: skip
        before, _, after = rendered.partition(MARK)
        if not before or not after:
            raise UserError(f"{self.engine.model_name} has no chat template that says where a user's turn is")
        ids = [self.llm.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (before, after)]
        return ids[0], ids[1][0]

    def run(self) -> list[dict[str, Any]]:
        """Every prompt's line: its answer, or why it was dropped."""
        self._resume()
        done = {line["number"] for line in self.kept}
        numbers = iter([n for n in range(len(self.prompts) + self.config.synthesize) if n not in done])
        begun, tokens = time.perf_counter(), 0
        with (
            self.path.open("a", encoding="utf-8") as file,
            progress_bar("answer prompts", len(self.prompts) + self.config.synthesize, initial=len(done)) as bar,
        ):
            while self._fill(numbers, file, bar) or self.engine.has_work:
                for output in self.engine.step():
                    new = output.outputs[0]
                    tokens += len(new.token_ids)
                    self.generated[output.request_id] += new.token_ids
                    if output.finished:
                        self._finished(output.request_id, file, bar)
                bar.set_postfix(tok_s=f"{tokens / (time.perf_counter() - begun):.0f}", refresh=False)
        took = time.perf_counter() - begun
        log(f"{tokens} tokens in {took:.0f} s: {tokens / took:.0f} a second")
        return self.kept

    def _resume(self) -> None:
        """What a killed run left. Its last line may be torn."""
        if not self.path.exists():
            return
        whole, _, torn = self.path.read_text(encoding="utf-8").rpartition("\n")
        self.kept = [json.loads(line) for line in whole.splitlines()]
        self.seen = {words(line["said"]) for line in self.kept if "said" in line}
        if torn:
            self.path.write_text(whole + "\n" if whole else "", encoding="utf-8")
        log(f"going on after {len(self.kept)} of {len(self.prompts) + self.config.synthesize} prompts")

    def _fill(self, numbers: Iterator[int], file: Any, bar: Any) -> bool:
        """Asks on until twice as many wait or run as run together. Whether anything is under way."""
        while len(self.under_way) < 2 * self.config.max_num_seqs and (number := next(numbers, None)) is not None:
            if number < len(self.prompts):
                self._ask(number, self.prompts[number], file, bar)
            else:
                opening = self.openings[number % len(self.openings)]
                params = SamplingParams(
                    max_tokens=MOST_TOKENS, temperature=OPENED if opening else TEMPERATURE,
                    seed=self.config.seed + number, stop_token_ids=(self.end,),
                )  # fmt: skip
                self._add(f"question {number}", number, "", self.header + opening, params)
        return bool(self.under_way)

    def _add(self, request: str, number: int, prompt: str, ids: list[int], params: SamplingParams) -> None:
        self.under_way[request], self.generated[request] = (number, prompt, ids), []
        self.engine.add(request, ids, params)

    def _ask(self, number: int, prompt: str, file: Any, bar: Any) -> None:
        """Has a prompt answered, unless there is something against it."""
        if prompt in self.excluded:
            self._keep({"number": number, "dropped": "excluded"}, file, bar)
        elif words(prompt) in self.seen:
            self._keep({"number": number, "dropped": "said before"}, file, bar)
        else:
            self.seen.add(words(prompt))
            ids = chat_template.render(self.llm.tokenizer, [{"role": "user", "content": prompt}])
            if len(ids) + self.config.max_new_tokens > self.engine.max_model_len:
                self._keep({"number": number, "dropped": "too long"}, file, bar)
                return
            params = SamplingParams(
                max_tokens=self.config.max_new_tokens, temperature=self.config.temperature,
                seed=self.config.seed + number, stop_token_ids=(self.end,),
            )  # fmt: skip
            self._add(f"answer {number}", number, prompt, ids, params)

    def _finished(self, request: str, file: Any, bar: Any) -> None:
        """A question is asked, an answer kept."""
        (number, prompt, ids), token_ids = self.under_way.pop(request), self.generated.pop(request)
        if request.startswith("answer"):
            self._keep(answer_line(number, prompt, ids, token_ids), file, bar)
            return
        question = ids[len(self.header) :] + token_ids[:-1]
        text = self.llm.tokenizer.decode(question).strip()
        share = distinct_share(question)
        if token_ids[-1] != self.end or self.special.intersection(question):
            self._keep({"number": number, "dropped": "no end"}, file, bar)
        elif len(text.split()) < FEWEST_WORDS:
            self._keep({"number": number, "dropped": "too short"}, file, bar)
        elif share is not None and share < DISTINCT:
            self._keep({"number": number, "dropped": "repeats itself"}, file, bar)
        else:
            self._ask(number, text, file, bar)

    def _keep(self, line: dict[str, Any], file: Any, bar: Any) -> None:
        self.kept.append(line)
        file.write(json.dumps(line) + "\n")
        file.flush()
        bar.update()
