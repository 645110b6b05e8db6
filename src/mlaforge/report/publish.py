"""`publish`: finished artifacts as one commit to a repository of the Hugging Face hub; without --push only shown.

What goes is what the artifacts' manifests name, of kinds of files that cannot run code when they are loaded; all else
is left out and listed. The token is huggingface_hub's affair ($HF_TOKEN, `hf auth login`): it is read here only to make
sure that it stands in nothing that is shown, raised or sent.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlaforge.artifact import ABSOLUTE_PATH, MANIFEST, Manifest, sha256
from mlaforge.checkpoint.reader import COMPANIONS, TEMPLATES
from mlaforge.runtime import UserError, progress, version

# Stage -> the folder of the repository that its files go to.
PLACES = {
    "convert": "", "sparsify": "", "heal": "", "export_deepseek": "", "card": "", "draft train": "draft",
    "draft import": "draft", "draft export": "draft", "calibrate": "calibration",
}  # fmt: skip
# What a draft head without a manifest says in its config.
HEAD = "LlamaForCausalLMEagle3"
KINDS = (
    ".safetensors", ".gguf", ".json", ".jsonl", ".yaml", ".yml", ".md", ".txt", ".jinja", ".png", ".html", ".model",
    "_mla.py",
)  # fmt: skip
NAMES = re.compile(r"(LICENSE|NOTICE|USE_POLICY)[\w.-]*")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz")
# How pickles begin: torch's are zip files; a protocol's opcode stands first in the others.
BEGINNINGS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
# A token of the hub, as it would stand in a file by mistake.
TOKEN = re.compile(rb"hf_[A-Za-z0-9]{30,}")
WEIGHTS = (".safetensors", ".gguf")
# What mlaforge itself writes to be read. Calibration text (.jsonl) may speak of any path.
WRITTEN = (".json", ".yaml", ".yml", ".md", ".txt")


@dataclasses.dataclass(frozen=True)
class Item:
    """A file that goes: where it lies, its path in the repository, its size in bytes and its SHA-256."""

    file: Path
    path: str
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Upload:
    """What goes to `repo`, and what of the folders does not, with the reason."""

    repo: str
    items: tuple[Item, ...]
    left_out: dict[str, str]

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)

    def describe(self) -> dict[str, Any]:
        """As plain JSON types."""
        files = [{**dataclasses.asdict(item), "file": str(item.file)} for item in self.items]
        return {"repo": self.repo, "bytes": self.bytes, "files": files, "left_out": self.left_out}


def pack(folders: list[Path], repo: str) -> Upload:
    """What `push` would send: of checkpoints and cards to the repository's root, of drafts to draft/, of calibration
    sets to calibration/.

    Raises UserError for a folder that is no finished artifact of such a kind, for weights that are not safetensors,
    for two files of one place, and for a file that holds a token of the hub or a path of this machine.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
        named = "/" in repo
    except HFValidationError:
        named = False
    if not named:
        raise UserError(f"repo {repo!r} is no name on the hub; give OWNER/NAME, such as you/smollm2-mla")
    by_place: dict[str, tuple[Path, str]] = {}
    left_out: dict[str, str] = {}
    for folder in folders:
        for file, place, reason in _files(folder):
            if reason:
                left_out[str(file)] = reason
            elif place in by_place:
                raise UserError(f"{by_place[place][0]} and {file} would both be {place} of {repo}; publish one of them")
            else:
                by_place[place] = file, place
    items = []
    for file, place in progress(list(by_place.values()), "hash", len(by_place)):
        _check(file)
        items.append(Item(file, place, file.stat().st_size, sha256(file)))
    return Upload(repo, tuple(sorted(items, key=lambda item: item.path)), left_out)


