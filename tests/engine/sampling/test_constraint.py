"""Grammars: for any logits, the text matches its grammar and ends only where the grammar may end."""

import json
import re
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaforge.checkpoint.source_model import load_tokenizer
from mlaforge.engine.sampling.constraint import Constraint
from mlaforge.engine.sampling.grammar import Grammars
from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.engine.sampling.sampler import Sampler
from mlaforge.engine.sampling.state import SamplingState
from mlaforge.runtime import UserError

EOS = 258
# The model's logits are wider than the tokenizer's 259 tokens, as padded vocabularies are.
WIDTH = 300
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "grün", "blue"]},
        "at": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}},
            "required": ["x", "on"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
    },
    "required": ["colour", "at", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tiny_models):
    return load_tokenizer(tiny_models["llama"])


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, [EOS])


@pytest.fixture(scope="module")
def constrained(grammars):
    """(parameters) -> the constraint of a continuation, checked; None where nothing is asked."""
    followed = []

    def constrain(params, grammars=grammars):
        grammars.check(params)
        if params.regex is None and params.json_schema is None:
            return None
        followed.append(Constraint(grammars, params))
        return followed[-1]

    yield constrain
    for constraint in followed:
        constraint.close()


def fits(value):
    """`value` is an instance of SCHEMA."""
    at, tags = value["at"], value["tags"]
    return (
        set(value) == {"colour", "at", "tags"}
        and value["colour"] in ("red", "grün", "blue")
        and set(at) == {"x", "on"}
        and type(at["x"]) is int
        and 0 <= at["x"] <= 99
        and type(at["on"]) is bool
        and len(tags) <= 3
        and all(isinstance(tag, str) and len(tag) <= 4 for tag in tags)
    )


def generate(tokenizer, constrained, seed, **params):
    """Random logits through the sampler until the end of text, which is left out."""
    sampling_params = SamplingParams(max_tokens=None, seed=seed, **params)
    constraint = constrained(sampling_params)
    state = SamplingState(sampling_params, [1], WIDTH, [EOS], "cpu", constraint)
    noise = torch.Generator().manual_seed(seed)
    for _ in range(600):
        logits = torch.randn(1, WIDTH, generator=noise) * 3
        # What the model would rather say is never allowed: padding of the vocabulary.
        logits[0, 259:] = 50.0
        token = int(Sampler()(logits, [state]).token_ids)
        state.append([token])
        if token == EOS:
            assert constraint.finished
            return tokenizer.decode(state.token_ids[:-1])
    raise AssertionError(f"no end: {tokenizer.decode(state.token_ids)}")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_schema(tokenizer, seed, temperature, constrained):
    schema = json.dumps(SCHEMA) if seed % 2 else SCHEMA
    assert fits(json.loads(generate(tokenizer, constrained, seed, temperature=temperature, json_schema=schema)))


@pytest.mark.parametrize("regex", [r"(ja|nein|vielleicht)", r"[a-f]{3,8}(-[0-9]{2})*", r"é+ü", r"a?"])
def test_regex(tokenizer, regex, constrained):
    for seed in range(4):
        assert re.fullmatch(regex, generate(tokenizer, constrained, seed, regex=regex))


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def allowed(constraint):
    return constraint.mask(WIDTH).nonzero()[:, 0].tolist()


def test_the_end_is_allowed_only_where_the_grammar_may_end(tokenizer, constrained):
    constraint = constrained(SamplingParams(regex="ab?"))
    (a,), (b,) = ids(tokenizer, "a"), ids(tokenizer, "b")
    assert allowed(constraint) == [a] and not constraint.finished
    constraint.advance([a])
    assert allowed(constraint) == sorted([b, EOS]) and not constraint.finished
    constraint.advance([b])
    assert allowed(constraint) == [EOS] and constraint.finished
    constraint.advance([EOS, EOS])
    assert allowed(constraint) == [EOS] and constraint.finished
    with pytest.raises(AssertionError, match="after the end of the text"):
        constraint.advance([a])


def test_several_ends_and_one_that_the_tokenizer_lacks(tokenizer, constrained):
    constraint = constrained(SamplingParams(regex="a"), Grammars(tokenizer, [EOS, 256, 100_000]))
    constraint.advance(ids(tokenizer, "a"))
    assert allowed(constraint) == [256, EOS]
    assert constraint.mask().shape == (259,) and constraint.mask(257).sum() == 1


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 40))
def test_any_walk_of_allowed_tokens(constrained, seed, steps):
    """One by one they lead where they lead at once."""
    choose = torch.Generator().manual_seed(seed)
    params = SamplingParams(json_schema=SCHEMA)
    walked, path = constrained(params), []
    for _ in range(steps):
        options = allowed(walked)
        path.append(options[int(torch.randint(len(options), (), generator=choose))])
        walked.advance(path[-1:])
    fresh = constrained(params)
    fresh.advance(path)
    assert allowed(fresh) == allowed(walked) and fresh.finished == walked.finished


