"""The HTTP surface beside generation: request ids, methods, origins, keys, small endpoints, the OpenAPI document."""

import gzip
import json

import httpx
import pytest

from support.scripted_engine import ScriptedEngine
from support.serving import serving

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/nothing", "/v1/messages"])
def test_every_response_has_a_request_id(served, path):
    answer = served.post(path, json=CHAT, headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    ids = {served.post(path, json=CHAT).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2 and all(id.startswith("req_") for id in ids)
    # An id that would break logs is replaced.
    assert served.post(path, json=CHAT, headers={"x-request-id": "x" * 200}).headers["x-request-id"].startswith("req_")


def test_streams_have_a_request_id_and_warnings(served):
    with served.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True, "colour": 1}) as answer:
        assert answer.headers["x-request-id"] and "colour" in answer.headers["x-mlaforge-warning"]
        assert answer.read().endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/version", "/metrics", "/ping"])
def test_head_is_get_without_a_body(served, path):
    head, get = served.http.head(path), served.http.get(path)
    assert head.status_code == get.status_code == 200 and not head.content and get.content
    assert head.headers["content-type"] == get.headers["content-type"]


def test_options_name_the_methods_and_permit_no_origin(served):
    for path, methods in (("/v1/chat/completions", "OPTIONS, POST"), ("/v1/models", "GET, HEAD, OPTIONS")):
        answer = served.http.options(path, headers={"origin": "http://page.example"})
        assert answer.status_code == 204 and answer.headers["allow"] == methods
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_allowed_origins_and_keys(tokenizer):
    options = {"allowed_origins": "http://page.example, http://other.example", "api_key": "k", "public_metrics": True}
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with serving(ScriptedEngine(tokenizer), **options) as served:
        for origin, allowed in (("http://page.example", True), ("http://evil.example", False)):
            headers = {"origin": origin}
            answer = served.http.options("/v1/chat/completions", headers=headers | preflight)
            assert (answer.headers.get("access-control-allow-origin") == origin) is allowed
            answer = served.post("/v1/chat/completions", json=CHAT, headers=headers | {"authorization": "Bearer k"})
            assert answer.status_code == 200
            assert (answer.headers.get("access-control-allow-origin") == origin) is allowed
        for path, status in (
            ("/health", 200),
            ("/ping", 200),
            ("/metrics", 200),
            ("/v1/models", 401),
            ("/tokenize", 401),
        ):
            assert served.http.get(path).status_code == status
    with serving(ScriptedEngine(tokenizer), api_key="k") as served:
        assert served.http.get("/metrics").status_code == 401


@pytest.mark.parametrize(("path", "hint"), [
    ("/chat/completions", "the path is /v1/chat/completions, so the base URL ends with /v1"),
    ("/messages", "the path is /v1/messages"), ("/v1/v1/responses", "the path is /v1/responses"),
])  # fmt: skip
def test_a_wrong_base_url_is_explained(served, path, hint):
    answer = served.post(path, json=CHAT)
    assert answer.status_code == 404 and hint in answer.json()["error"]["message"]


def test_compressed_bodies_are_refused_with_the_reason(served):
    body, headers = gzip.compress(json.dumps(CHAT).encode()), {"content-type": "application/json"}
    answer = served.post("/v1/chat/completions", content=body, headers=headers | {"content-encoding": "gzip"})
    assert "send the body uncompressed" in served.refused(answer, 415)
    plain = served.post("/v1/chat/completions", json=CHAT, headers={"content-encoding": "identity"})
    assert plain.status_code == 200


def test_tokenize_and_detokenize(served):
    text, tokenizer = "Hello, 漢字!", served.engine.tokenizer
    ids = tokenizer(text)["input_ids"]
    answer = served.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 512)
    assert "".join(answer["token_strs"][:5]) == "Hello"
    assert served.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
    chat = served.post("/tokenize", json={"messages": CHAT["messages"], "model": "scripted"}).json()
    usage = served.post("/v1/chat/completions", json=CHAT).json()["usage"]
    assert chat["count"] == len(chat["tokens"]) == usage["prompt_tokens"]
    for path, body, status, param in (
        ("/tokenize", {}, 400, "prompt"), ("/detokenize", {"tokens": [10**6]}, 400, "tokens.0"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"), ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/tokenize", {"prompt": "x" * 10**6}, 400, "prompt"),
    ):  # fmt: skip
        served.refused(served.post(path, json=body), status, param)


def test_a_connection_outlives_pauses_between_requests(served):
    """uvicorn's default of 5 s makes clients that keep connections fail at random."""
    assert served.server.config.timeout_keep_alive >= 60


def test_the_openapi_document_describes_every_path(served):
    document = served.http.get("/openapi.json").json()
    assert {path.replace("{name}", "{name:path}") for path in document["paths"]} >= {
        route.path for route in served.server.config.app.routes if route.path not in ("/openapi.json",)
    }
    schemas = document["components"]["schemas"]
    references = {part.split('"')[0] for part in json.dumps(document).split('"#/components/schemas/')[1:]}
    assert references <= schemas.keys() and {"ChatRequest", "ResponsesRequest", "MessagesRequest"} <= references
    for operations in document["paths"].values():
        for operation in operations.values():
            assert {"200", "400", "401", "404", "503"} <= operation["responses"].keys()


def test_a_client_that_keeps_its_connection(served):
    with httpx.Client(base_url=served.url) as client:
        assert [client.post("/v1/chat/completions", json=CHAT).status_code for _ in range(3)] == [200] * 3
