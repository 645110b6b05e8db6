"""Drafters beside each other on prompts whose answers end where they end.

    python -m research.drafters MODEL PROMPTS.jsonl DRAFTER... [--limit 80] [--batch 8] [--max-tokens 512]

A drafter is `none`, `ngram`, or a head, alone at a fixed length; with `@` before it prompt lookup drafts
too, with `+` the length also adapts. All drafters answer each batch of prompts in turns, greedily. Printed per drafter:
tokens per second, the ratio to the first drafter with its 95 % interval over batches, tokens per step, acceptance by
position, drafting's share of a step, and whether the tokens equal those of the first drafter.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from mlaforge.drafting.dataset import read_prompts
from mlaforge.engine.llm import LLM
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.rendering.page import interval
from mlaforge.rendering.table import markdown_table

COLUMNS = ["drafter", "tokens/s", "ratio", "tokens a step", "accepted by position", "drafting", "equal"]


def load(model: str, drafter: str) -> LLM:
    """Return an engine with a drafter of the command line."""
    name = drafter.lstrip("@+")
    llm = LLM(
        model, speculative=name, adaptive_speculation=drafter.startswith("+"), cache_bytes=1 << 29, max_num_seqs=8,
        prefix_caching=False,
    )  # fmt: skip
    if drafter.startswith("@"):
        assert llm.engine.speculation is not None
        llm.engine.set_drafter(llm.engine.speculation.drafter, prompt_lookup=True)
    return llm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("drafters", nargs="+")
    for option, default in (("limit", 80), ("batch", 8), ("max-tokens", 512)):
        parser.add_argument(f"--{option}", type=int, default=default)
    options = parser.parse_args()
    prompts = read_prompts(options.prompts)[: options.limit]
    engines = {drafter: load(options.model, drafter) for drafter in options.drafters}
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    seconds: dict[str, list[float]] = {drafter: [] for drafter in engines}
    tokens: dict[str, list[list[int]]] = {drafter: [] for drafter in engines}
    for number, first in enumerate(range(0, len(prompts), options.batch)):
        talks = [[{"role": "user", "content": prompt}] for prompt in prompts[first : first + options.batch]]
        for drafter in (list, reversed)[number % 2](list(engines)):
            start = time.perf_counter()
            outputs = engines[drafter].chat(talks, sampling_params=params)
            seconds[drafter].append(time.perf_counter() - start)
            tokens[drafter] += [output.outputs[0].token_ids for output in outputs]
    rows, reference = [COLUMNS], options.drafters[0]
    for drafter, llm in engines.items():
        block = llm.engine.speculation.stats.block() if llm.engine.speculation else {}
        ratios = [a / b for a, b in zip(seconds[reference], seconds[drafter], strict=True)]
        low, high = interval(
            mean := statistics.fmean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5, len(ratios)
        )
        rows.append([
            drafter[: len(drafter) - len(drafter.lstrip("@+"))] + Path(drafter.lstrip("@+")).name,
            f"{sum(map(len, tokens[drafter])) / sum(seconds[drafter]):.1f}", f"{mean:.3f} [{low:.3f}, {high:.3f}]",
            f"{block.get('mean_acceptance_length', 1):.3f}",
            " ".join(f"{share:.2f}" for share in block.get("acceptance_per_position", []) if share is not None),
            f"{block.get('time_shares', {}).get('draft', 0):.3f}", str(tokens[drafter] == tokens[reference]),
        ])  # fmt: skip
    print(markdown_table(rows), flush=True)


if __name__ == "__main__":
    main()
