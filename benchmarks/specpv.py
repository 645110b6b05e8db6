"""What partial verification brings on a CPU: plain decoding, a draft head, and the head with partial verification,
where measurement says that it pays, always, and in the paper's lossy form.

    python benchmarks/specpv.py --data ../shared/data [--cases 2048x1 8000x1 8000x4] [--sweep] [--model SPARSE]
      [--out FILE.json]

SmolLM2-135M-Instruct in bf16 with the shipped head; `copies`: what stood in the text before comes ahead of it, as it
does by default. Each of the eight documents of benchmarks/sparsity.py, cut to the context, stands in a conversation
that asks for a summary; answers are greedy, --tokens long at most, and end where the text ends. All of them take turns
on one engine, the documents one after another (in a batch so many together), and what counts is the time from the
first new token to the last. Tokens must be plain decoding's, but those of the lossy form, and of a sparse model, where
those that are verified together share a selection. `kept` is the share of the pending tokens that a full step agreed
to. `nats`: what the model itself, reading all, gives the answer's tokens, less than it gives those of plain decoding.
--sweep: other sizes of the view, on the first case.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rows import Results, command, parser
from sparsity import documents

import mlaforge
from mlaforge.bench.summary import spread
from mlaforge.demo import model as demo_model
from mlaforge.engine.llm import LLM
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.rendering.table import text_table
from mlaforge.runtime import log
from mlaforge.synthesis.repetition import distinct_ngram_ratio

HEAD = Path(mlaforge.__file__).parent / "demo" / "heads" / "smollm2-135m-instruct-original"
ASK = "Summarize this text in your own words:\n\n"
# Ratios to plain decoding, and to the head alone.
BARS = {"2048x1": (1.0, 1.0), "8000x1": (1.4, 1.25), "8000x4": (None, 1.2)}
COPIES, PACE, ALWAYS = "head, copies", "head, copies, partial", "head, always partial"
LOSSY, LOSSY_CASE = "head, lossy", "8000x1"
SWEEP = {
    "specpv_dtype": ("model", "int8", "int4"), "specpv_retrieval": (0, 512, 1024, 2048),
    "specpv_window": (128, 256, 512), "specpv_max_pending": (4, 8, 16, 24), "specpv_full_every": (2, 4, 6, 8, 16),
    "specpv_sink": (4, 16, 64),
}  # fmt: skip


class Modes:
    """One engine, on which they take turns; what one learned of its pace is kept for its next turn."""

    def __init__(self, model: Path, tokens: int):
        self.llm = LLM(
            model, device="cpu", dtype="bfloat16", cache_bytes=4 << 30, speculative=str(HEAD),
            specpv="lossless",
        )  # fmt: skip
        engine = self.llm.engine
        assert engine.speculation is not None
        self.drafter, self.config, self.tokens = engine.speculation.drafter, engine.config, tokens
        self.kept: dict[str, Any] = {}

    def use(self, name: str, **options: Any) -> None:
        """`plain`, without partial verification `head` and COPIES, or with it by any other name, by these options."""
        engine = self.llm.engine
        engine.speculation, engine.model.boundaries = None, ()
        if name == "plain":
            return
        specpv = "off" if name in ("head", COPIES) else "lossy" if name == LOSSY else "lossless"
        engine.config = dataclasses.replace(self.config, **{"specpv": specpv, **options})
        engine.speculate(self.drafter, prompt_lookup=name in (COPIES, PACE))
        engine.speculation = self.kept.setdefault(name, engine.speculation)
        if name in (ALWAYS, LOSSY):
            # Without looking at the pace.
            engine.speculation.controller.mode_selector = None

    def nats(self, prompt: list[int], answer: list[int]) -> float:
        """What the model gives an answer, a token."""
        self.use("plain")
        params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
        (output,) = self.llm.generate([prompt + answer], params)
        own = output.prompt_logprobs[len(prompt) :]
        return -sum(each.logprob for each in own) / len(own)

    def run(self, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
        """The answers, and seconds for each of their tokens behind the first."""
        engine = self.llm.engine
        for number, prompt in enumerate(prompts):
            engine.add(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=self.tokens))
        answers: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
        began = before = 0
        while engine.has_work:
            for output in engine.step():
                output.raise_for_error()
                answers[output.request_id] += output.outputs[0].token_ids
            if not began and all(answers.values()):
                # All prompts are read.
                began, before = time.perf_counter(), sum(map(len, answers.values()))
        made = sum(map(len, answers.values())) - before
        return list(answers.values()), (time.perf_counter() - began) / max(1, made)


def prompts_of(llm: LLM, data: Path, context: int) -> dict[str, list[int]]:
    """A conversation of so many tokens about each document."""
    found = {}
    for name, text in documents(data):
        around = len(llm.chat_prompt([{"role": "user", "content": ASK}]))
        ids = llm.tokenizer(text, add_special_tokens=False)["input_ids"][: context - around]
        found[name] = llm.chat_prompt([{"role": "user", "content": ASK + llm.tokenizer.decode(ids)}])
    return found


def measured(
    modes: Modes, names: Iterable[str], batches: list[list[list[int]]], **options: Any
) -> list[dict[str, Any]]:
    """A row for each of `names`, over the batches of prompts; plain decoding is the first."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    distinct: list[float] = []
    worse: list[float] = []
    differ = dict.fromkeys(names, 0)
    for number, batch in enumerate(batches):
        # Prompts are computed with the head's rows, and found by whoever comes after.
        modes.use("head")
        for prompt in batch:
            modes.llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1))
        wanted: list[list[int]] = []
        for name in names:
            modes.use(name, **(options if name not in ("plain", "head") else {}))
            answers, each = modes.run(batch)
            wanted = wanted or answers
            seconds[name].append(each)
            differ[name] += answers != wanted
            if name == LOSSY:
                pairs = zip(batch, answers, wanted, strict=True)
                worse += [modes.nats(prompt, own) - modes.nats(prompt, plain) for prompt, own, plain in pairs]
        distinct += [distinct_ngram_ratio(answer) or 0.0 for answer in wanted]
        log(f"{number + 1} of {len(batches)}: " + ", ".join(f"{n} {1e3 * s[-1]:.1f} ms" for n, s in seconds.items()))
    rows = []
    for name, own in seconds.items():
        row = {
            "mode": name, "ms_per_token": 1e3 * statistics.median(own), "differ": differ[name],
            "to_plain": spread([p / o for p, o in zip(seconds["plain"], own, strict=True)]),
            "distinct_4_grams": statistics.mean(distinct),
        }  # fmt: skip
        if "head" in seconds:
            row["to_head"] = spread([h / o for h, o in zip(seconds["head"], own, strict=True)])
        if name == LOSSY:
            row["nats"] = statistics.mean(worse)
        if name in modes.kept:
            row["eagle_speculation"] = modes.kept.pop(name).stats.block()
        rows.append(row)
    return rows


