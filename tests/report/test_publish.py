"""Uploads to the hub: included and excluded files, and secrecy of the token, against a local stand-in for the hub."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle  # written, to be refused
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mlaforge.artifact import Manifest, writing
from mlaforge.report import publish
from mlaforge.runtime import UserError
from support import recorded

TOKEN = "hf_" + "NeverToBeSeenByAnybody" * 2
REPO = "someone/tiny-mla"


def artifact(out: Path, stage: str, **files: Any) -> Path:
    """A finished artifact. files: by name with __ for a dot; bytes, text, or tensors."""
    with writing(out, Manifest(stage, {}, {}, environment=recorded.MACHINE)) as partial:
        for name, content in files.items():
            path = partial / name.replace("__", ".")
            if isinstance(content, dict):
                save_file(content, path)
            elif isinstance(content, bytes):
                path.write_bytes(content)
            else:
                path.write_text(content)
    return out


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return artifact(
        tmp_path / "model", "convert", config__json="{}", modeling_mla__py="pass\n", LICENSE="free",
        model__safetensors={"w": torch.ones(3)}, last_step__safetensors={"w": torch.ones(3)},
    )  # fmt: skip


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return artifact(tmp_path / "golden", "calibrate", swa__jsonl='{"text": "a"}\n', datasheet__md="# sets\n")


def test_destinations_in_the_repository(model: Path, golden: Path, tmp_path: Path) -> None:
    draft = tmp_path / "head"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps({"architectures": ["BlockDraftModel"]}))
    save_file({"fc": torch.ones(2)}, draft / "model.safetensors")
    card = artifact(tmp_path / "card", "card", README__md="# tiny\n", report__json="{}")
    upload = publish.pack([model, golden, draft, card], REPO)
    assert [item.path for item in upload.items] == [
        "LICENSE", "README.md", "calibration/datasheet.md", "calibration/manifest.json", "calibration/swa.jsonl",
        "config.json", "draft/config.json", "draft/model.safetensors", "manifest.json", "model.safetensors",
        "modeling_mla.py", "report.json",
    ]  # fmt: skip
    for item in upload.items:
        content = item.file.read_bytes()
        assert (item.bytes, item.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    reasons = {Path(name).name: reason for name, reason in upload.left_out.items()}
    assert "not weights" in reasons.pop("last_step.safetensors") and "the card's manifest" in reasons.pop(
        "manifest.json"
    )
    assert reasons == {}


def test_excluded_files(model: Path) -> None:
    (model / ".cache").mkdir()
    (model / "__pycache__").mkdir()
    (model / "work.partial").mkdir()
    (model / "notes.md").write_text("mine")
    (model / "weights.bin").write_bytes(pickle.dumps([1]))
    (model / "tokenizer.json").symlink_to("/etc/hostname")
    manifest = Manifest.load(model)
    assert manifest is not None
    manifest.files |= dict.fromkeys(("weights.bin", "disguised.json", "torch.json", "script.py", "run.sh"), "")
    (model / "disguised.json").write_bytes(pickle.dumps([1], protocol=4))
    torch.save({"a": torch.ones(1)}, model / "torch.json")
    (model / "script.py").write_text("import os\n")
    (model / "run.sh").write_text("true\n")
    manifest.save(model)
    upload = publish.pack([model], REPO)
    assert {item.path for item in upload.items} == {
        "LICENSE", "config.json", "manifest.json", "model.safetensors", "modeling_mla.py",
    }  # fmt: skip
    reasons = {Path(name).name: reason for name, reason in upload.left_out.items()}
    for name in ("weights.bin", "disguised.json", "torch.json"):
        assert "pickle" in reasons[name]
    assert reasons[".cache"] == reasons["__pycache__"] == "hidden or a cache"
    assert reasons["work.partial"] == "unfinished" and reasons["tokenizer.json"] == "a link"
    assert reasons["notes.md"] == "not part of the artifact"
    assert reasons["script.py"] == reasons["run.sh"] == "a file type that is not published"


def test_rejects_invalid_folders(model: Path, golden: Path, tmp_path: Path) -> None:
    for repo in ("tiny", "a/b/c", "some one/x", "someone/", "-/x"):
        with pytest.raises(UserError, match="OWNER/NAME"):
            publish.pack([model], repo)
    with pytest.raises(UserError, match="does not exist"):
        publish.pack([tmp_path / "nowhere"], REPO)
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match="not an artifact of mlaforge"):
        publish.pack([tmp_path / "mine"], REPO)
    with pytest.raises(UserError, match="a result of eval"):
        publish.pack([artifact(tmp_path / "eval", "eval")], REPO)
    with pytest.raises(UserError, match=r"would both be config\.json"):
        publish.pack([model, artifact(tmp_path / "other", "heal", config__json="{}")], REPO)
    with pytest.raises(UserError, match="unfinished"):
        publish.pack([Path(golden.rename(tmp_path / ".golden.partial"))], REPO)
    (model / "config.json").unlink()
    with pytest.raises(UserError, match="is missing"):
        publish.pack([model], REPO)


@pytest.mark.parametrize("content", [b"", b"\x80\x04pickle", pickle.dumps(["x"]), b"\xff" * 64])
def test_rejects_weights_of_another_format(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="not safetensors"):
        publish.pack([model], REPO)


def test_rejects_files_with_a_token(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "config.json").write_text(json.dumps({"note": TOKEN}))
    with pytest.raises(UserError, match="contains a hub token") as refused:
        publish.pack([model], REPO)
    assert TOKEN not in str(refused.value)
    # The user's token may have another form.
    monkeypatch.setenv("HF_TOKEN", "another-kind-of-token")
    (model / "config.json").write_text('{"note": "another-kind-of-token"}')
    with pytest.raises(UserError, match="contains a hub token"):
        publish.pack([model], REPO)


class Hub:
    """The part of the hub's HTTP API that a commit uses. refuse: path that answers 403, quoting the token."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str, bytes]] = []
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.refuse: str | None = None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body, path = self.rfile.read(size), self.path.split("?")[0]
                bearer = self.headers.get("Authorization") or ""
                hub.requests.append((self.command, path, bearer, body))
                if hub.refuse and hub.refuse in path:
                    self.answer({"error": f"no rights with {bearer}"}, 403, f"no rights with {bearer}")
                elif (reply := hub.reply(path, body)) is not None:
                    self.answer(reply)
                else:
                    self.answer({"error": "not found"}, 404)

            do_GET = do_PUT = do_POST

            def answer(self, body: Any, status: int = 200, message: str = "") -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                if message:
                    self.send_header("X-Error-Message", message)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def reply(self, path: str, body: bytes) -> Any:
        if path == "/api/repos/create":
            return {"url": f"{self.url}/{REPO}", "name": REPO}
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            mode = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            return {"files": [{"path": n, "uploadMode": mode[n], "shouldIgnore": False, "oid": None} for n in names]}
        if path.endswith("/objects/batch"):
            objects = json.loads(body)["objects"]
            put = [{**o, "actions": {"upload": {"href": f"{self.url}/lfs/{o['oid']}", "header": {}}}} for o in objects]
            return {"transfer": "basic", "objects": put}
        if path.startswith("/lfs/"):
            self.objects[path.removeprefix("/lfs/")] = body
            return {}
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "lfsFile":
                    self.files[line["value"]["path"]] = self.objects[line["value"]["oid"]]
            return {"success": True, "commitOid": "c" * 40, "commitUrl": f"{self.url}/{REPO}/commit/{'c' * 40}"}
        return None


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    import huggingface_hub.constants

    hub = Hub()
    Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    # Xet uploads to storage servers of its own, which this hub does not have; it falls back to plain HTTP.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def unseen(tmp_path: Path, *texts: str) -> None:
    """Assert that the token is in none of the texts and files."""
    assert not any(TOKEN in text for text in texts)
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and TOKEN.encode() in p.read_bytes()]


