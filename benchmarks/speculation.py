"""What speculation brings on a CPU: plain decoding, prompt lookup, a draft head if given, and a perfect drafter.

    python benchmarks/speculation.py --data ../shared/data [--draft DIR [--tree N]] [--model MODEL] [--out FILE.json]

SmolLM2-135M-Instruct, greedy, batch 1, the first turns of mt_bench.jsonl through the chat template, --tokens new
tokens each (past the end of the text; with --end up to it, where that is eight tokens or more). For each prompt every
drafter continues it in turn, in one process and on one engine; what counts is the time from the first new token to the
last, and the median over the prompts of the ratio to plain decoding; beside it the least and the most. `adaptive` lets
measurement choose how many tokens to draft, and `copies` puts what stood in the text before ahead of what is drafted,
up to eight tokens of it: the engine does both by default. The perfect drafter proposes what plain decoding gave: no
drafter of so many tokens is faster. Its drafting costs nothing. `by place`: of the drafts that had a token there, the
share that was accepted that far. In bf16 several rows are summed in another order than one, so that a near tie may
fall the other way: `differ` counts answers, `margin` is the largest difference of the two tokens' log probabilities
where they part.
Small models repeat themselves under greedy decoding, which flatters every drafter: `distinct` is the share of an
answer's runs of four tokens that are different ones. Prompts of random tokens make a model repeat itself entirely:
refused, and so is a head that was trained on text which these prompts were not kept out of.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rows import Results, command, parser

from mlaforge.artifact import record_path, sha256
from mlaforge.bench.replay import Replay
from mlaforge.bench.summary import spread
from mlaforge.checkpoint import resolve
from mlaforge.checkpoint.reader import fingerprint
from mlaforge.demo import model as demo_model
from mlaforge.drafting import dataset
from mlaforge.engine.config import MAX_DRAFT_TOKENS
from mlaforge.engine.llm import LLM
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.speculation.drafter import Drafter
from mlaforge.engine.speculation.lookup import PromptLookupDrafter
from mlaforge.rendering.table import text_table
from mlaforge.runtime import UserError, log
from mlaforge.synthesis.repetition import distinct_ngram_ratio

# What the engine does by default.
ALL = "head copies adaptive"
# Passes after which the perfect drafter's text is taken as it is.
PASSES = 6
# What is asked of a trained head, and of ALL.
BAR, BAR_OF_ALL = 1.25, 1.4
# Tokens of an answer that is timed.
SHORTEST = 8
# Share of ln(vocabulary) that a token of a prompt may cost the model on average: text costs a third, random tokens all.
RANDOM = 0.75


def refuse_random(llm: LLM, prompts: list[list[int]]) -> None:
    """UserError for the first prompt that is no text to the model."""
    most = RANDOM * math.log(llm.engine.vocab_size)
    asks = SamplingParams(max_tokens=0, prompt_logprobs=0)
    for number, output in enumerate(llm.generate(prompts, asks)):
        losses = [-entry.logprob for entry in output.prompt_logprobs or [] if entry is not None]
        if losses and statistics.mean(losses) > most:
            raise UserError(
                f"prompt {number} costs the model {statistics.mean(losses):.1f} nats a token (text: below {most:.1f}): "
                "on random tokens a model repeats itself, and speculation looks better than it is; give text"
            )


class Modes:
    """One engine on which drafters take turns."""

    def __init__(self, options: argparse.Namespace):
        # Without prefix reuse: what one drafter's turn leaves in the cache has no rows of another's head.
        self.llm = LLM(
            options.model, dtype=options.dtype, device="cpu", cache_bytes=1 << 30, max_num_seqs=8,
            speculative=str(options.draft or "none"), prefix_caching=False, num_speculative_tokens=options.count,
        )  # fmt: skip
        self.head = self.llm.engine.speculation.drafter if self.llm.engine.speculation else None
        self.count, self.tree, self.end = options.count, options.tree, options.end
        self.stats: dict[str, Any] = {}

    def use(self, mode: str, drafter: Drafter | None) -> None:
        """From now on as `mode` says; its counters and its measurements go on where they stopped."""
        engine = self.llm.engine
        engine.speculation, engine.model.boundaries = None, ()
        if drafter is None:
            return
        engine.config = dataclasses.replace(
            engine.config, adaptive_speculation=mode.endswith("adaptive"),
            num_speculative_tokens=None if "copies" in mode else self.count,
            speculative_tree_tokens=self.tree if "tree" in mode else 0,
        )  # fmt: skip
        engine.speculate(drafter, prompt_lookup="copies" in mode)
        its = engine.speculation
        assert its is not None
        if mode in self.stats:
            its.stats, its.controller, its.lookup = self.stats[mode]
        self.stats[mode] = its.stats, its.controller, its.lookup

    def run(self, prompt: list[int], tokens: int) -> tuple[list[int], float]:
        """The continuation, and seconds from its first step's end to its last's."""
        engine, token_ids, times = self.llm.engine, [], []
        engine.add("0", prompt, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=not self.end))
        while engine.has_work:
            for output in engine.step():
                output.raise_for_error()
                token_ids += output.outputs[0].token_ids
                times.append(time.perf_counter())
        return token_ids, times[-1] - times[0]

    def margin(self, prompt: list[int], token_ids: list[int], plain: list[int]) -> float:
        """Nats between the two tokens where the texts first differ, by plain decoding: small where they are a tie."""
        at = next(i for i, (a, b) in enumerate(zip(token_ids, plain, strict=True)) if a != b)
        self.use("plain", None)
        asks = SamplingParams(temperature=0.0, max_tokens=1, logprobs=self.llm.engine.vocab_size)
        (output,) = self.llm.generate([prompt + plain[:at]], asks)
        logprobs = dict((output.outputs[0].logprobs or [])[0].top)
        return abs(logprobs[token_ids[at]] - logprobs[plain[at]])

    def known(self, prompt: list[int], plain: list[int]) -> list[int]:
        """What the engine says when it verifies this very text: `plain` but for near ties in bf16."""
        text = plain
        for _ in range(PASSES):
            # Under a name of its own: what it takes to find the text does not count.
            self.use("search", Replay({"0": prompt + text}))
            token_ids, _ = self.run(prompt, len(text))
            if token_ids == text:
                break
            text = token_ids
        return text


def read_prompts(
    path: Path, llm: LLM, most: int, before: Callable[[int], list[str]] | None = None
) -> list[list[int]]:  # fmt: skip
    """The first turns of a file of prompts, as conversations; `before` gives so many passages to stand before them.
    UserError where one is no text."""
    texts = dataset.read_prompts(path)[:most]
    refuse_random(llm, [llm.tokenizer(text)["input_ids"] for text in texts])
    passages = before(len(texts)) if before else [""] * len(texts)
    pairs = zip(passages, texts, strict=True)
    return [llm.chat_prompt([{"role": "user", "content": passage + text}]) for passage, text in pairs]


def measure(modes: Modes, prompts: list[list[int]], tokens: int) -> dict[str, dict[str, Any]]:
    """Per mode its speed and ratios, how often its tokens were not plain decoding's, and the largest margin there."""
    drafters: dict[str, Any] = {"plain": None}
    drafters |= {name: PromptLookupDrafter(MAX_DRAFT_TOKENS) for name in ("ngram", "ngram copies adaptive")}
    if modes.head is not None:
        drafters |= dict.fromkeys(("head", "head adaptive", "head copies adaptive"), modes.head)
        if modes.tree:
            drafters |= dict.fromkeys(("head tree", "head copies tree adaptive"), modes.head)
    names = [*drafters, "perfect"]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    lengths: list[int] = []
    margins: dict[str, list[float]] = {name: [] for name in names}
    shares: dict[str, list[float]] = {name: [] for name in names}
    for number, prompt in enumerate(prompts):
        # Plain decoding at both ends, and the mean of the two: the machine gets faster and slower.
        modes.use("plain", None)
        plain, first = modes.run(prompt, tokens)
        if len(plain) < SHORTEST:
            continue
        lengths.append(len(plain))
        known = modes.known(prompt, plain)
        for name in names[1:]:
            modes.use(name, Replay({"0": prompt + known}) if name == "perfect" else drafters[name])
            token_ids, took = modes.run(prompt, len(plain))
            seconds[name].append(took)
            shares[name].append(distinct_ngram_ratio(token_ids) or 0.0)
            if token_ids != plain:
                margins[name].append(modes.margin(prompt, token_ids, plain))
        modes.use("plain", None)
        seconds["plain"].append((first + modes.run(prompt, len(plain))[1]) / 2)
        shares["plain"].append(distinct_ngram_ratio(plain) or 0.0)
        log(f"prompt {number + 1} of {len(prompts)}")
    rows = {}
    for name in names:
        ratios = [plain / own for plain, own in zip(seconds["plain"], seconds[name], strict=True)]
        rows[name] = {
            "tokens_per_second": spread([(made - 1) / took for made, took in zip(lengths, seconds[name], strict=True)]),
            "bar": BAR_OF_ALL if name == ALL else BAR if name in ("head", "head tree") else None,
            "ratio": spread(ratios), "differ": len(margins[name]),
            "largest_margin": max(margins[name], default=0.0), "distinct_4_grams": statistics.mean(shares[name]),
        }  # fmt: skip
        if name in modes.stats:
            rows[name]["eagle_speculation"] = modes.stats[name][0].block()
    return rows


