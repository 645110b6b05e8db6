"""Constraints on answers, by OpenAI's and vLLM's names; log probabilities by token id."""

import json
import re

import pytest

from mlaforge.engine.config import EngineConfig
from mlaforge.engine.engine import Engine
from mlaforge.serving.protocol import ChatRequest, CompletionRequest
from mlaforge.serving.wire import ApiError
from support.scripted_engine import ScriptedEngine
from support.serving import serving

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ODD = ["yes", "a.c", "x|y", "(", "\\", "[a]{2}", "a\nb", "$ ^ # & ~ -", "漢🙂"]


@pytest.mark.parametrize(("outputs", "binding"), [
    ({"json": SCHEMA}, {"json_schema": SCHEMA}),
    ({"json": json.dumps(SCHEMA)}, {"json_schema": SCHEMA}),
    ({"regex": "a+", "json": None, "json_object": False, "whitespace_pattern": None}, {"regex": "a+"}),
    ({"json_object": True}, {"json_schema": {"type": "object"}}),
    ({"choice": ["yes", "no"]}, {"regex": "yes|no"}),
], ids=str)  # fmt: skip
def test_vllm_s_structured_outputs(outputs, binding):
    assert CompletionRequest.read({"prompt": "x", "structured_outputs": outputs}).grammars() == [binding]


@pytest.mark.parametrize(("outputs", "word"), [
    ({}, "needs one of json"), ({"json": None}, "needs one of json"), ({"json": SCHEMA, "regex": "a"}, "not 2"),
    ({"choice": []}, "at least 1"), ({"choice": ["a", 1]}, "valid string"), ({"choice": ["a"] * 1025}, "1024"),
    ({"grammar": "root ::= 'a'"}, "grammar is not supported: use"), ({"structural_tag": "{}"}, "structural_tag"),
    ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern"), ({"jsn": SCHEMA}, "needs one of json"),
    ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace"), ("a", "valid dictionary"),
])  # fmt: skip
def test_rejects_invalid_structured_outputs(outputs, word):
    with pytest.raises(ApiError, match=word) as refused:
        CompletionRequest.read({"prompt": "x", "structured_outputs": outputs}).constraint()
    assert refused.value.status == 400 and refused.value.param.split(".")[0] == "structured_outputs"


def test_constraints_exclude_each_other():
    payload = {"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"regex": "a"}}
    text = ChatRequest.read(payload | {"response_format": {"type": "text"}})
    assert text.grammars() == [{"regex": "a"}]
    for other in ({"response_format": {"type": "json_object"}}, {"guided_regex": "b"}):
        with pytest.raises(ApiError, match="exclude each other"):
            ChatRequest.read(payload | other).constraint()


@pytest.fixture(scope="module")
def served(tiny_models):
    pytest.importorskip("llguidance")
    with serving(Engine(tiny_models["llama"], EngineConfig(device="cpu", dtype="float32"))) as served:
        yield served
        served.settles()


def completed(served, **payload):
    body = {"prompt": "x", "max_tokens": 120, **payload}
    return served.post("/v1/completions", json=body).json()["choices"][0]


def test_choices_are_literal_strings(served):
    texts = {completed(served, structured_outputs={"choice": ODD}, seed=seed)["text"] for seed in range(40)}
    assert texts <= set(ODD) and len(texts) > 3


@pytest.mark.parametrize("more", [{}, {"ignore_eos": True}, {"min_tokens": 100}], ids=str)
def test_a_finished_object_ends_the_answer(served, more):
    """A random model rarely ends by itself; the end of the object ends the answer."""
    schema = {**SCHEMA, "properties": {"a": {"enum": [1, 22, 333]}}}
    for seed in range(5):
        choice = completed(served, structured_outputs={"json": schema}, seed=seed, **more)
        assert choice["finish_reason"] == "stop" and json.loads(choice["text"])["a"] in (1, 22, 333)
        assert choice["text"].endswith("}")


def test_line_breaks_do_not_fill_an_answer(served):
    """A logit bias makes line breaks the most likely token."""
    line_break = served.engine.tokenizer("\n")["input_ids"][0]
    choice = completed(
        served, structured_outputs={"json": {**SCHEMA, "properties": {"a": {"enum": [1]}}}},
        logit_bias={str(line_break): 100}, temperature=0,
    )  # fmt: skip
    assert choice["finish_reason"] == "stop" and json.loads(choice["text"]) == {"a": 1}
    assert "\n\n" not in choice["text"]


@pytest.mark.parametrize("pattern", ["\\", "a\\", "\\\\\\"])
def test_rejects_a_trailing_backslash_in_a_regex(served, pattern):
    for payload in ({"regex": pattern}, {"structured_outputs": {"regex": pattern}}):
        served.refused(served.post("/v1/completions", json={"prompt": "x", **payload}), 400, "regex")
    assert completed(served, regex=pattern + "\\")["text"] == re.sub(r"\\\\", r"\\", pattern + "\\")


@pytest.fixture(scope="module")
def scripted(tokenizer):
    with serving(ScriptedEngine(tokenizer)) as served:
        yield served


def test_tokens_as_token_ids(scripted):
    """vLLM's `token_id:N` for every token in log probabilities, full and streamed; nothing else changes."""
    ids = scripted.engine.tokenizer("ab")["input_ids"]
    payload = {"prompt": "ab", "max_tokens": 3, "logprobs": 2, "echo": True}
    generated = [scripted.engine.expected(ids, 0, at) for at in range(3)]
    plain = scripted.post("/v1/completions", json=payload).json()["choices"][0]
    named = scripted.post("/v1/completions", json=payload | {"return_tokens_as_token_ids": True}).json()["choices"][0]
    assert named["logprobs"]["tokens"] == [f"token_id:{token}" for token in [*ids, *generated]]
    for token, top in zip(generated, named["logprobs"]["top_logprobs"][2:], strict=True):
        assert list(top) == [f"token_id:{token}", f"token_id:{(token + 1) % scripted.engine.vocab_size}"]
    for name in ("text_offset", "token_logprobs"):
        assert named["logprobs"][name] == plain["logprobs"][name]
    assert named["text"] == plain["text"]

    payload = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "logprobs": True, "top_logprobs": 1}
    plain = scripted.post("/v1/chat/completions", json=payload).json()["choices"][0]["logprobs"]["content"]
    payload["return_tokens_as_token_ids"] = True
    named = scripted.post("/v1/chat/completions", json=payload).json()["choices"][0]["logprobs"]["content"]
    known = {f"token_id:{token}": token for token in range(scripted.engine.vocab_size)}
    for before, after in zip(plain, named, strict=True):
        assert scripted.service.tokens.text(known[after["token"]]) == before["token"]
        assert after["top_logprobs"][0]["token"] == after["token"] and after["bytes"] == before["bytes"]
    stream = scripted.client().chat.completions.create(
        model="scripted", stream=True, **{k: v for k, v in payload.items() if not k.startswith("return")},
        extra_body={"return_tokens_as_token_ids": True},
    )  # fmt: skip
    streamed = [entry.token for chunk in stream for entry in (chunk.choices[0].logprobs or _none).content]
    assert streamed == [entry["token"] for entry in named]


class _none:
    content = ()
