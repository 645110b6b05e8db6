"""Missing models, an unreachable hub and damaged GGUF files: one line of error that names the alternatives."""

from __future__ import annotations

import hashlib
import http.server
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

# With what takes seconds to import, and is not what is timed below.
from mlaforge.checkpoint import resolve
from support.gguf_file import save_gguf
from support.tiny_models import INDEX, shard


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
def test_rejects_a_missing_model(verb, name, words, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(words, verb, name, *(["out"] if verb == "convert" else []))


def test_rejects_a_file_as_model(refused, tmp_path, calibration_file):
    refused("is a file; give a model directory", "convert", calibration_file, tmp_path / "out")


@pytest.mark.parametrize("verb", ["convert", "plan"])
def test_a_hub_id_without_a_network(verb, refused, tmp_path):
    start = time.monotonic()
    words = ("'nobody/nothing'", "cannot be reached", "local model directory", ".gguf")
    refused(words, verb, "nobody/nothing", *([tmp_path / "out"] if verb == "convert" else []))
    assert time.monotonic() - start < 5


@pytest.fixture
def hub(tmp_path_factory, monkeypatch) -> Callable[[str], None]:
    """hub(address) sets the hub's address and disables offline mode in this process."""
    from huggingface_hub import constants

    def at(address: str) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", address)
        monkeypatch.setattr(resolve, "HUB_SECONDS", 1.0)

    return at


@pytest.mark.parametrize("answer", ["refuses", "stays silent"])
def test_an_unresponsive_hub_is_reported(answer, hub, refused, tmp_path):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if answer == "stays silent":
            listening.listen(8)
        hub(f"http://127.0.0.1:{listening.getsockname()[1]}")
        start = time.monotonic()
        refused(("cannot be reached", "local model directory"), "convert", "nobody/nothing", tmp_path / "out")
        assert time.monotonic() - start < 10


@pytest.mark.parametrize(("status", "code"), [(404, "RepoNotFound"), (401, "GatedRepo"), (500, "")])
def test_hub_errors_are_reported(status, code, hub, refused, tmp_path):
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


class Repository(http.server.BaseHTTPRequestHandler):
    """Minimal hub server of the directory `files`; `served` records the downloaded files."""

    files: Path
    served: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        place = self.path.partition("?")[0]
        names = sorted(path.relative_to(self.files).as_posix() for path in self.files.rglob("*") if path.is_file())
        if place.startswith("/api/models/"):
            entries = [{"type": "file", "path": n, "oid": "1" * 40, "size": 1} for n in names]
            info = {"id": "org/name", "sha": "c" * 40, "siblings": [{"rfilename": name} for name in names]}
            content = json.dumps(entries if "/tree/" in place else info).encode()
        else:
            name = place.partition(f"/resolve/{'c' * 40}/")[2]
            if name not in names:
                self.send_error(404, "EntryNotFound")
                return
            content = (self.files / name).read_bytes()
            if self.command == "GET":
                self.served.append(name)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Repo-Commit", "c" * 40)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def repository(hub, model) -> Iterator[type[Repository]]:
    """A hub with a model in three shards, and files for other runtimes."""
    directory = shard(model("llama"))
    for name in ("original/params.json", "original/model.safetensors", "openvino/config.json",
                 "checkpoint-5/model.jinja", "consolidated.safetensors", "pytorch_model.bin"):  # fmt: skip
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("{}")
    (directory / "USAGE_POLICY").write_text("be kind")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "rag.jinja").write_text("rag")
    handler = type("Handler", (Repository,), {"files": directory, "served": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub(f"http://127.0.0.1:{server.server_port}")
        yield handler
        server.shutdown()


def test_only_the_loaded_files_of_a_hub_model_are_fetched(repository):
    local = resolve.locate("org/name")
    foreign = ("original", "openvino", "checkpoint-5", "consolidated", "pytorch_model")
    assert not [name for name in repository.served if name.startswith(foreign)]
    fetched = {path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file()}
    assert {"USAGE_POLICY", "additional_chat_templates/rag.jinja", "tokenizer.json", INDEX} <= fetched
    assert len([name for name in fetched if name.endswith(".safetensors")]) == 3
    repository.served.clear()
    assert resolve.locate("org/name") == local and repository.served == []


@pytest.mark.parametrize("gone", ["model-00002-of-00003.safetensors", INDEX, "tokenizer.json"])
def test_an_incomplete_hub_model_is_completed_or_refused(gone, repository, refused, monkeypatch):
    from huggingface_hub import constants

    local = resolve.locate("org/name")
    (local / gone).unlink()
    repository.served.clear()
    assert resolve.locate("org/name") == local and (local / gone).is_file()
    (local / gone).unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    if gone != "tokenizer.json":
        lacking = "model.safetensors" if gone == INDEX else gone
        refused((f"lacks {lacking} of 'org/name'", "HF_HUB_OFFLINE"), "convert", "org/name", local.parent / "out")
    else:
        refused("no tokenizer", "generate", "org/name", "--dtype", "float32")


def test_find_config_fetches_only_the_config(repository):
    assert resolve.find_config("org/name")["model_type"] == "llama"
    assert repository.served == ["config.json"]


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


def test_libraries_draw_no_progress_bars_without_a_terminal(gguf_file, evaluation_file):
    """transformers draws one while it reads the tensors of a GGUF file."""
    words = [sys.executable, "-m", "mlaforge", "eval", str(gguf_file), "--text", str(evaluation_file), "--windows", "2"]
    done = subprocess.run([*words, "--seqlen", "64", "--device", "cpu"], capture_output=True, text=True)
    assert done.returncode == 0 and "dequantising" in done.stderr, done.stderr
    assert "\r" not in done.stderr and "%" not in done.stderr, done.stderr


def test_concurrent_users_dequantise_a_gguf_file_once(gguf_file, tree, tmp_path, capsys):
    """One dequantises, the other waits."""
    with ThreadPoolExecutor(2) as pool:
        directories = list(pool.map(resolve.from_gguf, [gguf_file] * 2))
    assert len(set(directories)) == 1 and (directories[0] / "config.json").is_file()
    said = capsys.readouterr().err
    assert said.count("dequantising") == said.count("waiting for another process") == 1, said
    assert sorted(path.name for path in (tmp_path / "home" / "dequantised").iterdir()) == [directories[0].name]


@pytest.mark.parametrize("share", [0.0, 0.00001, 0.0001, 0.001, 0.01, 0.05, 0.5, 0.999])
def test_a_truncated_gguf(share, gguf_file, refused, short, tmp_path):
    gguf_file.write_bytes(gguf_file.read_bytes()[: int(gguf_file.stat().st_size * share)])
    refused(("tiny.gguf", "cannot be read as GGUF"), "convert", gguf_file, tmp_path / "out", *short)


@pytest.mark.parametrize(
    ("bit", "words"), [(25, "cannot be read as GGUF"), (1719, "shape [96, 64], the header calls for [32864, 64]")]
)
def test_a_gguf_with_a_flipped_bit_in_its_header(bit, words, gguf_file, refused, short, tmp_path):
    content = bytearray(gguf_file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    gguf_file.write_bytes(content)
    refused(("tiny.gguf", words), "convert", gguf_file, tmp_path / "out", *short)


def test_rejects_a_file_that_is_not_gguf(gguf_file, refused, short, tmp_path):
    gguf_file.write_text("No GGUF, but a letter to my aunt. " * 100)
    refused(("tiny.gguf", "cannot be read as GGUF"), "convert", gguf_file, tmp_path / "out", *short)


def test_a_full_disk_during_dequantisation_is_reported(gguf_file, refused, short, small_disk, tmp_path, monkeypatch):
    monkeypatch.setenv("MLAFORGE_HOME", str(small_disk(2**16) / "home"))
    refused("the disk is full", "convert", gguf_file, tmp_path / "out", *short)