def main() -> None:
    arguments = parser(__doc__, "benchmarks/specpv.json")
    arguments.add_argument("--cases", nargs="*", default=[*BARS])
    arguments.add_argument("--tokens", type=int, default=160)
    arguments.add_argument("--documents", type=int, default=8)
    arguments.add_argument("--model", type=Path, help="a sparse model made of it, for instance")
    arguments.add_argument("--sweep", action="store_true")
    options = arguments.parse_args()
    torch.set_num_threads(2)
    facts = {"tokens": options.tokens, "documents": options.documents}
    results = Results(options.out, [], resume=True, **facts)
    results.body["command"] = command()
    modes = Modes(options.model or demo_model.fetch(), options.tokens)
    for case in options.cases:
        context, batch = map(int, case.split("x"))
        prompts = [*prompts_of(modes.llm, options.data, context - options.tokens).values()][: options.documents]
        batches = [prompts[at : at + batch] for at in range(0, len(prompts), batch)]
        if options.sweep:
            for name, value in [(name, value) for name, values in SWEEP.items() for value in values]:
                key = {"case": case, name: value}
                for _ in results.missing([key]):
                    row = measured(modes, ("plain", ALWAYS), batches, **{name: value})[1]
                    results.add(key | row)
            break
        for _ in results.missing([{"case": case, "mode": ALWAYS}]):
            names = ("plain", "head", COPIES, PACE, ALWAYS, *([LOSSY] if case == LOSSY_CASE else []))
            for row in measured(modes, names, batches):
                results.add({"case": case, "bars": BARS.get(case), **row})
        modes.llm.engine.reset_prefix_cache()
    print(table(results.rows))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows, for the terminal."""
    lines: list[tuple[str, ...]] = [
        ("case", "", "ms a token", "to plain", "least", "to head", "length", "kept", "differ", "nats")
    ]
    for row in rows:
        block = row.get("eagle_speculation") or {}
        kept, length = block.get("kept_share"), block.get("mean_acceptance_length")
        swept = ", ".join(f"{key} {value}" for key, value in row.items() if key.startswith("specpv_"))
        lines.append((
            row["case"], swept or row["mode"], f"{row['ms_per_token']:.1f}", f"{row['to_plain']['median']:.2f}",
            f"{row['to_plain']['min']:.2f}", f"{row['to_head']['median']:.2f}" if "to_head" in row else "–",
            f"{length:.2f}" if length else "–", f"{kept:.2f}" if kept else "–", str(row["differ"]),
            f"{row['nats']:+.4f}" if "nats" in row else "–",
        ))  # fmt: skip
    return text_table(lines)


if __name__ == "__main__":
    main()