def test_state_advances_its_constraint(tokenizer, constrained):
    params = SamplingParams(regex="[ab]{3}")
    state = SamplingState(params, [1], WIDTH, [EOS], "cpu", constrained(params))
    assert state.allowed().nonzero()[:, 0].tolist() == sorted(ids(tokenizer, "ab"))
    state.append([*ids(tokenizer, "aba"), EOS])
    assert state.allowed().nonzero().tolist() == [[EOS]]


def test_disallowed_token_fails_the_grammar(tokenizer, constrained):
    constraint = constrained(SamplingParams(regex="abc"))
    constraint.advance(ids(tokenizer, "ax"))
    with pytest.raises(UserError, match="it does not allow token"):
        constraint.mask()


def test_grammar_takes_precedence_over_min_tokens(tokenizer, constrained):
    """The end is held back while the grammar allows anything else, and never leaves a row without a token."""
    params = SamplingParams(regex="ab?", min_tokens=5, temperature=0)
    state = SamplingState(params, [1], WIDTH, [EOS], "cpu", constrained(params))
    logits = torch.zeros(1, WIDTH)
    logits[0, EOS] = 9.0
    for expected in (*ids(tokenizer, "ab"), EOS, EOS):
        token = int(Sampler()(logits, [state]).token_ids)
        assert token == expected
        state.append([token])


def test_constrained_and_free_rows_in_one_batch(tokenizer, constrained):
    logits = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    params_list = [SamplingParams(seed=1), SamplingParams(regex="[xyz]+", seed=2), SamplingParams(temperature=0)]

    def states():
        return [SamplingState(p, [1], WIDTH, [EOS], "cpu", constrained(p)) for p in params_list]

    together = Sampler()(logits, states()).token_ids.tolist()
    assert together[1] in ids(tokenizer, "xyz")
    assert together == [int(Sampler()(logits[n : n + 1], [s]).token_ids) for n, s in enumerate(states())]


def test_white_space_is_bounded(tokenizer, constrained):
    params = SamplingParams(json_schema={"type": "array"})
    indented = constrained(params)
    indented.advance(ids(tokenizer, '["a",\n    1 , {"b" : []}]'))
    assert allowed(indented) == [EOS]
    # The white space, and whether more of it may come.
    for white, more in {" " * 7: True, " " * 8: False, " \r\n" + " " * 63: True, " \r\n" + " " * 64: False}.items():
        constraint = constrained(params)
        constraint.advance(ids(tokenizer, "[" + white))
        assert bool(set(allowed(constraint)) & set(ids(tokenizer, " "))) == more, repr(white)
    broken = constrained(params)
    broken.advance(ids(tokenizer, "[\n  "))
    assert not set(allowed(broken)) & set(ids(tokenizer, "\n"))


BAD = [
    {"regex": "a+b("}, {"regex": "(?=a)b"}, {"json_schema": {"type": "obj"}}, {"json_schema": '{"type": "obj"}'},
    {"json_schema": {"type": "array", "uniqueItems": True}}, {"json_schema": {"$ref": "#/nowhere"}},
]  # fmt: skip


@pytest.mark.parametrize("grammar_field", BAD, ids=str)
def test_invalid_grammar_is_reported_in_one_line(tokenizer, grammar_field, constrained):
    with pytest.raises(UserError) as caught:
        constrained(SamplingParams(**grammar_field))
    line, (name,) = str(caught.value), grammar_field
    assert line.startswith(f"{name} cannot be followed: ")
    assert "\n" not in line and 30 < len(line) < 450 and "start:" not in line
    if name == "regex":
        assert "unclosed group" in line or "look-around" in line


def test_no_constraint_without_grammar(tokenizer, constrained):
    assert constrained(SamplingParams()) is None


def test_without_llguidance_the_extra_is_named(tokenizer, constrained, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert constrained(SamplingParams()) is None
    with pytest.raises(UserError, match=r"pip install '\.\[constrained\]'"):
        constrained(SamplingParams(regex="a"), Grammars(tokenizer, [EOS]))
