"""Train an EAGLE-3 draft head on what MODEL itself says, and decode with it.

    python examples/draft.py MODEL HEAD PROMPTS.jsonl

PROMPTS.jsonl has a line {"turns": ["a question"]} for each prompt.
"""

import argparse
import subprocess
import sys

from mlaforge import LLM, SamplingParams

arguments = argparse.ArgumentParser()
arguments.add_argument("model")
arguments.add_argument("head")
arguments.add_argument("prompts")
arguments.add_argument("--tokens", default="256", help="longest answer")
arguments.add_argument("--vocabulary", default="8192", help="tokens that the head can propose")
arguments.add_argument("--steps", default="1000")
given = arguments.parse_args()


def draft(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "mlaforge", "draft", *words], check=True)


text, vocabulary = f"{given.head}-text", f"{given.head}-vocabulary"
draft("regenerate", given.model, "--prompts", given.prompts, "--out", text, "--max-new-tokens", given.tokens)
draft("vocab", given.model, text, "--size", given.vocabulary, "--out", vocabulary)
draft("train", given.model, "--text", text, "--vocabulary", vocabulary, "--steps", given.steps, "--out", given.head)

llm = LLM(given.model, speculative=given.head)
(output,) = llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=64))
print(output.outputs[0].text)
print(f"{llm.engine.stats().speculation.block()['mean_acceptance_length']:.2f} tokens a step")
