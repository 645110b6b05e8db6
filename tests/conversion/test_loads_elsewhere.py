"""Converted checkpoints in a process with transformers and without mlaforge."""

import json
import os
import subprocess
import sys

import torch

from mlaforge.checkpoint import loading


def tokens():
    return torch.randint(0, 250, (1, 12), generator=torch.Generator().manual_seed(3))


# One process per model, forked from a process that has preloaded the slow imports.
CLEAN = """
import importlib.util, json, os, sys
ids, paths, directories = json.loads(sys.argv[1])
sys.path[:0] = paths
assert importlib.util.find_spec("mlaforge") is None, "mlaforge must not be importable here"
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationMixin, PreTrainedModel
from transformers import PreTrainedTokenizerFast

def load(directory, out):
    # trust_remote_code=False: no prompt on stdout, which is for JSON, and no code is run.
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    assert not [name for name in sys.modules if name.startswith("transformers_modules")]
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype=torch.float32)
    x = torch.tensor(ids)
    done = model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=8, min_new_tokens=8, do_sample=False,
                          pad_token_id=0, return_dict_in_generate=True)
    layers = done.past_key_values.layers
    with torch.no_grad():
        logits = model(x).logits
    model.save_pretrained(out)
    again = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(again(x).logits, logits, rtol=0, atol=1e-4)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    return {"class": type(model).__name__, "new": done.sequences[0, x.shape[1]:].tolist(),
            "bytes": sum(t.untyped_storage().nbytes() for layer in layers for t in (layer.keys, layer.values)),
            "cached": done.past_key_values.get_seq_length(), "logits": logits[0, -1, :5].tolist(),
            "decoded": tokenizer.decode(tokenizer("hello", add_special_tokens=False)["input_ids"])}

for directory, out in directories:
    if not (child := os.fork()):
        print(json.dumps([directory, load(directory, out)]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
CASES = [
    ("llama", "latent"),
    ("mistral", "latent_rope"),
    ("qwen2", "latent_rope"),
    ("qwen3", "latent"),
    ("mimo", "latent"),
]


def loaded_elsewhere(directories, folder):
    """Return the results of loading directories, by their names, in an interpreter without site-packages' .pth files,
    which hides an editable install; and what it wrote to stderr."""
    jobs = [(str(directory), str(folder / f"{n}")) for n, directory in enumerate(directories)]
    words = json.dumps([tokens().tolist(), [p for p in sys.path if "site-packages" in p], jobs])
    environment = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", CLEAN, words], capture_output=True, text=True, env=environment, cwd=folder
    )
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')), done.stderr[-3000:]


def test_loads_where_mlaforge_is_not_installed(converted, tmp_path):
    """One test, because one process loads all models."""
    directories = [converted(family, layout, budget=0.5 if layout == "latent" else 0.75) for family, layout in CASES]
    answers, stderr = loaded_elsewhere(directories, tmp_path)
    assert answers.keys() == {*map(str, directories)}, stderr
    for case, directory in zip(CASES, directories, strict=True):
        model, x, answer = loading.load_model(directory), tokens(), answers[str(directory)]
        with torch.no_grad():
            logits = model(x).logits[0, -1, :5]
        torch.testing.assert_close(torch.tensor(answer["logits"]), logits, rtol=1e-5, atol=1e-5, msg=str(case))
        expected = model.generate(
            x, attention_mask=torch.ones_like(x), max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0
        )
        assert answer["new"] == expected[0, 12:].tolist(), case
        assert answer["class"].endswith("MlaForCausalLM") and answer["decoded"] == "hello", case
        cache = json.loads((directory / "manifest.json").read_text())["metrics"]["cache"]
        assert answer["bytes"] == answer["cached"] * cache["mla_bytes_per_token"], case
