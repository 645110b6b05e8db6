"""A peer of benchmarks/engine.py in a process of its own: a line of JSON is a command, a line of JSON its answer.

    python benchmarks/engine_peers.py KIND MODEL DTYPE [ROWS]

KIND is mlaforge (whichever checkout PYTHONPATH names), transformers, llama (llama-cpp-python; MODEL is a .gguf) or
vllm, each in an environment that has it; ROWS is mlaforge's kv_cache_dtype. Commands, of prompts as token ids:

    ["prefill", PROMPTS]   seconds until all of them are computed, of which nothing is known yet; they are then known
    ["cache_bytes"]        all bytes of the prompts, and of two tokens more, in mlaforge's cache
    ["steps", COUNT]       seconds between tokens of all of them at once, continued greedily
    ["perplexity", WINDOWS]

Nothing is imported that the peer does not need: an older checkout answers the same commands.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

THREADS = 2
LONGEST = 8192
Prompts = list[list[int]]


def between(times: list[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(times)]


class Mlaforge:
    """The engine, which finds its prompts by prefix reuse."""

    def __init__(self, model: str, dtype: str, *rows: str):
        import torch

        from mlaforge.engine.llm import LLM

        try:
            from mlaforge.engine.sampling.params import SamplingParams
        except ImportError:
            # As the checkout that ratios are to has it.
            from mlaforge.engine.params import SamplingParams  # type: ignore[import-not-found,no-redef]

        torch.set_num_threads(THREADS)
        self._params = SamplingParams
        # An older checkout does not know the option.
        stored = {"kv_cache_dtype": rows[0]} if rows else {}
        self._llm = LLM(model, dtype=dtype, device="cpu", cache_bytes=1 << 31, max_num_seqs=8, **stored)
        self._prompts: Prompts = []

    def prefill(self, prompts: Prompts) -> float:
        self._prompts = prompts
        engine = self._llm.engine
        # Older checkouts have another name.
        (engine.reset_prefix_cache if hasattr(engine, "reset_prefix_cache") else engine.forget)()
        start = time.perf_counter()
        self._llm.generate(prompts, self._params(temperature=0.0, max_tokens=1))
        return time.perf_counter() - start

    def steps(self, count: int) -> list[float]:
        engine, times = self._llm.engine, []
        params = self._params(temperature=0.0, max_tokens=count + 2, ignore_eos=True)
        for index, prompt in enumerate(self._prompts):
            engine.add(f"{index}", prompt, params)
        while engine.has_work:
            # Steps in which all of them decode.
            if len(engine.step()) == len(self._prompts):
                times.append(time.perf_counter())
        return between(times)[:count]

    def cache_bytes(self) -> int:
        engine, used = self._llm.engine, 0
        for index, prompt in enumerate(self._prompts):
            engine.add(f"{index}", prompt, self._params(temperature=0.0, max_tokens=2, ignore_eos=True))
        while engine.has_work:
            engine.step()
            used = max(used, engine.stats().cache_bytes_used)
        return used

    def perplexity(self, windows: Prompts) -> float:
        outputs = self._llm.generate(windows, self._params(max_tokens=0, prompt_logprobs=0))
        losses = [-entry.logprob for out in outputs for entry in out.prompt_logprobs or [] if entry]
        return math.exp(sum(losses) / len(losses))


class Transformers:
    """transformers' generate on a DynamicCache."""

    def __init__(self, model: str, dtype: str):
        import torch

        from mlaforge.bench.transformers_peer import Transformers as Peer

        torch.set_num_threads(THREADS)
        self._peer = Peer(Path(model), model, dtype, torch.device("cpu"))

    def prefill(self, prompts: Prompts) -> float:
        start = time.perf_counter()
        self._peer.prepare(prompts)
        return time.perf_counter() - start

    def steps(self, count: int) -> list[float]:
        times, _ = self._peer.generate(count + 1)
        self._peer.rewind()
        return between(times)


class Llama:
    """llama.cpp, one prompt at a time."""

    def __init__(self, model: str, dtype: str):
        from llama_cpp import llama_cpp as native
        from llama_cpp.llama import Llama as Model

        path = Path(model) if dtype == "stored" else widened(Path(model))
        settings = native.llama_model_default_params()
        # Its AMX kernels end in a segmentation fault with Q4_1 (llama-cpp-python 0.3.36).
        settings.use_extra_bufts = dtype != "stored"
        native.llama_model_default_params = lambda: settings
        self._llm = Model(
            str(path), n_ctx=LONGEST, n_threads=THREADS, n_threads_batch=THREADS, n_gpu_layers=0, verbose=False
        )
        self._length = 0

    def prefill(self, prompts: Prompts) -> float:
        assert len(prompts) == 1, "this peer takes one prompt"
        self._llm.reset()
        start = time.perf_counter()
        self._llm.eval(prompts[0])
        seconds = time.perf_counter() - start
        self._length = len(prompts[0])
        return seconds

    def steps(self, count: int) -> list[float]:
        token, times = 198, []
        for _ in range(count + 1):
            self._llm.eval([token])
            token = self._llm.sample(temp=0.0)
            times.append(time.perf_counter())
        # `eval` writes where the text ends now.
        self._llm.n_tokens = self._length
        return between(times)


def widened(path: Path) -> Path:
    """The same model with its matrices in bf16, beside the peer's own files."""
    import gguf
    import numpy as np

    target = path.with_suffix(".bf16.gguf")
    if target.exists():
        return target
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(target.with_suffix(".partial"), str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind, sub = field.types[0], field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        full = gguf.dequantize(tensor.data, tensor.tensor_type)
        full = np.ascontiguousarray(full.reshape(tuple(int(n) for n in reversed(tensor.shape))), dtype=np.float32)
        if full.ndim == 1:
            writer.add_tensor(tensor.name, full)
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, gguf.quantize(full, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target.with_suffix(".partial").rename(target)
    return target


class Vllm:
    """vLLM's CPU build; a step is the difference of two lengths."""

    def __init__(self, model: str, dtype: str):
        # Else it starts processes of its own.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        # A share of the memory: by itself it wants nearly all, and ends where others hold some.
        self._llm = LLM(
            model, dtype=dtype, max_model_len=LONGEST, max_num_seqs=8, enable_prefix_caching=True,
            gpu_memory_utilization=0.15,
        )  # fmt: skip
        self._prompts: Prompts = []

    def _seconds(self, count: int) -> float:
        asked = [{"prompt_token_ids": ids} for ids in self._prompts]
        start = time.perf_counter()
        self._llm.generate(asked, self._params(temperature=0, max_tokens=count, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - start

    def prefill(self, prompts: Prompts) -> float:
        self._prompts = prompts
        self._llm.reset_prefix_cache()
        return self._seconds(1)

    def steps(self, count: int) -> list[float]:
        first = self._seconds(1)
        return [(self._seconds(1 + count) - first) / count]


PEERS: dict[str, Callable[..., Any]] = {
    "mlaforge": Mlaforge, "transformers": Transformers, "llama": Llama, "vllm": Vllm,
}  # fmt: skip


def main() -> None:
    # No library's name may mean a script beside this one.
    sys.path.pop(0)
    # What libraries print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kind, *words = sys.argv[1:]
    peer = PEERS[kind](*words)
    for line in itertools.chain(['["ready"]'], sys.stdin):
        command, *arguments = json.loads(line)
        answer = getattr(peer, command)(*arguments) if command != "ready" else command
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
