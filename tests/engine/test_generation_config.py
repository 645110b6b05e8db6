"""What a model's own files say of generation: which tokens end a text, and what stands for what nobody set.

For every entry point: the engine, `LLM`, the server, `generate` and `chat`.
"""

import json
import shutil

import pytest

from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.engine.llm import LLM
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError
from mlaforge.serving.config import ChatConfig, GenerateConfig
from mlaforge.serving.generate import Conversation, continue_prompt
from support.serving import serving

SMALL = {"device": "cpu", "dtype": "float32", "cache_bytes": 1 << 20}
# The tokenizer's own end is 258; 65 is A, 66 is B.
OWN, A, B = 258, 65, 66


@pytest.fixture
def model(tiny_models, tmp_path):
    """model(generation, config) -> the tiny llama with these two files' fields; None leaves a file out, or a field."""

    def make(generation, config=OWN):
        shutil.copytree(tiny_models["llama"], tmp_path / "model", dirs_exist_ok=True)
        config_json = json.loads((tmp_path / "model" / "config.json").read_text()) | {"eos_token_id": config}
        (tmp_path / "model" / "config.json").write_text(json.dumps(config_json))
        (tmp_path / "model" / "generation_config.json").unlink(missing_ok=True)
        if generation is not None:
            (tmp_path / "model" / "generation_config.json").write_text(json.dumps(generation))
        return tmp_path / "model"

    return make


ENDS = {
    "config.json alone": (None, [A, B], (A, B, OWN), "transformers ends it at 65"),
    "a number": (None, A, (A, OWN), "transformers ends it at 65"),
    "beside other settings": ({"top_p": 1.0}, [A, B], (A, B, OWN), "transformers ends it nowhere"),
    "generation_config.json first": ({"eos_token_id": [A, OWN]}, [B], (A, OWN), None),
    "an empty list": ({"eos_token_id": []}, [B], (B, OWN), "transformers ends it nowhere"),
    "the tokenizer's alone": (None, None, (OWN,), "transformers ends it nowhere"),
    "all agree": (None, OWN, (OWN,), None),
}


@pytest.mark.parametrize("which", ENDS)
def test_ends_of_text(which, model, capsys):
    generation, config, ends, line = ENDS[which]
    llm = LLM(model(generation, config), **SMALL)
    ends_lines = [text for text in capsys.readouterr().err.splitlines() if "a text ends" in text]
    assert llm.engine.eos_token_ids == ends
    assert [line in text for text in ends_lines] == [True] * (line is not None), ends_lines
    # Each ends a text, is suppressed by min_tokens, and ends a constrained text.
    for end in ends:
        likely = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={end: 100.0})
        (output,) = llm.generate("ab", likely)
        assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([end], "stop")
        (output,) = llm.generate("ab", SamplingParams(**{**vars(likely), "min_tokens": 3}))
        assert not set(output.outputs[0].token_ids[:3]) & set(ends)
    (output,) = llm.generate("ab", SamplingParams(regex="[xyz]", max_tokens=5))
    assert output.outputs[0].token_ids[-1] in ends and output.outputs[0].finish_reason == "stop"


def test_logs_missing_end_of_text(model, capsys, monkeypatch):
    directory = model(None, None)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": None}))
    assert LLM(directory, **SMALL).engine.eos_token_ids == ()
    assert "no token ends a text of this model" in capsys.readouterr().err


GENERATION = {"eos_token_id": OWN, "do_sample": True, "temperature": 0.25, "top_k": 7, "top_p": 0.5,
              "repetition_penalty": 1.1, "max_new_tokens": 3}  # fmt: skip
LINE = "generation_config.json sets what requests leave unset: "


def watch(engine, monkeypatch):
    """The parameters of every request from now on."""
    seen, add = [], engine.add
    monkeypatch.setattr(engine, "add", lambda name, ids, params: (seen.append(params), add(name, ids, params)))
    return seen


