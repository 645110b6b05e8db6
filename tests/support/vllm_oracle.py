"""Models in vLLM through the plugin, in processes of their own, and the oracle of their tokens (tests/vllm_plugin).

The oracle is transformers on the same checkpoint, teacher-forced: every token that vLLM chose greedily must be the
argmax of transformers' logits, or as good as it: in fp64 the two differ by less than a few of fp32's own rounding
errors there, measured.
"""

import json
import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mlaforge.checkpoint import loading, source_model
from mlaforge.checkpoint import reader as checkpoint_reader
from mlaforge.checkpoint.eagle3 import write_head
from mlaforge.planning.plan import Plan, plan_of
from mlaforge.planning.ranks import Ranks
from support.eagle3_heads import make

PYTHON = os.environ.get("MLAFORGE_VLLM_PYTHON")
MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="MLAFORGE_VLLM_PYTHON names no Python that has vLLM: make test-vllm"),
]
DRIVER = Path(__file__).with_name("vllm_driver.py")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def run(cases, folder, **environment):
    """name -> what the driver printed of each case."""
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        **environment,
    }
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, str(DRIVER), str(file)], capture_output=True, text=True, env={**inherited, **settings}, cwd=folder
    )
    printed = [line.partition("OUTCOME ") for line in done.stdout.splitlines()]
    lines = [json.loads(outcome) for before, mark, outcome in printed if mark and not before]
    assert len(lines) == len(cases), done.stderr[-3000:]
    return {outcome.pop("name"): outcome for outcome in lines}


@torch.no_grad()
def forced(model, text, length):
    """Logits of what follows a prompt of so many tokens. It reads all; what a sparse model has generated does not."""
    if getattr(model.model, "sparsity", None) is None:
        return model(text).logits[0, length - 1 : -1]
    model.model.sparsity.prompts = False
    first = model(text[:, :length], use_cache=True)
    model.model.sparsity.prompts = True
    rest = model(text[:, length:], past_key_values=first.past_key_values).logits
    return torch.cat((first.logits[0, -1:], rest[0, :-1]))


@contextmanager
def perturbed(model, seed):
    """Every hidden state before a layer's projections changes as by fp32's rounding of a sum of as many products as it
    has elements."""
    generator, size = torch.Generator().manual_seed(seed), 2**-24 * model.config.hidden_size**0.5

    def change(module, args, kwargs):
        hidden = kwargs["hidden_states"]
        return args, {**kwargs, "hidden_states": hidden * (1 + size * torch.randn(hidden.shape, generator=generator))}

    hooks = [layer.self_attn.register_forward_pre_hook(change, with_kwargs=True) for layer in model.model.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def coded_faults(model, answers):
    """As `faults`, for coded rows: where rounding moves a number over the border of two codes, logits change by more
    than rounding. Allowed is the largest change that such rounding, three times at random, makes after a prompt."""
    proven_wrong = []
    for prompt, tokens in answers:
        text, chosen = torch.tensor([prompt + tokens]), torch.tensor(tokens)
        logits = forced(model, text, len(prompt))
        gaps = logits.amax(-1) - logits.gather(1, chosen[:, None])[:, 0]
        if not gaps.any():
            continue
        changes = []
        for seed in range(3):
            with perturbed(model, seed):
                changes.append(float((forced(model, text, len(prompt)) - logits).abs().max()))
        proven_wrong += gaps[gaps > max(changes)].tolist()
    return proven_wrong


def faults(directory, prompts, *rounds):
    """Gaps in nats between transformers' best token and vLLM's, in fp64, of all that are no proven near ties. Rounds
    mostly made the same of a prompt, which is judged once."""
    model, exact, proven_wrong = loading.load_model(directory, "float32"), None, []
    answers = {(tuple(p), tuple(m)) for generated in rounds for p, m in zip(prompts, generated, strict=True)}
    if any(getattr(model.config, "mla_code_counts", None) or ()):
        return coded_faults(model, sorted(answers))
    for prompt, tokens in sorted(answers):
        text, chosen = torch.tensor([prompt + tokens]), torch.tensor(tokens)
        with torch.no_grad():
            logits = forced(model, text, len(prompt))
            wrong = (logits.argmax(-1) != chosen).nonzero()[:, 0]
            if not len(wrong):
                continue
            if exact is None:
                exact = loading.load_model(directory, "float32").double()
                # Experts as grouped products have no fp64.
                exact.config._experts_implementation = "eager"
            wide = forced(exact, text, len(prompt))
        for at in wrong.tolist():
            gap = float(wide[at].max() - wide[at, chosen[at]])
            rounding = float((wide[at] - logits[at]).abs().max())
            if gap > 8 * rounding:
                proven_wrong.append(gap)
    return proven_wrong


def head_for(directory, folder):
    """A random EAGLE-3 head for a converted model: it has every third token."""
    config = checkpoint_reader.read_config(directory)
    size, vocabulary = config["hidden_size"], config["vocab_size"]
    layer = {"hidden_size": size, "vocab_size": vocabulary, "num_attention_heads": 4, "head_dim": 32}
    folder.mkdir()
    tokens = list(range(0, vocabulary, 3))
    write_head(make(layer, tokens, target_hidden_size=size, boundaries=(0, 1, 3)), folder, torch.float32)
    return folder


def eagle(folder):
    return {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3}


def edited(directory, out, sinks=True, **changes):
    """A copy with other fields in its config.json, and perhaps with sinks that take nothing."""
    shutil.copytree(directory, out)
    config = checkpoint_reader.read_config(out)
    (out / "config.json").write_text(json.dumps({**config, **changes}))
    if not sinks:
        [shard] = out.glob("*.safetensors")
        tensors = {n: torch.full_like(t, -1e4) if n.endswith("sinks") else t for n, t in load_file(shard).items()}
        save_file(tensors, shard, metadata={"format": "pt"})
    return out


def check_cache(outcome, directory, ranks=1):
    """vLLM's own figures: bytes of a token in the layers that see everything are the plan's to the byte, on each of so
    many ranks that share out tokens; layers with a window beside them take at most twice theirs."""
    config = checkpoint_reader.read_config(directory)
    spec = source_model.read_spec(config)
    plan = plan_of(config, spec)
    plan = Plan(spec, plan.layers, "coded" if plan.stored == "coded" else "fp32", plain="fp32")
    rank = Ranks(ranks, ranks).share(plan)
    layers = [(chosen, layer) for chosen, layer in zip(rank.layers, rank.spec.layers, strict=True)]
    for group in outcome["groups"]:
        planned = sum(
            chosen.cached_bytes(layer, 1, plan.stored_as(chosen))
            for chosen, layer in layers if layer.window == group["window"]
        )  # fmt: skip
        if group is outcome["groups"][0]:
            assert group["page"] == planned * group["block"]
        else:
            assert planned * group["block"] <= group["page"] <= 2 * planned * group["block"]
    assert len(outcome["groups"]) == len({layer.window for layer in spec.layers})
    page = outcome["groups"][0]["page"]
    assert outcome["blocks"] == outcome["memory"] // page
    if len(outcome["groups"]) == 1 and spec.layers[0].window is None:
        # All of the memory, but for less than a block.
        tokens = outcome["blocks"] * outcome["groups"][0]["block"] * ranks
        # vLLM's figure is of requests of the greatest length, in whole blocks of all ranks.
        assert outcome["tokens"] == tokens if ranks == 1 else 0.8 * tokens < outcome["tokens"] <= tokens
        planned = Ranks(ranks, ranks).cache_bytes(plan, tokens)
        assert outcome["memory"] - page < planned <= outcome["memory"]
