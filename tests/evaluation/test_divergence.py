"""`eval --teacher`: divergence per token from the original, as a direct computation with both full models gives it."""

import json
import math

import pytest
import torch

from mlaforge.checkpoint import loading, source_model
from mlaforge.data import corpus
from mlaforge.evaluation import perplexity
from mlaforge.evaluation.config import EvalConfig
from mlaforge.runtime import UserError

WINDOWS, LENGTH = 3, 64


@pytest.fixture
def config(tiny_models, evaluation_file):
    return EvalConfig(
        text=str(evaluation_file), windows=WINDOWS, seqlen=LENGTH, device="cpu", teacher=str(tiny_models["llama"])
    )


@pytest.mark.parametrize("options", [{"layout": "latent", "budget": 0.5}, {"layout": None, "bits": 4.0}])
def test_divergence_matches_the_full_models(options, tiny_models, converted, config, cli, tmp_path):
    model = converted("llama", **options)
    metrics = perplexity.run(str(model), tmp_path / "out", config).metrics
    ids = corpus.windows(source_model.load_tokenizer(model), config.text, WINDOWS, LENGTH).ids
    with torch.no_grad():
        student, teacher = (
            loading.load_model(path, "float32")(ids).logits[:, :-1].double().log_softmax(-1)
            for path in (model, tiny_models["llama"])
        )
    kl = (teacher.exp() * (teacher - student)).sum(-1)
    losses, teacher_losses = (-x.gather(-1, ids[:, 1:, None])[..., 0].mean(-1) for x in (student, teacher))
    # The 99th percentile of 189 tokens lies between the second and the third largest value.
    above, below = kl.flatten().sort(descending=True).values[[1, 2]].tolist()
    tail = below + (above - below) * (0.99 * (kl.numel() - 1) % 1)
    expected = {
        "ppl": losses.mean().exp(), "teacher_ppl": teacher_losses.mean().exp(), "kl": kl.mean(), "kl_p99": tail,
        "kl_stderr": kl.mean(-1).std() / math.sqrt(WINDOWS),
        "top1": (student.argmax(-1) == teacher.argmax(-1)).double().mean(),
        "ratio": (losses - teacher_losses).mean().exp(),
        "log_ratio_stderr": (losses - teacher_losses).std() / math.sqrt(WINDOWS),
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == {
        name: pytest.approx(float(value), rel=2e-3) for name, value in expected.items()
    }
    # Without a teacher the same perplexity, and nothing on divergence.
    plain = perplexity.evaluate(str(model), text=config.text, windows=WINDOWS, seqlen=LENGTH, device="cpu").metrics
    assert plain["ppl"] == pytest.approx(metrics["ppl"], rel=1e-6) and plain.keys() & expected.keys() == {"ppl"}
    # A second run reads the result.
    more = ("--text", config.text, "--windows", WINDOWS, "--seqlen", LENGTH, "--device", "cpu")
    done = cli("eval", model, tmp_path / "out", *more, "--teacher", config.teacher)
    assert done.exit_code == 0 and done.stdout == perplexity.table(metrics) + "\n", done.stderr
    assert f"99 % of tokens at most {metrics['kl_p99']:.4f}; equal top tokens {metrics['top1']:.2%}" in done.stdout


def test_a_model_does_not_diverge_from_itself(config):
    metrics = perplexity.run(config.teacher, None, config).metrics
    assert [metrics[name] for name in ("kl", "kl_p99", "top1", "ratio")] == [0, 0, 1, 1]


def test_rejects_a_teacher_with_another_vocabulary(model, config):
    directory = model("llama")
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 512}))
    with pytest.raises(UserError, match="different vocabularies"):
        perplexity.run(str(directory), None, config)
