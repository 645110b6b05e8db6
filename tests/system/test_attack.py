"""`make attack` in small: every part against a real server and real commands, and its classification of failures."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from support import killed


@pytest.fixture
def ledger(tmp_path):
    from attack.ledger import Ledger

    return Ledger("part", 0, tmp_path)


@pytest.fixture
def specimens(tmp_path):
    from attack.processes import make_home
    from attack.specimens import Specimens

    return Specimens(tmp_path / "specimens", make_home(tmp_path / "home"))


def test_requests_and_connections(tiny_models, ledger, tmp_path, monkeypatch):
    """Kinds that end quickly. The steps of a tiny model are too short for latency limits."""
    from attack import connections, fuzz, requests, served

    for name, value in (("ALONE", 0.1), ("WARM_UP", 8), ("MEASURED", 1)):
        monkeypatch.setattr(served, name, value)
    monkeypatch.setattr(fuzz, "WEIGHTS", {fuzz.valid: 2, fuzz.damaged: 1, fuzz.messages: 1, fuzz.head: 1})
    monkeypatch.setattr(connections, "KINDS", (connections.hang_up, connections.pipelined, connections.gone))
    options = ["--device", "cpu", "--dtype", "float32", "--cache-bytes", str(2**24)]

    async def attacked():
        async with served.Served(tiny_models["llama"], ledger, tmp_path, options, 200) as server:
            await requests.run(ledger, server, 40)
            await connections.run(ledger, server, 24)
        return server.facts()

    facts = asyncio.run(attacked())
    row = ledger.row(**facts)
    assert set(row["failures"]) <= {"part-witness gap", "part-witness first"}, list(tmp_path.rglob("why.txt"))
    assert row["tried"] == 40 + 24 and row["servers"] == 1 and row["ended"]["200"] > 5
    assert row["kinds"].keys() >= {"valid", "hang_up", "pipelined", "gone"}
    witness = row["witness"]
    assert witness["answers"] > 1 and not witness["lost"] and not witness["refused"]
    assert 0 < witness["largest_gap"] == witness["largest_gaps"][0]["seconds"] and witness["largest_step"] > 0


@pytest.mark.slow
def test_a_crashed_server_is_a_failure_and_is_replaced(tiny_models, ledger, tmp_path, monkeypatch):
    from attack import served

    for name, value in (("ALONE", 0.1), ("WARM_UP", 8), ("MEASURED", 1)):
        monkeypatch.setattr(served, name, value)

    async def attacked():
        async with served.Served(
            tiny_models["llama"], ledger, tmp_path, ["--device", "cpu", "--dtype", "float32"], 1
        ) as server:
            with server.attacked_by("a shot"):
                server._process.kill()
                server._process.wait()
                await server.look()
            assert server.life == 2
        return server.facts()

    assert asyncio.run(attacked())["servers"] == 2
    assert ledger.failures[0] == "part-server 1"
    assert "under way: a shot" in (tmp_path / "failures" / "part-server 1" / "why.txt").read_text()


def test_kills(tmp_path, monkeypatch):
    """As the command, of one stage."""
    from attack import __main__ as attack
    from attack import kills

    monkeypatch.setattr(kills, "STAGES", {"draft train": 1})
    monkeypatch.setattr(attack, "IMPORTED", killed.IMPORTED)
    monkeypatch.setattr(sys, "argv", ["attack", "kills", "--share", "0.005", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        attack.main()
    (row,) = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert ended.value.code == 0 and (row["tried"], row["failed"], row["of"]) == (1, 0, "draft train")
    assert row["kinds"] == {"SIGINT": 1} and row["undisturbed_seconds"].keys() == {"forked"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.json", "tried-kills-draft-train.txt"}


def test_corruptions(specimens, ledger, tmp_path, monkeypatch):
    """Of heads and GGUF files, which need nothing that is made first."""
    from attack import corruptions

    monkeypatch.setattr(corruptions, "KINDS", {kind: corruptions.KINDS[kind] for kind in ("gguf", "head")})
    row = ledger.row(**corruptions.run(ledger, 2, specimens, tmp_path / "work"))
    assert row["corruptions"] == 2 and row["tried"] == 4
    assert not row["failed"], [path.read_text() for path in tmp_path.rglob("why.txt")]
    assert not list((tmp_path / "work").glob("[0-9]*"))