def _files(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """Of every entry of a folder: the file, its path in the repository, and the reason where it stays here."""
    if not folder.is_dir():
        raise UserError(f"folder {str(folder)!r} does not exist; give what convert, heal, calibrate or card wrote")
    if folder.resolve().name.endswith(".partial"):
        raise UserError(f"{folder} is unfinished: finish it with the command that began it")
    manifest = Manifest.load(folder)
    stage, whole = (manifest.stage, manifest.files) if manifest else (_head(folder), None)
    if stage not in PLACES:
        origin = f"a result of {stage}" if stage else f"not made by mlaforge (it has no {MANIFEST})"
        raise UserError(f"{folder} is {origin}; what can be published: {', '.join(PLACES)}")
    if gone := sorted(name for name in whole or () if not (folder / name).is_file()):
        raise UserError(f"{folder / gone[0]} is gone, though its {MANIFEST} names it; make the artifact again")
    place = PLACES[stage]
    # The one folder that a model directory has.
    templates = folder / TEMPLATES
    entries = {path for path in folder.iterdir() if path != templates} | set(templates.glob("*"))
    for file in sorted(entries):
        name = file.relative_to(folder).as_posix()
        own = stage != "card" and name == MANIFEST
        reason = _reason(file, whole is None or own or name in whole)
        if not (place or reason) and file.suffix == ".safetensors" and not name.startswith("model"):
            reason = "no weights that the model loads"
        yield file, f"{place}/{name}" if place else name, reason


def _head(folder: Path) -> str:
    """The stage that a draft head without a manifest stands for; "" for what is none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return "draft train" if isinstance(config, dict) and HEAD in (config.get("architectures") or ()) else ""


def _reason(file: Path, known: bool) -> str:
    """Why a file is left out, "" where it goes. known: its manifest names it, or need not."""
    name = file.name
    if name.endswith(".partial"):
        return "unfinished"
    if name.startswith(".") or name == "__pycache__":
        return "hidden or a cache"
    if file.is_symlink():
        return "a link"
    if not file.is_file():
        return "a folder"
    with file.open("rb") as opened:
        begins = opened.read(4)
    if name.endswith(PICKLES) or (begins.startswith(BEGINNINGS) and not name.endswith(WEIGHTS)):
        return "a pickle or an archive, which can run code when it is loaded: refused"
    if not known:
        return "no part of the artifact" if name != MANIFEST else "a card's own; the checkpoint has one"
    if not (name.endswith(KINDS) or NAMES.fullmatch(name)):
        return "no kind of file that is published"
    return ""


def _check(file: Path) -> None:
    """Raises UserError for weights that are not what their name says, and for a file that holds a token or that says
    where on this machine something lies. A tokenizer's vocabulary and the original's texts may hold anything."""
    from huggingface_hub import get_token

    if file.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="pt"):
                return
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is truncated or not safetensors; make it again") from error
    if file.suffix == ".gguf":
        with file.open("rb") as opened:
            if opened.read(4) != b"GGUF":
                raise UserError(f"{file} is not GGUF; make it again")
        return
    text, own = file.read_bytes(), (get_token() or "").encode()
    if TOKEN.search(text) or (own and own in text):
        raise UserError(f"{file} holds a token of the hub: take it out, and revoke it if anybody else could see it")
    if file.suffix not in WRITTEN or any(file.match(pattern) for pattern in COMPANIONS):
        return
    if place := ABSOLUTE_PATH.search(text.decode(errors="replace")):
        raise UserError(f"{file} names {place[0]}, a path of this machine: make it again, or put its last part there")


def push(upload: Upload) -> str:
    """Sends it as one commit, into a private repository where there is none yet; returns the commit's address.

    Raises UserError where the hub or the network refuses; then nothing has changed there.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    token = get_token()
    if not token:
        raise UserError("the hub needs a token: set HF_TOKEN, or log in once with `hf auth login`")
    api = HfApi()
    try:
        api.create_repo(upload.repo, private=True, exist_ok=True)
        adds = [CommitOperationAdd(path_in_repo=item.path, path_or_fileobj=item.file) for item in upload.items]
        commit = api.create_commit(upload.repo, adds, commit_message=f"Published by mlaforge {version()}")
    except (HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled, OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
    else:
        return str(commit.commit_url)
    # Outside the handler: the error, which may quote the request, is not chained to ours.
    raise UserError(f"the hub took nothing: {redacted(reason, token)}; the same command tries again")


def redacted(text: str, token: str) -> str:
    """`text` without the token, nor anything that looks like one."""
    return TOKEN.sub(b"***", text.replace(token, "***").encode()).decode()


def table(upload: Upload) -> str:
    """What would go where, with sizes in bytes and hashes; then what stays here, and why."""
    lines = [f"{item.sha256}  {item.bytes:>14,}  {item.path}" for item in upload.items]
    lines += [f"left out: {path}: {reason}" for path, reason in upload.left_out.items()]
    if not any(item.path == "README.md" for item in upload.items):
        lines.append("no model card: `mlaforge card FOLDER --out CARD`, and give CARD too")
    total = f"{len(upload.items)} files, {upload.bytes:,} bytes for {upload.repo}"
    return "\n".join([*lines, f"{total}; --push sends them"])
