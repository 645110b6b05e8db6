"""Drafters beside each other on prompts whose answers end where they end.

    python -m research.drafters MODEL PROMPTS.jsonl DRAFTER... [--limit 80] [--batch 1,8] [--max-tokens 512]

A drafter is `none`, `ngram`, or the directory of a head, alone at a fixed length; with `+` before it prompt lookup goes
first and the length adapts. Every drafter answers the same prompts in turn, greedily. Printed per drafter and batch:
tokens per second, tokens per step, acceptance by position, drafting's share of a step, and whether the tokens equal
those of the first drafter (give `none` first).
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path

from mlaforge.drafting.dataset import read_prompts
from mlaforge.engine.llm import LLM
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.rendering.table import markdown_table

COLUMNS = ["drafter", "batch", "tokens/s", "tokens a step", "accepted by position", "drafting", "equal"]


def answers(llm: LLM, prompts: list[str], batch: int, max_tokens: int) -> tuple[list[list[int]], float]:
    """Return the answers' tokens and the seconds that all of them took."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    tokens, start = [], time.perf_counter()
    for first in range(0, len(prompts), batch):
        talks = [[{"role": "user", "content": prompt}] for prompt in prompts[first : first + batch]]
        tokens += [output.outputs[0].token_ids for output in llm.chat(talks, sampling_params=params)]
    return tokens, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("drafters", nargs="+")
    parser.add_argument("--limit", type=int, default=80)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--max-tokens", type=int, default=512)
    options = parser.parse_args()
    prompts, rows, first = read_prompts(options.prompts)[: options.limit], [COLUMNS], {}
    for drafter in options.drafters:
        for batch in map(int, options.batch.split(",")):
            llm = LLM(
                options.model, speculative=drafter.removeprefix("+"), adaptive_speculation=drafter.startswith("+"),
                cache_bytes=1 << 29, max_num_seqs=8, prefix_caching=False,
            )  # fmt: skip
            tokens, seconds = answers(llm, prompts, batch, options.max_tokens)
            block = llm.engine.speculation.stats.block() if llm.engine.speculation else {}
            drafting = block.get("time_shares", {}).get("draft", 0)
            accepted = [share for share in block.get("acceptance_per_position", []) if share is not None]
            rows.append([
                Path(drafter).name if Path(drafter.removeprefix("+")).is_dir() else drafter, str(batch),
                f"{sum(map(len, tokens)) / seconds:.1f}", f"{block.get('mean_acceptance_length', 1):.3f}",
                " ".join(f"{share:.2f}" for share in accepted),
                f"{drafting:.3f}", str(tokens == first.setdefault(batch, tokens)),
            ])  # fmt: skip
            print(markdown_table(rows), flush=True)
            del llm
            gc.collect()


if __name__ == "__main__":
    main()