def table(rows: dict[str, Any]) -> str:
    """What the rows come to, for the terminal."""
    heads = ("", "tok/s", "ratio", "least..most", "differ", "margin", "distinct", "length", "by place")
    lines = [heads]
    for name, row in rows.items():
        ratio, block = row["ratio"], row.get("eagle_speculation")
        places = [f"{share:.2f}" for share in block["acceptance_per_position"] if share is not None] if block else []
        lines.append((
            name, f"{row['tokens_per_second']['median']:.1f}", f"{ratio['median']:.2f}",
            f"{ratio['min']:.2f}..{ratio['max']:.2f}", str(row["differ"]), f"{row['largest_margin']:.3f}",
            f"{row['distinct_4_grams']:.2f}", f"{block['mean_acceptance_length'] or 1:.2f}" if block else "1.00",
            " ".join(places),
        ))  # fmt: skip
    return text_table(lines)


def speculation_parser(doc: str | None, draft: Path | None, dtype: str, out: str) -> argparse.ArgumentParser:
    """The options of this script and of acceptance.py, with these defaults."""
    arguments = parser(doc, out)
    arguments.add_argument("--model", help="by default the demo's")
    arguments.add_argument("--draft", type=Path, default=draft, help="directory of an EAGLE-3 head")
    arguments.add_argument("--dtype", default=dtype)
    arguments.add_argument("--prompts", type=int, default=80)
    arguments.add_argument("--tokens", type=int, default=128)
    arguments.add_argument("--threads", type=int, default=2)
    return arguments


