"""What tests of connections share."""

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlaforge.serving import connection


@pytest.fixture(params=["h11", "httptools"])
def http_protocol(request, monkeypatch):
    """Once for each of uvicorn's protocols, on which servers are then built."""
    base = H11Protocol
    if request.param == "httptools":
        pytest.importorskip("httptools")
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as base
    monkeypatch.setattr(connection, "AutoHTTPProtocol", base)
