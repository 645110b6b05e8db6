"""SamplingParams: errors in one line that names field, value and remedy; normalization."""

import dataclasses
import math

import pytest

from mlaforge.engine.sampling.params import SamplingParams
from mlaforge.runtime import UserError

WRONG = [
    ("n", 0), ("n", True), ("n", 1.0), ("n", "2"), ("n", None),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", False),
    ("min_tokens", -1), ("min_tokens", 17), ("min_tokens", None),
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", True),
    ("temperature", "1"), ("temperature", 10**400), ("temperature", None),
    ("top_k", -2), ("top_k", 1.0), ("top_p", 0.0), ("top_p", 1.01), ("top_p", math.nan),
    ("min_p", -0.1), ("min_p", 1.1),
    ("presence_penalty", 2.1), ("presence_penalty", math.nan), ("frequency_penalty", -2.1),
    ("repetition_penalty", 0), ("repetition_penalty", -1.0), ("repetition_penalty", math.inf),
    ("seed", 2**64), ("seed", -(2**63) - 1), ("seed", 1.0), ("seed", True), ("seed", "x"),
    ("stop", ("",)), ("stop", [3]), ("stop", 3), ("stop", ["ok", "line\nbreak", ""]), ("stop", ""),
    ("stop_token_ids", [-1]), ("stop_token_ids", [True]), ("stop_token_ids", 5), ("stop_token_ids", ["5"]),
    ("include_stop_str_in_output", 1), ("ignore_eos", None), ("skip_special_tokens", "yes"),
    ("logit_bias", {1: 101}), ("logit_bias", {1: math.nan}), ("logit_bias", {-1: 0}), ("logit_bias", {"1": 0}),
    ("logit_bias", {1: True}), ("logit_bias", [1]),
    ("logprobs", -1), ("logprobs", True), ("prompt_logprobs", 1.0),
    ("json_schema", "{"), ("json_schema", 3), ("json_schema", {"a": {1, 2}}), ("json_schema", {"a": math.nan}),
    ("regex", ""), ("regex", 3), ("regex", "\\"), ("regex", "a\\\\\\"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{n}-{str(v)[:20]}" for n, v in WRONG])
def test_invalid_value_is_one_line_that_names_the_field(name, value):
    with pytest.raises(UserError) as caught:
        SamplingParams(**{name: value})
    line = str(caught.value)
    assert "\n" not in line and len(line) < 250
    assert line.startswith(name) and " must be " in line
    if isinstance(value, bool | int) and abs(value) < 1000:
        assert repr(value) in line


def test_only_one_grammar():
    with pytest.raises(UserError, match="regex stands beside json_schema; give one of them"):
        SamplingParams(regex="a", json_schema={})
    with pytest.raises(UserError, match="grammar stands beside regex; give one of them"):
        SamplingParams(regex="a", grammar="start: A")


def test_a_value_without_a_one_line_repr_is_shown_in_one_line():
    class Odd:
        def __repr__(self):
            return "two\nlines" * 100

    with pytest.raises(UserError) as caught:
        SamplingParams(n=Odd())
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_edges_that_are_legal():
    SamplingParams(max_tokens=0, prompt_logprobs=0)
    SamplingParams(max_tokens=None, min_tokens=10**6)
    SamplingParams(temperature=100, top_p=1, min_p=1, top_k=10**9, presence_penalty=-2, frequency_penalty=2)
    SamplingParams(logit_bias={0: -100, 5: 100}, seed=2**64 - 1, json_schema='{"type": "object"}')
    SamplingParams(min_tokens=16, json_schema={})


def test_normalised():
    params = SamplingParams(stop="end", stop_token_ids=[3, 4], top_k=-1, temperature=1, logit_bias={2: 1}, seed=-1)
    assert (params.stop, params.stop_token_ids, params.top_k, params.seed) == (("end",), (3, 4), 0, None)
    assert isinstance(params.temperature, float) and isinstance(params.logit_bias[2], float)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()
    # A copy passes its own checks.
    assert dataclasses.replace(params, n=2).stop == ("end",)
    assert dataclasses.asdict(params)["logit_bias"] == {2: 1.0}


def test_the_callers_mapping_is_not_kept():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 1000.0
    assert params.logit_bias == {1: 2.0}


def test_greedy_and_penalised():
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy
    assert not SamplingParams().penalised
    for name, value in (("presence_penalty", 0.1), ("frequency_penalty", -0.1), ("repetition_penalty", 1.1)):
        assert SamplingParams(**{name: value}).penalised


def test_token_ids_are_checked_against_the_vocabulary():
    SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[9]).check_vocabulary(10)
    with pytest.raises(UserError, match="logit_bias names token 10, but the vocabulary has 10"):
        SamplingParams(logit_bias={10: 1.0}).check_vocabulary(10)
    with pytest.raises(UserError, match="stop_token_ids names token 11"):
        SamplingParams(stop_token_ids=[11]).check_vocabulary(10)
