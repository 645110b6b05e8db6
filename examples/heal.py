"""Convert MODEL to half of its cache, heal it towards MODEL, and measure it before and after.

Usage:
    python examples/heal.py MODEL OUT HEALING_TEXT OTHER_TEXT
"""

import argparse

from mlaforge import convert, evaluate, heal

arguments = argparse.ArgumentParser()
arguments.add_argument("model")
arguments.add_argument("out")
arguments.add_argument("text", help="file or folder to heal on")
arguments.add_argument("other", help="file or folder that shares nothing with it, to judge on")
arguments.add_argument("--steps", type=int, default=50, help="of 4,096 tokens; a killed run resumes")
arguments.add_argument("--seqlen", type=int, default=512)
given = arguments.parse_args()

healed = f"{given.out}-healed"
convert(given.model, given.out, layout="latent_rope", budget=0.5, seqlen=given.seqlen, eval_windows=0)
heal(given.model, given.out, healed, text=(given.text,), steps=given.steps, seqlen=(given.seqlen,))
for name in (given.model, given.out, healed):
    ppl = evaluate(name, text=given.other, seqlen=given.seqlen).metrics["ppl"]
    print(f"{name}: perplexity {ppl:.3f}")
