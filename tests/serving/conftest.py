"""Fixtures of the connection tests."""

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlaforge.serving import connection


@pytest.fixture(params=["h11", "httptools"])
def http_protocol(request, monkeypatch):
    """Run a test with each of uvicorn's HTTP protocols."""
    base = H11Protocol
    if request.param == "httptools":
        pytest.importorskip("httptools")
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as base
    monkeypatch.setattr(connection, "AutoHTTPProtocol", base)