def test_dry_run_uploads_nothing(cli: Callable[..., Any], model: Path, hub: Hub, tmp_path: Path) -> None:
    done = cli("publish", model, "--repo", REPO)
    assert done.exit_code == 0, done.stderr
    assert hub.requests == []
    sha = hashlib.sha256((model / "config.json").read_bytes()).hexdigest()
    assert f"{sha}               2  config.json" in done.stdout and "left out: " in done.stdout
    assert "no model card" in done.stdout and "--push uploads them" in done.stdout
    unseen(tmp_path, done.stdout, done.stderr)
    listing = json.loads(cli("publish", model, "--repo", REPO, "--json").stdout)
    assert listing["repo"] == REPO and listing["files"][0]["path"] == "LICENSE" and len(listing["left_out"]) == 1


def test_push(cli: Callable[..., Any], model: Path, golden: Path, hub: Hub, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("DEBUG")
    done = cli("publish", model, golden, "--repo", REPO, "--push")
    assert done.exit_code == 0, done.stderr
    assert f"{hub.url}/{REPO}/commit/{'c' * 40}" in done.stdout
    shipped = {item.path: item.file.read_bytes() for item in publish.pack([model, golden], REPO).items}
    assert hub.files == shipped and len(shipped) == 8
    created = json.loads(next(body for _, path, _, body in hub.requests if path == "/api/repos/create"))
    assert created.get("private") is True or created.get("visibility") == "private"
    # One commit; the token is sent to the hub only.
    assert sum("/commit/" in path for _, path, _, _ in hub.requests) == 1
    hub_paths = ("/api/repos/", "/api/models/", f"/{REPO}")
    bearers = {path: bearer for _, path, bearer, _ in hub.requests if path.startswith(hub_paths)}
    assert len(bearers) == 4 and set(bearers.values()) == {f"Bearer {TOKEN}"}
    assert not any(TOKEN.encode() in body or TOKEN in path for _, path, _, body in hub.requests)
    unseen(tmp_path, done.stdout, done.stderr, caplog.text)


@pytest.mark.parametrize("refuse", ["/api/repos/create", "/preupload/", "/objects/batch", "/commit/"])
def test_errors_do_not_contain_the_token(
    cli: Callable[..., Any], model: Path, hub: Hub, tmp_path: Path, refuse: str
) -> None:
    hub.refuse = refuse
    done = cli("publish", model, "--repo", REPO, "--push")
    assert done.exit_code == 2 and hub.files == {}
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("mlaforge:")]
    assert "nothing was uploaded" in line and "Traceback" not in done.stderr
    unseen(tmp_path, done.stdout, done.stderr)
    with pytest.raises(UserError) as refused:
        publish.push(publish.pack([model], REPO))
    unseen(tmp_path, "".join(traceback.format_exception(refused.value)))
    assert refused.value.__cause__ is None and refused.value.__context__ is None


def test_requires_a_token(model: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match="set HF_TOKEN"):
        publish.push(publish.pack([model], REPO))
    assert hub.requests == []


def test_redacted() -> None:
    assert publish.redacted(f"a {TOKEN} b secret c", "secret") == "a *** b *** c"