def of(params):
    return params.temperature, params.top_k, params.top_p, params.repetition_penalty, params.max_tokens


def test_defaults_of_a_script(model, monkeypatch, capsys):
    llm = LLM(model(GENERATION), **SMALL)
    seen = watch(llm.engine, monkeypatch)
    llm.generate("ab")
    llm.chat([{"role": "user", "content": "ab"}])
    # As in vLLM: parameters that are given stand as they are.
    llm.generate("ab", SamplingParams(max_tokens=2))
    assert [*map(of, seen)] == [(0.25, 7, 0.5, 1.1, 3)] * 2 + [(1.0, 0, 1.0, 1.0, 2)]
    assert capsys.readouterr().err.count(LINE) == 1
    llm = LLM(model(GENERATION), **SMALL, generation_config="none")
    assert of(llm.default_params) == (1.0, 0, 1.0, 1.0, 16) and LINE not in capsys.readouterr().err


def test_defaults_of_the_server(model, monkeypatch):
    engine = Engine(model(GENERATION), EngineConfig(**SMALL))
    seen = watch(engine, monkeypatch)
    chat = {"messages": [{"role": "user", "content": "ab"}]}
    explicit = {"temperature": 1, "top_p": 1, "top_k": 0, "repetition_penalty": 1, "max_tokens": 2}
    with serving(engine) as served:
        for path, body in (("/v1/completions", {"prompt": "ab"}), ("/v1/chat/completions", chat)):
            for more in ({}, {"temperature": None, "max_tokens": None}, {"temperature": 0.0}, explicit):
                assert served.post(path, json={**body, **more}).status_code == 200
    defaults = (0.25, 7, 0.5, 1.1, 3)
    assert [*map(of, seen)] == [defaults, defaults, (0.0, *defaults[1:]), (1.0, 0, 1.0, 1.0, 2)] * 2


@pytest.mark.parametrize("has_defaults", [True, False])
def test_defaults_on_the_command_line(has_defaults, model, monkeypatch, capsys):
    """Without generation_config.json `generate` is greedy and `chat` samples with temperature 0.7 and top_p 0.95."""
    options = {**SMALL, "max_new_tokens": 2}
    directory = model(GENERATION if has_defaults else {"eos_token_id": OWN})
    recorded = []
    stream = LLM.stream
    monkeypatch.setattr(
        LLM, "stream", lambda llm, text, params: (recorded.append(params), stream(llm, text, params))[1]
    )
    # Of `generate` the first of two is a token that warms up.
    continue_prompt(directory, GenerateConfig(**options))
    continue_prompt(directory, GenerateConfig(**options, temperature=0.5, top_p=0.9))
    conversations = Conversation(str(directory), ChatConfig(**options)), Conversation(str(directory), ChatConfig(
        **options, temperature=0.0, generation_config="none"
    ))  # fmt: skip
    parameters = [
        of(params) for params in (recorded[1], recorded[3], *(conversation.params for conversation in conversations))
    ]
    if has_defaults:
        rest = (7, 0.5, 1.1, 2)
        expected = [(0.25, *rest), (0.5, 7, 0.9, 1.1, 2), (0.25, *rest), (0.0, 0, 0.95, 1.0, 2)]
    else:
        expected = [(0.0, 0, 1.0, 1.0, 2), (0.5, 0, 0.9, 1.0, 2), (0.7, 0, 0.95, 1.0, 2), (0.0, 0, 0.95, 1.0, 2)]
    assert parameters == expected
    assert (LINE in capsys.readouterr().err) == has_defaults


@pytest.mark.parametrize("wrong", [{"temperature": "hot"}, {"top_p": 0}, {"top_k": 1.5}, {"max_new_tokens": -1}])
def test_rejects_invalid_defaults(wrong, model):
    with pytest.raises(UserError, match=r"^generation_config.json: .* must be .*; or use --generation-config none$"):
        LLM(model(wrong), **SMALL)
    LLM(model(wrong), **SMALL, generation_config="none")
