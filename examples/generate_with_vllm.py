"""Generate with vLLM from a model that `mlaforge convert` wrote.

Run it with the Python of vLLM's environment, after `pip install --no-deps .` there: vLLM finds the plugin by itself.

    python examples/generate_with_vllm.py OUT
"""

import argparse

from vllm import LLM, SamplingParams


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("out")
    arguments.add_argument("--dtype", default="auto")
    arguments.add_argument("--max-model-len", type=int, default=2048)
    given = arguments.parse_args()

    llm = LLM(model=given.out, dtype=given.dtype, max_model_len=given.max_model_len)
    greedy = SamplingParams(temperature=0.0, max_tokens=16)
    for output in llm.generate(["The capital of France is", "Once upon a time"], greedy):
        print(f"{output.prompt}{output.outputs[0].text}")


# vLLM starts processes that import this file again.
if __name__ == "__main__":
    main()
