"""Converted models in vLLM's CPU build through the plugin: `make test-vllm`.

The oracle of tokens is in tests/support/vllm_oracle.py. Negative controls: a model served without its sinks or windows
must fail it.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import torch

from mlaforge.checkpoint import loading
from mlaforge.conversion import convert
from mlaforge.conversion.config import ConvertConfig
from mlaforge.sparsity import sparsify
from mlaforge.sparsity.config import SparsifyConfig
from support.serving import free_port, name_vllm
from support.tiny_models import save_model, save_packed, save_unpacked
from support.vllm_oracle import MARKS, NGRAM, PYTHON, check_cache, eagle, edited, faults, forced, head_for, run

pytestmark = MARKS
# vLLM's own attention, which draft heads use, takes heads of 32 numbers and more.
WIDE = {"hidden_size": 128, "head_dim": 32}
WINDOWS = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}
SOURCES = {
    "llama": ("llama", {**WIDE, "attention_bias": True}),
    "qwen2": ("qwen2", {"hidden_size": 128, **WINDOWS}),
    "qwen3": ("qwen3", {**WIDE, **WINDOWS}),
    "mistral": ("mistral", WIDE),
    # Its experts on a CPU: multiples of 32 on every rank.
    "gpt_oss": ("gpt_oss", {**WIDE, "intermediate_size": 128, "num_hidden_layers": 4, "swiglu_limit": 7.0}),
}
PACKED = "gpt_oss_packed latent_rope"
# What is served, with which options beside the driver's; `{head}` is a draft head's folder.
PLAIN = ("llama latent", "llama latent_rope", "qwen2 latent", "qwen2 latent_rope", "qwen3 latent", "mistral latent",
         "mistral latent_rope", "gpt_oss latent", "gpt_oss latent_rope", "llama gqa sparse", "llama latent sparse",
         "qwen2 latent_rope sparse", "gpt_oss latent sparse", PACKED, "llama latent coded", "llama latent_rope coded",
         "qwen3 latent coded", "gpt_oss latent coded", "llama latent coded sparse",
         "gpt_oss latent coded sparse")  # fmt: skip
DRAFTED = ("llama latent_rope", "gpt_oss latent", "llama latent coded", "gpt_oss latent coded sparse")
# In bf16 compiled kernels read the rows.
BF16 = {"dtype": "bfloat16"}
ROUNDED = ("llama latent coded", "llama latent_rope", "llama gqa sparse", "gpt_oss latent")
# Prompts of several chunks and of several blocks, and one that repeats itself.
PROMPTS = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (7, 40, 100, 150)]
PROMPTS[1] = PROMPTS[1][:5] * 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, calibration_file):
    """ "family layout" -> a converted tiny model, made once."""
    root, made = tmp_path_factory.mktemp("tiny"), {}

    def get(name):
        family, layout, *kinds = name.split()
        if name not in made and "sparse" in kinds:
            dense = get(name.removesuffix(" sparse"))
            made[name] = root / name.replace(" ", "-")
            settings = {"topk": 40, "width": 16, "sink": 2, "window": 12, "seqlen": 64, "nsamples": 6, "device": "cpu"}
            sparsify.run(str(dense), made[name], SparsifyConfig(text=str(calibration_file), **settings))
        if name not in made:
            source = root / family
            if family == "gpt_oss_packed" and not source.exists():
                save_packed(get("gpt_oss gqa"), source, torch.float32)
            elif not source.exists():
                source.mkdir()
                of, changes = SOURCES[family]
                save_model(source, of, list(SOURCES).index(family), **changes)
            if layout == "gqa":
                return source
            made[name] = root / name.replace(" ", "-")
            settings = {"seqlen": 64, "nsamples": 6, "eval_windows": 0, "device": "cpu", "dense": True}
            settings |= {"bits": 4.0} if "coded" in kinds else {"budget": 0.5}
            config = ConvertConfig(layout=layout, calibration=str(calibration_file), **settings)
            convert.run(str(source), made[name], config)
        return made[name]

    return get


@pytest.fixture(scope="module")
def served(tiny, tmp_path_factory):
    """Every case of one rank, in one process."""
    folder = tmp_path_factory.mktemp("served")
    shared = {"prompts": PROMPTS, "tokens": 24}
    cases = [{"name": name, "model": str(tiny(name)), "rounds": 2, **shared} for name in PLAIN]
    for name in DRAFTED:
        head = head_for(tiny(name), folder / f"head {name}")
        for kind, drafts in (("ngram", NGRAM), ("eagle3", eagle(head))):
            options = {"speculative_config": drafts}
            cases.append(
                {"name": f"{name} {kind}", "model": str(tiny(name)), "rounds": 2, **shared, "options": options}
            )
    full = ["full_attention"] * 4
    for name, model in (
        ("no sinks", edited(tiny("gpt_oss latent"), folder / "no-sinks", sinks=False)),
        ("no window", edited(tiny("gpt_oss latent"), folder / "no-window", layer_types=full)),
        ("no window, llama's shape", edited(tiny("mistral latent"), folder / "no-window-2", sliding_window=None)),
        ("other experts", edited(tiny("gpt_oss latent"), folder / "other", swiglu_limit=9.0)),
        ("all read", edited(tiny("llama latent sparse"), folder / "all-read", index_topk=1000)),
    ):
        cases.append({"name": name, "model": str(model), **shared})
    for name in ROUNDED:
        cases.append({"name": f"{name} bf16", "model": str(tiny(name)), **shared, "options": BF16})
    fp8 = {"kv_cache_dtype": "fp8"}
    cases.append({"name": "unpacked", "model": str(save_unpacked(tiny(PACKED), folder / "unpacked")), **shared})
    cases.append({"name": "fp8 cache", "model": str(tiny("llama latent")), **shared, "options": fp8})
    transfer = {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}
    cases.append({"name": "transfer", "model": str(tiny("llama latent coded")), **shared, "options": transfer})
    return run(cases, folder)


@pytest.mark.parametrize("name", PLAIN)
def test_tokens_match_transformers(name, served, tiny):
    """Chunked prefill, several requests at once, and the second time from cached prefixes."""
    outcome = served[name]
    assert faults(tiny(name), PROMPTS, outcome["rounds"][0]) == []
    assert outcome["rounds"][1] == outcome["rounds"][0]
    assert outcome["found"][0] == 0 and outcome["found"][1] >= 128


@pytest.mark.parametrize("name", ROUNDED)
def test_bf16(name, served, tiny):
    check_rounded(tiny(name), served[f"{name} bf16"])


def check_rounded(directory, outcome):
    """Tokens are as good as transformers': two logits may be off by as much as its own in bf16 and fp32 differ after a
    prompt."""
    wide, narrow = (loading.load_model(directory, dtype) for dtype in ("float32", "bfloat16"))
    for prompt, tokens in zip(PROMPTS, outcome["rounds"][0], strict=True):
        text, chosen = torch.tensor([prompt + tokens]), torch.tensor(tokens)
        logits, rounded = (forced(model, text, len(prompt)).float() for model in (wide, narrow))
        gaps = logits.amax(-1) - logits.gather(1, chosen[:, None])[:, 0]
        assert float(gaps.max()) <= 2 * float((logits - rounded).abs().max())


def test_packed_experts_give_the_tokens_of_unpacked_ones(served):
    """Unpacking is exact in fp32, so that all that follows is the same."""
    assert served[PACKED]["rounds"][0] == served["unpacked"]["rounds"][0]


@pytest.mark.parametrize("name", PLAIN)
def test_the_cache_is_the_plan_s(name, served, tiny):
    check_cache(served[name], tiny(name))


@pytest.mark.parametrize("kind", ["ngram", "eagle3"])
@pytest.mark.parametrize("name", DRAFTED)
def test_speculation_changes_no_token(name, kind, served, tiny):
    outcome = served[f"{name} {kind}"]
    assert faults(tiny(name), PROMPTS, *outcome["rounds"]) == []
    # Random models repeat nothing, so that here nearly all drafts are wrong; the real ones' n-grams are accepted.
    assert outcome["counters"]["vllm:spec_decode_num_drafts"] > 20


@pytest.mark.parametrize(("name", "of"), [
    ("no sinks", "gpt_oss latent"), ("no window", "gpt_oss latent"), ("no window, llama's shape", "mistral latent"),
    ("all read", "llama latent sparse"),
])  # fmt: skip
def test_removing_sinks_or_windows_changes_tokens(name, of, served, tiny):
    assert max(faults(tiny(of), PROMPTS, served[name]["rounds"][0]), default=0.0) > 0.1


def test_unsupported_configurations_are_rejected(served):
    assert "swiglu_limit = 9.0" in served["other experts"]["error"]
    assert "--kv-cache-dtype fp8" in served["fp8 cache"]["error"]
    assert "KV connector ExampleConnector is not supported" in served["transfer"]["error"]


def test_vllm_has_what_the_plugin_touches():
    command = [PYTHON, "-m", "mlaforge.vllm_plugin.internals"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert done.stdout.splitlines()[-1:] == ["nothing is missing"], done.stdout + done.stderr[-2000:]


def test_two_ranks(tiny, tmp_path):
    """Heads are shared out, latents are on both. Two KV heads: the cache of `gqa` layers halves per rank."""
    names = ("llama latent_rope", "gpt_oss latent", PACKED, "llama latent coded sparse", "llama gqa sparse",
             "gpt_oss latent coded sparse")  # fmt: skip
    options = {"tensor_parallel_size": 2}
    cases = [
        {"name": name, "model": str(tiny(name)), "prompts": PROMPTS, "tokens": 16, "options": options} for name in names
    ]
    for name, outcome in run(cases, tmp_path).items():
        assert faults(tiny(name), PROMPTS, outcome["rounds"][0]) == []


SHARDED = ("llama latent coded", "qwen3 latent", "gpt_oss latent coded", PACKED)


def test_ranks_share_out_tokens(tiny, tmp_path):
    """--decode-context-parallel-size: chunked prefill, prefix cache, drafts of n-grams. A rank caches what the plan
    says: every second token, but for those in a window."""
    options = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "block_size": 32}
    shared = {"prompts": PROMPTS, "tokens": 16, "rounds": 2}
    cases = [{"name": name, "model": str(tiny(name)), **shared, "options": options} for name in SHARDED]
    for name, changes in (("llama latent_rope", {"speculative_config": NGRAM}), ("llama latent_rope bf16", BF16)):
        of = str(tiny("llama latent_rope"))
        cases.append({"name": name, "model": of, **shared, "options": {**options, **changes}})
    outcomes = run(cases, tmp_path)
    check_rounded(tiny("llama latent_rope"), outcomes.pop("llama latent_rope bf16"))
    for name, outcome in outcomes.items():
        assert faults(tiny(name), PROMPTS, *outcome["rounds"]) == []
        check_cache(outcome, tiny(name), ranks=2)
        assert outcome["found"][0] == 0 and outcome["found"][1] >= 128
    assert outcomes["llama latent_rope"]["counters"]["vllm:spec_decode_num_drafts"] > 20


@pytest.mark.parametrize("name", ["llama latent_rope", PACKED])
def test_the_command_serves(name, tiny, tmp_path):
    """`vllm serve OUT` as a user starts it: compiled, all processes, chunked prefill, default blocks, OpenAI's API."""
    directory, port = tiny(name), free_port()
    command = [Path(PYTHON).with_name("vllm"), "serve", directory, "--port", port, "--max-model-len", 256,
               "--max-num-batched-tokens", 64, "--dtype", "float32"]  # fmt: skip
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    own["PYTHONPATH"] = name_vllm(tmp_path / "named")
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            list(map(str, command)), env={**os.environ, **own}, stdout=log, stderr=log, cwd=tmp_path,
            start_new_session=True,
        )  # fmt: skip
    try:
        asked = {"model": str(directory), "prompt": PROMPTS, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        body = json.dumps({**asked, "return_token_ids": True}).encode()
        while True:
            assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
            try:
                request = Request(f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"})
                with urlopen(request, timeout=600) as reply:
                    choices = json.load(reply)["choices"]
                break
            except URLError:
                # It is not listening yet.
                time.sleep(2)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
    assert faults(directory, PROMPTS, [choice["token_ids"] for choice in choices]) == []
    assert ("experts were unpacked" in (tmp_path / "log").read_text()) == (name == PACKED)
