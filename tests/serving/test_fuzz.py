"""Arbitrary requests get an answer or a 4xx in OpenAI's shape, never a 500 or a traceback."""

import json
import string
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlaforge.serving import wire
from mlaforge.serving.protocol import HARMLESS, REFUSED, ChatRequest, CompletionRequest
from mlaforge.serving.strict import strict_fields
from mlaforge.serving.wire import ApiError, depth, event, parse_object
from support.scripted_engine import ScriptedEngine
from support.serving import serving

PATHS = ("/v1/completions", "/v1/chat/completions")
VALID = {
    PATHS[0]: {"prompt": "x", "max_tokens": 2},
    PATHS[1]: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
}
REQUESTS = {PATHS[0]: CompletionRequest, PATHS[1]: ChatRequest}
FIELDS = {path: sorted(request.model_fields) for path, request in REQUESTS.items()}
NUMBERS = st.one_of(
    st.integers(), st.floats(), st.sampled_from([10**400, -(10**30), 2**31, 2**63, 2**64, 1e308, -1e308, -1, 0, 1.5])
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8), st.sampled_from(["\ud800", "\x00", "auto"]))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.one_of(st.text(max_size=8), st.sampled_from(["type", "role", "content", "function", "0", "schema"])),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def served(tokenizer):
    with serving(ScriptedEngine(tokenizer), max_n=4, max_prompts=8) as served:
        yield served
        served.settles()


def send(served, path, body):
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()  # NaN and Infinity as Python writes them
    answer = served.post(path, content=body, headers={"content-type": "application/json"})
    if answer.status_code != 200:
        assert answer.status_code != 500, (body, answer.text)
        served.refused(answer, answer.status_code)
    return answer


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_in_any_field(served, path, data):
    names = data.draw(st.lists(st.sampled_from(FIELDS[path]), min_size=1, max_size=3))
    body = VALID[path] | {name: data.draw(VALUES) for name in names}
    assert send(served, path, body).status_code in (200, 400, 404)


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=VALUES)
def test_arbitrary_json_never_gives_a_500(served, path, value):
    assert send(served, path, value).status_code in (200, 400, 404)


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_json_never_gives_a_500(served, path, data):
    """A valid body with removed, inserted or changed bytes."""
    body = bytearray(json.dumps(VALID[path] | {"temperature": 0.5, "stop": ["é"]}, ensure_ascii=False).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=3))
    assert send(served, path, bytes(body)).status_code in (200, 400, 404)


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.text(string.ascii_letters + "_é", min_size=1))
def test_unknown_fields_are_named(served, path, name):
    if name in FIELDS[path] or name in HARMLESS or name in REFUSED or name in ("echo", "prompt", "messages", "tools"):
        return
    answer = send(served, path, VALID[path] | {name: 1})
    assert answer.status_code == 200
    assert f"unknown field {name[:100]!r}".encode("ascii", "replace").decode() in answer.headers["x-mlaforge-warning"]
    with pytest.raises(ApiError, match="unknown field") as refused, strict_fields(True):
        REQUESTS[path].read(VALID[path] | {name: 1})
    assert refused.value.param == name[:100] and refused.value.code == "unknown_parameter"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [
    b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"prompt": "\xff"}', b'{"temperature": NaN}', b'{"seed": Infinity}',
    b'{"temperature": 1e999}', b'{"max_tokens": ' + b"9" * 5000 + b"}", b"[" * 100000,
    b'{"a":' * 5000 + b"1" + b"}" * 5000,
    b'{"tools": ' + b"[" * 150 + b"]" * 150 + b"}", b'{"prompt": "\\ud800"}', b'{"messages": "\\udc00 \\ud800"}',
])  # fmt: skip
def test_rejects_bodies_that_are_not_json_objects(served, path, body):
    assert send(served, path, body).status_code == 400


@pytest.mark.parametrize(("change", "param"), [
    ({"n": True}, "n"), ({"n": 0}, "n"), ({"n": 5}, "n"), ({"n": 10**30}, "n"), ({"n": 1.5}, "n"), ({"n": "1"}, "n"),
    ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": True}, "max_tokens"), ({"temperature": "1"}, "temperature"),
    ({"temperature": -0.1}, "temperature"), ({"temperature": True}, "temperature"), ({"top_p": -0.1}, "top_p"),
    ({"seed": 2**63}, "seed"), ({"stop": ""}, "stop"), ({"stop": ["a", 1]}, "stop.1"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"), ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0"), ({"best_of": 2}, "best_of"), ({"suffix": "x"}, "suffix"),
    ({"use_beam_search": True}, "use_beam_search"), ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"regex": "a", "guided_json": {}}, "guided_json"),
    ({"stream_options": {"include_usage": True}}, "stream_options"), ({"model": "other"}, "model"),
    ({"temperature": 1e31}, "temperature"), ({"top_k": -2}, "top_k"), ({"min_p": 1.1}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"), ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_tokens": -1}, "min_tokens"), ({"stop": ["a", ""]}, "stop.1"),
    ({"stop_token_ids": [1, 10**30]}, "stop_token_ids"),
    ({"temperature": 2.0001}, "temperature"), ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"), ({"regex": "a\\"}, "regex"),
    ({"max_tokens": 10**6}, "max_tokens"), ({"stream": "yes"}, "stream"),
])  # fmt: skip
@pytest.mark.parametrize("path", PATHS)
def test_errors_name_the_field(served, path, change, param):
    status = 404 if "model" in change else 400
    served.refused(served.post(path, json=VALID[path] | change), status, param)


