"""Run in vLLM's environment: serve cases one after another and print one line of JSON for each.

    python vllm_driver.py CASES.json

CASES.json is a list of {name, model, prompts, tokens, rounds, options}; `options` go to vllm.LLM. With one rank the
engine is in this process, so that vLLM is imported once for all cases.
"""

import gc
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
DEFAULTS = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 1 << 26, "disable_log_stats": False,
}  # fmt: skip


def serve(case):
    from vllm import LLM, SamplingParams

    options = {**DEFAULTS, **case.get("options", {})}
    if options.get("tensor_parallel_size", 1) == 1:
        options["distributed_executor_backend"] = "uni"
    llm = LLM(model=case["model"], **options)
    params = SamplingParams(temperature=0, max_tokens=case["tokens"], ignore_eos=True)
    rounds, found = [], []
    for _ in range(case.get("rounds", 1)):
        done = llm.generate([{"prompt_token_ids": ids} for ids in case["prompts"]], params, use_tqdm=False)
        rounds.append([list(each.outputs[0].token_ids) for each in done])
        found.append(sum(each.num_cached_tokens or 0 for each in done))
    counters = {m.name: m.value for m in llm.get_metrics() if "spec_decode" in m.name and hasattr(m, "value")}
    outcome = {"rounds": rounds, "found": found, "counters": counters, "memory": options["kv_cache_memory_bytes"]}
    config = llm.llm_engine.vllm_config.cache_config
    outcome["tokens"], outcome["blocks"] = config.kv_cache_size_tokens, config.num_gpu_blocks
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is not None:
        groups = core.scheduler.kv_cache_config.kv_cache_groups
        outcome["groups"] = [
            {"layers": g.layer_names, "block": g.kv_cache_spec.block_size, "page": g.kv_cache_spec.page_size_bytes,
             "window": getattr(g.kv_cache_spec, "sliding_window", None)}
            for g in groups
        ]  # fmt: skip
    return outcome


def share_a_process(cases):
    """Do once what vLLM does per process, because it expects one engine per process."""
    from vllm import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    from mlaforge.vllm_plugin import model

    load_general_plugins()
    # vLLM would import itself in another process for each class, to look at it. With several ranks it does.
    for name in {json.loads((Path(case["model"]) / "config.json").read_text())["architectures"][0] for case in cases}:
        ModelRegistry.register_model(name, getattr(model, name))
    # The second time it stumbles over what numba, which n-grams need, has left in memory.
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


def main():
    from vllm.distributed import cleanup_dist_env_and_memory

    cases = json.loads(Path(sys.argv[1]).read_text())
    if all(case.get("options", {}).get("tensor_parallel_size", 1) == 1 for case in cases):
        share_a_process(cases)
    for case in cases:
        try:
            outcome = serve(case)
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
        cleanup_dist_env_and_memory()
        print("OUTCOME " + json.dumps({"name": case["name"], **outcome}), flush=True)
    # Do not wait for threads that vLLM leaves running.
    os._exit(0)


if __name__ == "__main__":
    main()
