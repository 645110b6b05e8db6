"""How many tokens a step a draft head gives: the first turns of mt_bench.jsonl, greedy, and prompt lookup beside it.

    python benchmarks/acceptance.py --data ../shared/data [--draft DIR] [--model MODEL] [--context N] [--out FILE.json]

Always 3 drafted tokens, --tokens new tokens for each prompt, past the end of the text, sixteen prompts together, which
speculation.py takes one by one to time them. What it refuses is refused here, and `distinct` means the same. With
--context each question stands behind so many tokens of WikiText-2, a stretch of its own: heads that learnt from short
text may fail on long.
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
    """Stretches of WikiText-2, one after another. UserError where there is too little of it."""
    text = Path(wikitext(data)[1]).read_text(encoding="utf-8")
    ids = llm.tokenizer(text)["input_ids"]
    if len(ids) < count * tokens:
        raise UserError(
            f"{count} passages of {tokens} tokens are more than {len(ids)}; give --prompts or --context less"
        )
    return [llm.tokenizer.decode(ids[n * tokens : (n + 1) * tokens]) + "\n\n" for n in range(count)]


def count(options: argparse.Namespace, model: Path, path: Path, drafter: str) -> dict[str, Any]:
    """`eagle_speculation` of one drafter, and how many of the answers' runs of four tokens are different ones."""
    llm = LLM(
        model, dtype=options.dtype, device="cpu", cache_bytes=1 << 31, max_num_seqs=KEY_TILE, speculative=drafter,
        num_speculative_tokens=DRAFTED, adaptive_speculation=False,
    )  # fmt: skip
    before = functools.partial(passages, llm, options.data, options.context) if options.context else None
    prompts = read_prompts(path, llm, options.prompts, before)
    asks = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    answers = [output.outputs[0].token_ids for output in llm.generate(prompts, asks)]
    speculation = llm.engine.stats().speculation
    assert speculation is not None
    return {
        "prompts": len(answers),
        "distinct_4_grams": statistics.mean(distinct_ngram_ratio(ids) or 0.0 for ids in answers),
        "eagle_speculation": speculation.block(),
    }  # fmt: skip


def table(rows: dict[str, Any]) -> str:
    """What the rows come to, for the terminal."""
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