@pytest.mark.parametrize("prompt", [
    None, [], [[]], "", [True], [1.5], ["a", 1], ["a", ["b"]], [1, "a"], [[1], "a"], [[1, True]], [-1], [10**6],
    [[10**30]], {"a": 1}, 5, True, ["a"] * 9, "x" * 600, [[1] * 600],
])  # fmt: skip
def test_rejects_non_prompt_inputs(served, prompt):
    served.refused(served.post(PATHS[0], json={"prompt": prompt}), 400, "prompt")


CONTEXT = "This model's maximum context length is 512 tokens, but the prompt has "


@pytest.mark.parametrize(("length", "options", "param", "why"), [
    (512, {}, "prompt", "512 tokens, and there is room for 511; shorten the prompt"),
    (512, {"max_tokens": 9}, "prompt", "512 tokens, and there is room for 511; shorten the prompt"),
    (500, {"max_tokens": 13}, "max_tokens", "500 tokens and max_tokens is 13; set max_tokens to at most 12"),
    (3, {"max_tokens": 100_000}, "max_tokens", "3 tokens and max_tokens is 100000; set max_tokens to at most 509"),
])  # fmt: skip
@pytest.mark.parametrize("path", PATHS)
def test_context_overflow_has_openais_message(served, path, length, options, param, why):
    """The error names the field that must be smaller: max_tokens beyond the context is not a prompt error."""
    text, chat = "a" * length, path != PATHS[0]
    # The template of this tokenizer adds text.
    payload = {"prompt": [1] * length} if not chat else {"messages": [{"role": "user", "content": text}]}
    answer = served.post(path, json={**payload, **options})
    field = "messages" if chat and (param == "prompt" or length > 490) else param
    message = served.refused(answer, 400, field)
    assert message.startswith(CONTEXT) and (chat or why in message)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(("messages", "param"), [
    ([], "messages"), (None, "messages"), ("hi", "messages"), ([{"content": "x"}], "messages.0.role"),
    ([{"role": "wizard", "content": "x"}], "messages.0.role"), ([{"role": "user", "content": 5}], "messages.0.content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages.0.content.0"),
])  # fmt: skip
def test_rejects_invalid_conversations(served, messages, param):
    served.refused(served.post(PATHS[1], json={"messages": messages}), 400, param)


@pytest.mark.parametrize("path", PATHS)
def test_harmless_fields_and_nulls_change_nothing(served, path):
    plain = served.post(path, json=VALID[path]).json()["choices"]
    harmless = dict.fromkeys(HARMLESS, "x")
    nulls = dict.fromkeys({*REFUSED, *FIELDS[path]} - VALID[path].keys())
    assert served.post(path, json=VALID[path] | harmless | nulls).json()["choices"] == plain
    neutral = {"suffix": "", "use_beam_search": False, "best_of": 1, "modalities": ["text"]}
    assert served.post(path, json=VALID[path] | neutral).json()["choices"] == plain


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/v1/completions", 405), ("GET", "/nothing", 404), ("POST", "/v1/models", 405),
    ("OPTIONS", "/nothing", 404),
    ("GET", "/docs", 404),
])  # fmt: skip
def test_unknown_paths_and_methods_are_refused(served, method, path, status):
    served.refused(served.http.request(method, path), status)


def test_only_json_and_no_other_origin_is_accepted(served):
    served.refused(served.post(PATHS[0], content=b'{"prompt": "x"}', headers={"content-type": "text/plain"}), 415)
    served.refused(served.post(PATHS[0], data={"prompt": "x"}), 415)
    answer = served.post(PATHS[0], json=VALID[PATHS[0]], headers={"origin": "http://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(("parameters", "status"), [
    ("", 200), ("; charset=utf-8", 200), (';CHARSET="UTF-8" ; x=y', 200), ("; charset=us-ascii", 200),
    ("; charset=latin-1", 415), ("; charset=utf-16", 415), ("; x=y; charset=utf-8; charset=rot13", 415),
])  # fmt: skip
def test_rejects_other_encodings_than_utf_8(served, parameters, status):
    headers = {"content-type": "application/json" + parameters}
    answer = served.post(PATHS[0], content='{"prompt": "é", "max_tokens": 1}'.encode(), headers=headers)
    assert answer.status_code == status
    if status != 200:
        assert "UTF-8" in served.refused(answer, 415)


