"""Unusual model directories of other tools: every command gives transformers' logits, or refuses them by name."""

import json

import pytest
import torch
import transformers

from mlaforge.checkpoint import loading
from mlaforge.checkpoint.source_model import SourceModel
from support.engine_driver import prompt_logprobs
from support.odd_folders import REFUSED, SOUND

IDS = torch.randint(0, 250, (40,), generator=torch.Generator().manual_seed(0)).tolist()


@torch.no_grad()
def logits(model):
    return model(torch.tensor([IDS])).logits[0].float()


@pytest.fixture(scope="module", params=SOUND)
def sound(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    SOUND[request.param](directory)
    return directory


@pytest.fixture(scope="module")
def expected(sound):
    """transformers' logits of the directory."""
    return logits(transformers.AutoModelForCausalLM.from_pretrained(sound, dtype=torch.float32).eval())


def test_logits_are_those_of_transformers(sound, expected):
    torch.testing.assert_close(logits(loading.load_model(sound, "float32")), expected, atol=1e-3, rtol=1e-3)
    expected_logprobs = expected[:-1].log_softmax(-1)[range(len(IDS) - 1), IDS[1:]]
    torch.testing.assert_close(prompt_logprobs(sound, IDS), expected_logprobs, atol=1e-3, rtol=1e-3)


def test_conversion_at_full_rank_preserves_the_logits(sound, expected, converts, tmp_path):
    converts(sound, tmp_path / "out", "--budget", 1.0, "--layout", "latent")
    torch.testing.assert_close(logits(loading.load_model(tmp_path / "out", "float32")), expected, atol=1e-3, rtol=1e-3)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    stored = "lm_head.weight" in set(SourceModel.open(tmp_path / "out").weights())
    assert config["tie_word_embeddings"] is not stored


@pytest.mark.parametrize("kind", ["a head of its own, said to be tied", "RoPE in two places"])
def test_an_export_has_the_logits_of_what_it_exports(kind, converts, cli, tmp_path):
    (tmp_path / "model").mkdir()
    SOUND[kind](tmp_path / "model")
    converts(tmp_path / "model", tmp_path / "mla", "--budget", 0.75, "--deepseek-style", "--qk-rope-head-dim", 16)
    done = cli("export", "deepseek", tmp_path / "mla", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    converted = loading.load_model(tmp_path / "mla", "float32")
    torch.testing.assert_close(logits(exported), logits(converted), atol=1e-3, rtol=1e-3)


def test_other_commands_accept_odd_folders(sound, cli, evaluation_file, tmp_path):
    for words in (
        ("eval", sound, "--text", evaluation_file, "--seqlen", 64, "--windows", 2),
        ("generate", sound, "--prompt", "A", "--max-new-tokens", 4, "--dtype", "float32"),
        ("plan", sound),
    ):
        done = cli(*words)
        assert done.exit_code == 0, done.stderr


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("verb", ["convert", "generate"])
def test_other_folders_are_refused_by_name(kind, verb, refused, short, tmp_path):
    make, words = REFUSED[kind]
    (tmp_path / "model").mkdir()
    make(tmp_path / "model")
    more = (tmp_path / "out", *short) if verb == "convert" else ("--dtype", "float32")
    refused(words, verb, tmp_path / "model", *more)
