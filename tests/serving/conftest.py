"""A scripted server, its tokenizer, harmony's vocabulary, and both of uvicorn's HTTP protocols."""

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlaforge.serving import connection
from support.responses import harmony_serving
from support.scripted_engine import ScriptedEngine, load_tokenizer
from support.serving import serving


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A tokenizer with one token per byte. Read-only."""
    return load_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def served(tokenizer):
    """A server of a ScriptedEngine with the default options."""
    with serving(ScriptedEngine(tokenizer)) as served:
        yield served
        served.settles()


@pytest.fixture(scope="session")
def encoding():
    """Harmony's vocabulary; skips if the extra is not installed."""
    oh = pytest.importorskip("openai_harmony")
    return oh.load_harmony_encoding(oh.HarmonyEncodingName.HARMONY_GPT_OSS)


@pytest.fixture(scope="module")
def harmony_server(encoding):
    """A server of a ScriptedEngine with harmony's vocabulary."""
    with harmony_serving(encoding) as server:
        yield server


@pytest.fixture(params=["h11", "httptools"])
def http_protocol(request, monkeypatch):
    """Run a test with each of uvicorn's HTTP protocols."""
    base = H11Protocol
    if request.param == "httptools":
        pytest.importorskip("httptools")
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as base
    monkeypatch.setattr(connection, "AutoHTTPProtocol", base)
