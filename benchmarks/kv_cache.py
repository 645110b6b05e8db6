"""What a smaller cache costs: perplexity of SmolLM2-135M-Instruct, and of conversions of it, by how rows are stored.

    python benchmarks/kv_cache.py --data ../shared/data [--models DIRECTORY ...] [--windows 4] [--out FILE.json]

bf16 engine on a CPU; windows of 2048 tokens of wiki.test.raw, each token read once, through the cache, as in a request.
`int4 first`: int4 with the first block of a sequence, its attention sinks, kept in bf16 too. Bytes are those that the
cache holds of 2048 tokens, by `mlaforge plan`'s count, over those of bf16.
"""

from __future__ import annotations

import math
from pathlib import Path
from unittest import mock

from rows import Results, command, parser, wikitext

from mlaforge import LLM, SamplingParams
from mlaforge.data import corpus
from mlaforge.demo import model as demo_model
from mlaforge.ops.row_format import Int4

LENGTH = 2048
STORED = {"bf16": "bf16", "int8": "int8", "fp8": "fp8", "int4": "int4", "int4 first": "int4"}


def perplexity(llm: LLM, windows: list[list[int]]) -> float:
    outputs = llm.generate(windows, SamplingParams(max_tokens=0, prompt_logprobs=0))
    losses = [-entry.logprob for out in outputs for entry in out.prompt_logprobs or [] if entry]
    return math.exp(sum(losses) / len(losses))


def cache_bytes(llm: LLM) -> int:
    """Of one sequence of LENGTH tokens."""
    tables, ids = llm.engine.tables, [0] * LENGTH
    tables.start(-1, ids, reuse=False)
    for length in range(256, LENGTH + 1, 256):
        tables.reserve(-1, length)
        tables.commit(-1, ids, length)
    used = llm.engine.stats().cache_bytes_used
    tables.free(-1)
    tables.forget()
    return used


def main() -> None:
    arguments = parser(__doc__, "benchmarks/kv_cache.json")
    arguments.add_argument("--models", type=Path, nargs="*", default=[], help="conversions of the model")
    arguments.add_argument("--windows", type=int, default=4)
    options = arguments.parse_args()
    original = demo_model.fetch()
    results = Results(options.out, [], resume=True, command=command(), windows=options.windows)
    models = {directory.name: directory for directory in (original, *options.models)}
    keys = [{"model": model, "stored": name} for model in models for name in STORED]
    for key in results.missing(keys):
        directory, name = models[key["model"]], key["stored"]
        stored = STORED[name]
        # int4 is for grouped-query layers.
        if stored != "int4" or directory == original:
            with mock.patch.object(Int4, "whole", Int4.whole | {"first"} if name.endswith("first") else Int4.whole):
                llm = LLM(
                    directory, dtype="bfloat16", device="cpu", kv_cache_dtype=stored, cache_bytes=256 << 20,
                    max_num_seqs=4,
                )  # fmt: skip
            windows = corpus.windows(llm.tokenizer, wikitext(options.data)[1], options.windows, LENGTH).ids.tolist()
            row = {"ppl": perplexity(llm, windows), "bytes": cache_bytes(llm)}
            exact = next((r for r in results.rows if r["model"] == key["model"]), row)
            ratios = {"ppl_ratio": row["ppl"] / exact["ppl"], "bytes_ratio": row["bytes"] / exact["bytes"]}
            results.add({**key, **row, **ratios})


if __name__ == "__main__":
    main()
