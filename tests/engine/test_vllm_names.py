"""vLLM's names of options: each gives the same config as mlaforge's, or one line that says what is right."""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mlaforge.cli.main import app
from mlaforge.config import other_names, resolve
from mlaforge.drafting.config import RegenerateConfig
from mlaforge.engine import vllm_names
from mlaforge.engine.config import EngineConfig
from mlaforge.engine.llm import LLM
from mlaforge.runtime import UserError
from mlaforge.serving.config import ChatConfig, GenerateConfig, ServeConfig

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
NGRAM = {"method": "ngram", "num_speculative_tokens": 8}
HEAD = {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 3}

# Config class, vLLM's spelling, mlaforge's spelling.
EQUAL = [
    (EngineConfig, {"enable_prefix_caching": False}, {"prefix_caching": False}),
    (EngineConfig, {"kv_cache_memory_bytes": 1 << 20}, {"cache_bytes": 1 << 20}),
    (EngineConfig, {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8"}),
    (EngineConfig, {"kv_cache_dtype": "bfloat16"}, {"kv_cache_dtype": "bf16"}),
    (EngineConfig, {"dtype": "half"}, {"dtype": "float16"}),
    (EngineConfig, {"dtype": "float"}, {"dtype": "float32"}),
    (EngineConfig, {"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
    (EngineConfig, {"generation_config": "vllm"}, {"generation_config": "none"}),
    (EngineConfig, {"speculative_config": NGRAM}, {"speculative": "ngram", "num_speculative_tokens": 8}),
    (EngineConfig, {"speculative_config": {"model": "ngram", "method": None}}, {"speculative": "ngram"}),
    (EngineConfig, {"speculative_config": HEAD}, {"speculative": "HEAD", "num_speculative_tokens": 3}),
    (EngineConfig, {"speculative_config": json.dumps(HEAD)}, {"speculative": "HEAD", "num_speculative_tokens": 3}),
    (EngineConfig, {"speculative_config": {"model": "HEAD", "draft_tensor_parallel_size": 1}}, {"speculative": "HEAD"}),
    (EngineConfig, {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}, {}),
    (EngineConfig, {"enforce_eager": False, "enable_chunked_prefill": True, "trust_remote_code": False}, {}),
    (ServeConfig, {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}, {"tool_call_parser": "hermes"}),
    *((config, {"max_tokens": 8}, {"max_new_tokens": 8}) for config in (GenerateConfig, ChatConfig, RegenerateConfig)),
]

# vLLM's spelling, a part of the line that refuses it.
REFUSED = [
    ({"gpu_memory_utilization": 0.9}, "= 0.9 is not supported: it is a share of all memory, .* give cache_fraction, "),
    ({"tensor_parallel_size": 2}, "= 2 is not supported: the engine runs on one device; vLLM with this package's plu"),
    ({"pipeline_parallel_size": 2}, "the engine runs on one device"),
    ({"data_parallel_size": 2}, "the engine runs on one device"),
    ({"quantization": "awq"}, "= 'awq' is not supported: dtype int8 or int4 quantizes the weights"),
    ({"enforce_eager": True}, "CUDA graphs cannot be switched off; leave it out$"),
    ({"enable_chunked_prefill": False}, "long prompts are always computed in chunks"),
    ({"trust_remote_code": True}, "code of a checkpoint never runs"),
    ({"chat_template": "t.jinja"}, "the template is the model's, in MODEL/chat_template.jinja"),
    ({"seed": 1}, "requests have their own seeds"),
    ({"spec_method": "ngram"}, "give speculative_config, or speculative and num_speculative_tokens"),
    ({"spec_model": "HEAD"}, "give speculative_config"),
    ({"spec_tokens": 3}, "give speculative_config"),
    ({"enable_auto_tool_choice": False}, "tool_call_parser none leaves calls in the text"),
    ({"speculative_config": "ngram"}, "^speculative_config is not JSON .* give a mapping such as {"),
    ({"speculative_config": [NGRAM]}, "must be a mapping such as {"),
    ({"speculative_config": {}}, "model must be the directory of a draft head, or method must be ngram"),
    ({"speculative_config": {"method": "eagle3"}}, "model must be the directory of a draft head"),
    ({"speculative_config": {"method": "eagle3", "model": "ngram"}}, "model must be the directory of a draft head"),
    ({"speculative_config": {**HEAD, "method": "eagle"}}, "method 'eagle' is not supported; use ngram, or eagle3"),
    ({"speculative_config": {**NGRAM, "model": "HEAD"}}, "method ngram needs no model, and model is 'HEAD'"),
    ({"speculative_config": {**NGRAM, "prompt_lookup_max": 5}}, "prompt_lookup_max = 5 .*newest 4, else 3, else 2 tok"),
    ({"speculative_config": {**NGRAM, "prompt_lookup_min": 2}}, "prompt_lookup_min = 2 is not supported"),
    ({"speculative_config": {**HEAD, "draft_tensor_parallel_size": 2}}, "draft_tensor_parallel_size = 2 is not suppor"),
    ({"speculative_config": {**HEAD, "quantization": "fp8"}}, "'quantization' is not supported; use method, model"),
    ({"speculative_config": {**HEAD, "num_speculative_tokens": 9}}, "num_speculative_tokens = 9 must be at least 1"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype = 'fp8_e5m2' must be one of auto, "),
    ({"max_model_len": "auto"}, "max_model_len = 'auto' must be a whole number"),
    # An option by two names.
    ({"speculative_config": NGRAM, "speculative": "none"}, "^speculative_config sets speculative, which is given too"),
    ({"enable_prefix_caching": True, "prefix_caching": True}, "sets prefix_caching, which is given too; give one of"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "theirs", "ours"), EQUAL, ids=str)
def test_equal_to_mlaforges_spelling(config, theirs, ours, tmp_path):
    assert resolve(config, **theirs) == resolve(config, **ours)
    if not any(isinstance(value, torch.dtype) for value in theirs.values()):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(json.dumps(theirs))
        assert resolve(config, recipe) == resolve(config, **ours)


@pytest.mark.parametrize(("theirs", "message"), REFUSED, ids=str)
def test_refused_in_one_line(theirs, message, tmp_path):
    with pytest.raises(UserError, match=message) as refused:
        resolve(ServeConfig, **theirs)
    assert "\n" not in str(refused.value)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(theirs))
    with pytest.raises(UserError, match=rf"^recipe {re.escape(str(recipe))}: ") as refused:
        resolve(ServeConfig, recipe)
    assert "\n" not in str(refused.value)


def test_every_name_is_tested_and_documented():
    names = set(vllm_names.GENERATION) | set(vllm_names.SERVER)
    tested = {name for _, theirs, _ in EQUAL for name in theirs} | {name for theirs, _ in REFUSED for name in theirs}
    assert names <= tested
    section = PAGE.read_text(encoding="utf-8").partition("## vLLM's names in mlaforge")[2].partition("\n## ")[0]
    assert names | {*vllm_names.SPECULATIVE} <= set(re.findall(r"`([a-z_]+)`", section))


def test_an_option_of_the_command_takes_precedence():
    """`generate` has a seed, which is the request's."""
    assert "seed" not in other_names(GenerateConfig) and resolve(GenerateConfig, seed=3).seed == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "--max-tokens", "0"], "max_new_tokens = 0 must be at least 1"),
        (["serve", "--tensor-parallel-size", "2"], "tensor_parallel_size = 2 is not supported"),
        (["serve", "--enforce-eager"], "enforce_eager = True is not supported"),
        (["serve", "--speculative-config", json.dumps({"method": "mtp"})], "method 'mtp' is not supported"),
        (["serve", "--no-enable-prefix-caching", "--prefix-caching"], "enable_prefix_caching sets prefix_caching"),
    ],
    ids=str,
)  # fmt: skip
def test_on_the_command_line(words, message, tiny_models):
    done = CliRunner().invoke(app, [words[0], str(tiny_models["llama"]), *words[1:]])
    assert done.exit_code == 2
    assert re.fullmatch(rf"mlaforge: .*{message}.*\n", done.stderr)
    # Help lists mlaforge's names only.
    help_text = CliRunner().invoke(app, [words[0], "--help"]).stdout
    assert "--max-tokens" not in help_text and "--speculative-config" not in help_text


def test_generates_by_vllms_names(tiny_models):
    options = {"device": "cpu", "dtype": "float", "kv_cache_memory_bytes": 1 << 20, "tensor_parallel_size": 1}
    llm = LLM(str(tiny_models["llama"]), speculative_config=NGRAM, enable_prefix_caching=False, **options)
    config = llm.engine.config
    assert (config.speculative, config.num_speculative_tokens, config.cache_bytes) == ("ngram", 8, 1 << 20)
    assert not config.prefix_caching
    with pytest.raises(UserError, match=r"^dtype is given beside a config; put it into the config$"):
        LLM(tiny_models["llama"], config=config, dtype="float32")
    with pytest.raises(UserError, match=r"^unknown key 'enforce_eagre'"):
        LLM(tiny_models["llama"], enforce_eagre=True)