def begin(options: argparse.Namespace) -> tuple[Path, Path, dict[str, Any]]:
    """The model's directory, the file of prompts, and what results record before anything is measured. UserError for a
    head that was trained on text which these prompts were not kept out of."""
    torch.set_num_threads(options.threads)
    path = options.data / "prompts" / "mt_bench.jsonl"
    prompts_file = {"path": record_path(path), "sha256": sha256(path)}
    unknown = dataset.check_unseen(options.draft, [prompts_file]) if options.draft else ""
    model = resolve.locate(options.model) if options.model else demo_model.fetch()
    return model, path, {
        "command": command(), "model": model.name, "model_sha256": fingerprint(model), "threads": options.threads,
        "head": {"path": record_path(options.draft), "sha256": fingerprint(options.draft)} if options.draft else None,
        "unknown": unknown, "judged": prompts_file, "tokens": options.tokens,
    }  # fmt: skip


def main() -> None:
    arguments = speculation_parser(__doc__, None, "auto", "benchmarks/speculation.json")
    arguments.add_argument("--count", type=int, default=3, help="drafted tokens per step")
    arguments.add_argument("--tree", type=int, default=0, help="tokens of a tree; 0: chains only")
    arguments.add_argument("--end", action="store_true", help="answers end where the text does")
    options = arguments.parse_args()
    options.model, path, facts = begin(options)
    modes = Modes(options)
    prompts = read_prompts(path, modes.llm, options.prompts)
    modes.use("plain", None)
    modes.run(prompts[0], 8)
    rows = measure(modes, prompts, options.tokens)
    print(table(rows) + (f"\n{facts['unknown']}" if facts["unknown"] else ""))
    Results(
        options.out, rows, **facts, prompts=len(prompts), num_speculative_tokens=options.count,
        tree_tokens=options.tree, end=options.end, dtype=modes.llm.engine.model.format,
    ).save()  # fmt: skip


if __name__ == "__main__":
    main()
