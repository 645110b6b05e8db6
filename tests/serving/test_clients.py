"""Third-party clients of `mlaforge serve`: lm-eval and vLLM's serving benchmark.

Both are installed in separate environments:

    python3.11 -m venv ENV && ENV/bin/pip install -c constraints.txt torch
    ENV/bin/pip install -c constraints.txt "lm-eval[api]" transformers
    MLAFORGE_LM_EVAL=ENV/bin/lm_eval MLAFORGE_VLLM=VLLM_ENV/bin/vllm pytest -m slow tests/serving/test_clients.py
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from mlaforge.checkpoint import source_model
from support.served_process import served_process
from support.serving import name_vllm
from support.tiny_models import load_original

TASKS = Path(__file__).with_name("lm_eval")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["tiny", "smollm2"])
def served(request, tiny_models, tmp_path_factory):
    """(model's directory, url) of `mlaforge serve` in a subprocess, in fp32."""
    directory = tiny_models["llama"] if request.param == "tiny" else request.getfixturevalue("smollm2")
    with served_process(directory, tmp_path_factory.mktemp("serve") / "log") as url:
        yield directory, url


def executable(variable):
    path = os.environ.get(variable)
    if path is None:
        pytest.skip(f"{variable} names no executable (docs/serving.md, Real clients)")
    return path


def run(command, **environment):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], env={**env, **environment}, cwd=TASKS, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


class Oracle:
    """Answers of transformers to the prompts of lm-eval."""

    def __init__(self, directory):
        self.model = load_original(directory)
        self.tokenizer = source_model.load_tokenizer(directory)

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def score(self, ids, start):
        """Return the log probability of ids[start:], and whether greedy generation gives them."""
        logprobs_TV = self.model(torch.tensor([ids])).logits[0, start - 1 : -1].double().log_softmax(-1)
        labels = torch.tensor(ids[start:])
        token_logprobs_T = logprobs_TV.gather(1, labels[:, None])[:, 0]
        return token_logprobs_T.sum().item(), bool((logprobs_TV.argmax(-1) == labels).all())

    def greedy(self, text, tokens, stops):
        ids = self.ids(text)
        out = self.model.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False)
        text = self.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
        return min((text.split(stop)[0] for stop in stops), key=len)


@pytest.mark.parametrize("tokenized", [True, False])
def test_lm_eval_measures_what_transformers_measures(served, tokenized, tmp_path):
    """Log probabilities of choices and of whole texts to 1e-3, greedy texts exactly."""
    lm_eval = executable("MLAFORGE_LM_EVAL")
    directory, url = served
    model_args = {
        "model": "m", "base_url": f"{url}/v1/completions", "tokenizer": directory, "tokenized_requests": tokenized,
        "max_length": 512,
    }  # fmt: skip
    run(
        [
            lm_eval, "--model", "local-completions", "--model_args",
            ",".join(f"{k}={v}" for k, v in model_args.items()),
            "--include_path", ".", "--tasks", "six_choice,six_generated,six_rolling", "--log_samples",
            "--output_path", tmp_path / "out",
        ],
        HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "home"),
    )  # fmt: skip
    oracle = Oracle(directory)
    docs = [json.loads(line) for line in (TASKS / "gsm8k_six.jsonl").read_text().splitlines()]
    tasks = ("six_choice", "six_generated", "six_rolling")
    samples = [sorted(_samples(tmp_path / "out", task), key=lambda sample: sample["doc_id"]) for task in tasks]
    assert [len(task_samples) for task_samples in samples] == [len(docs)] * 3
    worst = 0.0
    for doc, choice, generated, rolling in zip(docs, *samples, strict=True):
        prompt = f"Question: {doc['question']}\nAnswer:"
        for text, (logprob, greedy) in zip(doc["choices"], (resps[0] for resps in choice["resps"]), strict=True):
            expected, is_greedy = oracle.score(oracle.ids(f"{prompt} {text}"), len(oracle.ids(prompt)))
            worst = max(worst, abs(float(logprob) - expected))
            assert str(greedy) == str(is_greedy)
        first = oracle.tokenizer.bos_token_id
        expected, _ = oracle.score([first, *oracle.ids(doc["solution"])], 1)
        logprob = rolling["resps"][0][0]
        worst = max(worst, abs(float(logprob[0] if isinstance(logprob, list) else logprob) - expected))
        assert generated["resps"][0][0] == oracle.greedy(prompt, 24, ["\n\n", "Question:"])
    print(f"largest difference of a log probability: {worst:.1e}")
    assert worst < 1e-3


def _samples(folder, task):
    [path] = folder.rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    "endpoint", [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")], ids=lambda pair: pair[0]
)
def test_vllm_bench_serve_loses_no_request(served, endpoint, tmp_path):
    vllm = executable("MLAFORGE_VLLM")
    directory, url = served
    run(
        [
            vllm, "bench", "serve", "--backend", endpoint[0], "--endpoint", endpoint[1], "--base-url", url,
            "--model", "m", "--tokenizer", directory, "--dataset-name", "random", "--num-prompts", "16",
            "--random-input-len", "64", "--random-output-len", "16", "--ignore-eos",
            "--save-result", "--result-dir", tmp_path, "--result-filename", "result.json",
        ],
        HF_HUB_OFFLINE="1", PYTHONPATH=name_vllm(tmp_path),
    )  # fmt: skip
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (16, 0)
    assert result["total_output_tokens"] == 16 * 16
