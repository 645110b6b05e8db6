"""MODEL that is not there, a hub that gives nothing, and GGUF files: one line that names the local alternatives."""

from __future__ import annotations

import http.server
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

# With what takes seconds to import, and is not what is timed below.
from mlaforge.checkpoint import resolve
from support.gguf_file import save_gguf


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere", "nowhere does not exist"),
        ("./models/nowhere", "./models/nowhere does not exist"),
        ("/models/nowhere", "/models/nowhere does not exist"),
        ("a/b/c", "a/b/c does not exist"),
        ("bad name/model!", "neither a directory nor a hub id"),
        ("nowhere.gguf", "nowhere.gguf does not exist"),
    ],
)
@pytest.mark.parametrize("verb", ["convert", "eval", "generate", "plan"])
def test_a_model_that_is_not_there(verb, name, words, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(words, verb, name, *(["out"] if verb == "convert" else []))


def test_a_model_that_is_a_file(refused, tmp_path, calibration_file):
    refused("is a file; give a model directory", "convert", calibration_file, tmp_path / "out")


@pytest.mark.parametrize("verb", ["convert", "plan"])
def test_a_hub_id_without_a_network(verb, refused, tmp_path):
    start = time.monotonic()
    words = ("'nobody/nothing'", "cannot be reached", "local model directory", ".gguf")
    refused(words, verb, "nobody/nothing", *([tmp_path / "out"] if verb == "convert" else []))
    assert time.monotonic() - start < 5


@pytest.fixture
def hub(tmp_path_factory, monkeypatch) -> Callable[[str], None]:
    """hub(address) lets this process believe that it is online, with the hub at that address."""
    from huggingface_hub import constants

    def at(address: str) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", address)
        monkeypatch.setattr(resolve, "HUB_SECONDS", 1.0)

    return at


@pytest.mark.parametrize("answer", ["refuses", "stays silent"])
def test_a_hub_that_does_not_answer(answer, hub, refused, tmp_path):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if answer == "stays silent":
            listening.listen(8)
        hub(f"http://127.0.0.1:{listening.getsockname()[1]}")
        start = time.monotonic()
        refused(("cannot be reached", "local model directory"), "convert", "nobody/nothing", tmp_path / "out")
        assert time.monotonic() - start < 10


@pytest.mark.parametrize(("status", "code"), [(404, "RepoNotFound"), (401, "GatedRepo"), (500, "")])
def test_a_hub_that_says_no(status, code, hub, refused, tmp_path):
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub(f"http://127.0.0.1:{server.server_port}")
        words = (f"status {status}", "'nobody/nothing'", "local model directory")
        refused(words, "convert", "nobody/nothing", tmp_path / "out")
        server.shutdown()


@pytest.fixture
def gguf_file(tmp_path, monkeypatch) -> Path:
    """A tiny llama as GGUF; the cache of dequantised models is in tmp_path."""
    pytest.importorskip("gguf")
    monkeypatch.setenv("MLAFORGE_HOME", str(tmp_path / "home"))
    return save_gguf(tmp_path / "tiny.gguf")


def test_a_gguf_file_is_dequantised_once(gguf_file, converts, tree, tmp_path):
    before = gguf_file.read_bytes()
    assert "dequantising" in converts(gguf_file, tmp_path / "out").stderr
    home = tree(tmp_path / "home")
    assert any(name.endswith("/config.json") for name in home)
    assert "dequantising" not in converts(gguf_file, tmp_path / "out2", "--budget", 0.75).stderr
    assert tree(tmp_path / "home") == home
    assert gguf_file.read_bytes() == before


def test_no_bar_of_any_library_is_drawn_where_there_is_no_terminal(gguf_file, evaluation_file):
    """transformers has one for every tensor of a GGUF file, which asks nobody."""
    words = [sys.executable, "-m", "mlaforge", "eval", str(gguf_file), "--text", str(evaluation_file), "--windows", "2"]
    done = subprocess.run([*words, "--seqlen", "64", "--device", "cpu"], capture_output=True, text=True)
    assert done.returncode == 0 and "dequantising" in done.stderr, done.stderr
    assert "\r" not in done.stderr and "%" not in done.stderr, done.stderr


def test_two_that_need_a_gguf_file_at_once(gguf_file, tree, tmp_path, capsys):
    """One dequantises, the other waits for it."""
    with ThreadPoolExecutor(2) as pool:
        directories = list(pool.map(resolve.from_gguf, [gguf_file] * 2))
    assert len(set(directories)) == 1 and (directories[0] / "config.json").is_file()
    said = capsys.readouterr().err
    assert said.count("dequantising") == said.count("waiting for another process") == 1, said
    assert sorted(path.name for path in (tmp_path / "home" / "gguf").iterdir()) == [directories[0].name]


@pytest.mark.parametrize("share", [0.0, 0.00001, 0.0001, 0.001, 0.01, 0.05, 0.5, 0.999])
def test_a_truncated_gguf(share, gguf_file, refused, short, tmp_path):
    gguf_file.write_bytes(gguf_file.read_bytes()[: int(gguf_file.stat().st_size * share)])
    refused(("tiny.gguf", "cannot be read as GGUF"), "convert", gguf_file, tmp_path / "out", *short)


@pytest.mark.parametrize("bit", [25, 1719])
def test_a_gguf_with_a_flipped_bit_in_its_header(bit, gguf_file, refused, short, tmp_path):
    content = bytearray(gguf_file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    gguf_file.write_bytes(content)
    refused(("tiny.gguf", "cannot be read as GGUF"), "convert", gguf_file, tmp_path / "out", *short)


def test_a_gguf_that_is_none(gguf_file, refused, short, tmp_path):
    gguf_file.write_text("No GGUF, but a letter to my aunt. " * 100)
    refused(("tiny.gguf", "cannot be read as GGUF"), "convert", gguf_file, tmp_path / "out", *short)


def test_no_room_for_the_dequantised_model(gguf_file, refused, short, small_disk, tmp_path, monkeypatch):
    monkeypatch.setenv("MLAFORGE_HOME", str(small_disk(2**16) / "home"))
    refused("the disk is full", "convert", gguf_file, tmp_path / "out", *short)