@pytest.mark.parametrize("path", ["/v1/completions/", "/v1/chat/completions//", "/v1/models/", "/health/", "/version/"])
def test_a_trailing_slash_is_ignored(served, path):
    """Without a redirect, which some clients follow with a GET and some not at all."""
    body = VALID.get(path.rstrip("/"))
    answer = served.http.get(path) if body is None else served.post(path, json=body)
    assert answer.status_code == 200 and answer.json()
    served.refused(served.http.get("/"), 404)


def test_openais_maximal_temperature_is_accepted(served):
    for path in PATHS:
        assert served.post(path, json=VALID[path] | {"temperature": 2}).status_code == 200


@pytest.mark.parametrize("body", [
    b'{"a":[' + b"[]," * 200_000 + b"1]}", b'{"a":[' + b'{"b":1},' * 100_000 + b"1]}",
    b"{" + b",".join(b'"%d":1' % i for i in range(100_001)) + b"}",
])  # fmt: skip
def test_rejects_json_that_takes_seconds_to_parse(served, body):
    """Parsing blocks all threads: 4.3 s for 7.5 MB of empty lists. Marks inside strings are not counted."""
    assert "more than 100000 lists, objects and fields" in served.refused(send(served, PATHS[0], body), 400)
    for text in ("[{:" * 100_000, '\\"[' * 100_000):
        assert parse_object(json.dumps({"prompt": text}).encode()) == {"prompt": text}
    arguments = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" + "[]," * 200_000 + "1]"}}]
    messages = [{"role": "assistant", "content": "", "tool_calls": arguments}]
    served.refused(served.post(PATHS[1], json={"messages": messages}), 400, "messages.0.tool_calls")


def test_engine_refusals_are_400(served):
    assert "regex" in served.refused(served.post(PATHS[0], json={"prompt": "x", "regex": "("}), 400, "regex")
    payload = {"prompt": "x", "regex": "(", "stream": True}
    served.refused(served.post(PATHS[0], json=payload), 400, "regex")


NESTED = {"type": "string"}
for _ in range(70):
    NESTED = {"items": NESTED}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("schema", "reason"), [
    ({"properties": {f"property {i}": {"type": "string"} for i in range(30_000)}}, "more than 5000 properties"),
    ({"enum": [f"value {i}" for i in range(50_000)]}, "more than 10000 enum values"),
    (NESTED, "more than 64 levels of nesting"), ({"description": "x" * 200_000}, "longer than 128 KiB"),
], ids=lambda part: str(part)[:20])  # fmt: skip
def test_rejects_schemas_that_are_too_large(served, path, schema, reason):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for payload in ({"guided_json": schema}, {"response_format": form}):
        assert reason in served.refused(served.post(path, json=VALID[path] | payload), 400)
    written = served.refused(served.post(path, json=VALID[path] | {"guided_json": json.dumps(schema)}), 400)
    assert reason in written or "longer than 128 KiB" in written
    assert "longer" in served.refused(served.post(path, json=VALID[path] | {"guided_regex": "a" * 200_000}), 400)


@given(VALUES)
def test_depth_equals_a_naive_recursion(value):
    def naive(value):
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if inner is None else 1 + max(map(naive, inner), default=0)

    assert depth(value) == naive(value)


@given(VALUES.filter(lambda v: isinstance(v, dict)))
def test_parsed_json_can_be_serialised(value):
    try:
        parsed = parse_object(json.dumps(value).encode())
    except ApiError as error:
        assert error.status == 400
        return
    json.dumps(parsed, allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.parametrize("crowd", [
    {"messages": [1] * 10**6}, {"messages": [{"role": "user", "content": [1] * 10**6}]}, {"stop": [1] * 10**6},
    {"messages": [{"role": "user", **{f"k{i}": 0 for i in range(10**5)}}]}, {"stop_token_ids": ["a"] * 10**6},
    {"logit_bias": {str(i): True for i in range(10**5)}}, {"tools": [1] * 10**6},
])  # fmt: skip
def test_a_million_errors_use_little_memory(crowd):
    """pydantic would record all of them, in gigabytes."""
    tracemalloc.start()
    try:
        with pytest.raises(ApiError):
            ChatRequest.read(VALID[PATHS[1]] | crowd)
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()


@given(VALUES, st.integers(1, 3))
def test_serialising_in_slices_gives_the_same_bytes(value, slice_size):
    text = json.dumps([value, {"a": [value] * 7, "b": [[value]] * 4, "\u2028": {}}])
    value = json.loads(text, parse_constant=str)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "SLICE", slice_size)
        assert wire.dumps_long(value) == wire.dumps(value)


@given(st.text() | st.text("a\x85\u2028\u2029\r\n\x0b\x0c\x1c"))
def test_an_event_is_one_line_to_every_client(text):
    """httpx's iter_lines also splits at U+0085, U+2028 and U+2029, like Python's splitlines."""
    first, second = event({"text": text}).decode().splitlines()
    assert second == ""
    assert json.loads(first.removeprefix("data: ")) == {"text": text}
