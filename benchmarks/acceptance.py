"""Tokens per step of a draft head and of prompt lookup: greedy, on the first turns of mt_bench.jsonl.

    python benchmarks/acceptance.py --data ../shared/data [--draft DIR] [--model MODEL] [--context N] [--out FILE.json]

3 drafted tokens, --tokens new tokens per prompt ignoring EOS, in batches of sixteen prompts (speculation.py runs one
prompt at a time for timing). The same inputs are rejected as in speculation.py, and `distinct` has the same meaning.
With --context each question follows that many tokens of WikiText-2, different for each: heads trained on short text may
fail on long text.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from pathlib import Path
from typing import Any

from rows import Results, wikitext
from speculation import begin, read_prompts, speculation_parser

from mlaforge.demo import model as demo_model
from mlaforge.engine.llm import LLM
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.rendering.table import text_table
from mlaforge.runtime import UserError
from mlaforge.synthesis.repetition import distinct_ngram_ratio

DRAFTED, KEY_TILE = 3, 16


def passages(llm: LLM, data: Path, tokens: int, count: int) -> list[str]:
    """Consecutive passages of WikiText-2. Raise UserError if the text is too short."""
    text = Path(wikitext(data)[1]).read_text(encoding="utf-8")
    ids = llm.tokenizer(text)["input_ids"]
    if len(ids) < count * tokens:
        raise UserError(
            f"{count} passages of {tokens} tokens exceed the text of {len(ids)}; reduce --prompts or --context"
        )
    return [llm.tokenizer.decode(ids[n * tokens : (n + 1) * tokens]) + "\n\n" for n in range(count)]


def count(options: argparse.Namespace, model: Path, path: Path, drafter: str) -> dict[str, Any]:
    """`eagle_speculation` of one drafter, and the share of distinct 4-grams in the answers."""
    llm = LLM(
        model, dtype=options.dtype, device="cpu", cache_bytes=1 << 31, max_num_seqs=KEY_TILE, speculative=drafter,
        num_speculative_tokens=DRAFTED, adaptive_speculation=False,
    )  # fmt: skip
    before = functools.partial(passages, llm, options.data, options.context) if options.context else None
    prompts = read_prompts(path, llm, options.prompts, before)
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    answers = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    speculation = llm.engine.stats().speculation
    assert speculation is not None
    return {
        "prompts": len(answers),
        "distinct_4_grams": statistics.mean(distinct_ngram_ratio(ids) or 0.0 for ids in answers),
        "eagle_speculation": speculation.block(),
    }  # fmt: skip


def table(rows: dict[str, Any]) -> str:
    """Table of the rows for the terminal."""
    lines = [("", "tokens a step", "by place", "distinct")]
    for name, row in rows.items():
        block = row["eagle_speculation"]
        places = " ".join(f"{share or 0:.2f}" for share in block["acceptance_per_position"])
        lines.append((name, f"{block['mean_acceptance_length']:.3f}", places, f"{row['distinct_4_grams']:.2f}"))
    return text_table(lines)


def main() -> None:
    arguments = speculation_parser(__doc__, demo_model.head("original"), "bfloat16", "benchmarks/acceptance.json")
    arguments.add_argument("--context", type=int, default=0, help="tokens of WikiText-2 before each question")
    options = arguments.parse_args()
    model, path, facts = begin(options)
    rows = {
        name: count(options, model, path, drafter)
        for name, drafter in (("head", str(options.draft)), ("ngram", "ngram"))
    }
    print(table(rows) + (f"\n{facts['unknown']}" if facts["unknown"] else ""))
    Results(options.out, rows, **facts, context=options.context, dtype=options.dtype).save()


if __name__ == "__main__":
    main()
