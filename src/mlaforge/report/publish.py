"""`publish`: upload finished artifacts as one commit to a Hugging Face hub repository; a dry run without --push.

Only files named in the artifacts' manifests are uploaded, and only types that cannot run code when loaded; all others
are left out and listed. huggingface_hub manages the token ($HF_TOKEN, `hf auth login`): it is read here only to ensure
that no output, error or uploaded file contains it.
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

# Stage -> repository folder of its files.
PLACES = {
    "convert": "", "sparsify": "", "heal": "", "export_deepseek": "", "card": "", "draft train": "draft",
    "draft import": "draft", "draft export": "draft", "calibrate": "calibration",
}  # fmt: skip
# Architectures in the config of a draft head without a manifest.
HEADS = {"LlamaForCausalLMEagle3", "BlockDraftModel"}
KINDS = (
    ".safetensors", ".gguf", ".json", ".jsonl", ".yaml", ".yml", ".md", ".txt", ".jinja", ".png", ".html", ".model",
    "_mla.py",
)  # fmt: skip
NAMES = re.compile(r"(LICENSE|NOTICE|USE_POLICY)[\w.-]*")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz")
# First bytes of pickles: torch's are zip files; others begin with the protocol opcode.
PICKLE_PREFIXES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
# A hub token accidentally contained in a file.
TOKEN = re.compile(rb"hf_[A-Za-z0-9]{30,}")
WEIGHTS = (".safetensors", ".gguf")
# Text files that mlaforge writes, which may contain no local path; calibration text (.jsonl) may mention any path.
WRITTEN = (".json", ".yaml", ".yml", ".md", ".txt")


@dataclasses.dataclass(frozen=True)
class Item:
    """A file to upload: local file, path in the repository, size in bytes and SHA-256."""

    file: Path
    path: str
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Upload:
    """Files to upload to `repo`, and the files left out, with reasons."""

    repo: str
    items: tuple[Item, ...]
    left_out: dict[str, str]

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)

    def describe(self) -> dict[str, Any]:
        """The upload as plain JSON types."""
        files = [{**dataclasses.asdict(item), "file": str(item.file)} for item in self.items]
        return {"repo": self.repo, "bytes": self.bytes, "files": files, "left_out": self.left_out}


def pack(folders: list[Path], repo: str) -> Upload:
    """Collect the files that `push` would upload: checkpoints and cards to the repository's root, draft heads to
    draft/, calibration sets to calibration/.

    Raise UserError for a folder that is not a finished artifact of these kinds, weights that are not safetensors, two
    files with the same destination, or a file that contains a hub token or a path of this machine.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
        valid = "/" in repo
    except HFValidationError:
        valid = False
    if not valid:
        raise UserError(f"repo {repo!r} is not a hub repository; give OWNER/NAME, such as you/smollm2-mla")
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
    """Yield (file, path in the repository, reason to leave it out or "") of every entry of a folder."""
    if not folder.is_dir():
        raise UserError(f"folder {str(folder)!r} does not exist; give a result of convert, heal, calibrate or card")
    if folder.resolve().name.endswith(".partial"):
        raise UserError(f"{folder} is unfinished: rerun its command to finish it")
    manifest = Manifest.load(folder)
    stage, recorded = (manifest.stage, manifest.files) if manifest else (_head_stage(folder), None)
    if stage not in PLACES:
        origin = f"a result of {stage}" if stage else f"not an artifact of mlaforge (it has no {MANIFEST})"
        raise UserError(f"{folder} is {origin}; only these can be published: {', '.join(PLACES)}")
    if missing := sorted(name for name in recorded or () if not (folder / name).is_file()):
        raise UserError(f"{folder / missing[0]} is missing, though {MANIFEST} names it; recreate the artifact")
    place = PLACES[stage]
    # Chat templates are the only subfolder of a model directory.
    templates = folder / TEMPLATES
    entries = {path for path in folder.iterdir() if path != templates} | set(templates.glob("*"))
    for file in sorted(entries):
        name = file.relative_to(folder).as_posix()
        is_manifest = stage != "card" and name == MANIFEST
        reason = _reason(file, recorded is None or is_manifest or name in recorded)
        if not (place or reason) and file.suffix == ".safetensors" and not name.startswith("model"):
            reason = "not weights that the model loads"
        yield file, f"{place}/{name}" if place else name, reason


def _head_stage(folder: Path) -> str:
    """`draft train` if the folder is a draft head without a manifest, else ""."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return "draft train" if isinstance(config, dict) and HEADS & set(config.get("architectures") or ()) else ""


def _reason(file: Path, known: bool) -> str:
    """Why a file is left out, "" if it is uploaded. known: the manifest names it, or need not name it."""
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
        prefix = opened.read(4)
    if name.endswith(PICKLES) or (prefix.startswith(PICKLE_PREFIXES) and not name.endswith(WEIGHTS)):
        return "a pickle or an archive, which can run code when it is loaded: refused"
    if not known:
        return "not part of the artifact" if name != MANIFEST else "the card's manifest; the checkpoint has one"
    if not (name.endswith(KINDS) or NAMES.fullmatch(name)):
        return "a file type that is not published"
    return ""


def _check(file: Path) -> None:
    """Raise UserError for weights of another format than their name, and for a file that contains a hub token or a path
    of this machine. A tokenizer's vocabulary and the original's texts may contain any path."""
    from huggingface_hub import get_token

    if file.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="pt"):
                return
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is truncated or not safetensors; recreate it") from error
    if file.suffix == ".gguf":
        with file.open("rb") as opened:
            if opened.read(4) != b"GGUF":
                raise UserError(f"{file} is not GGUF; recreate it")
        return
    text, user_token = file.read_bytes(), (get_token() or "").encode()
    if TOKEN.search(text) or (user_token and user_token in text):
        raise UserError(f"{file} contains a hub token: remove it, and revoke the token if others could have seen it")
    if file.suffix not in WRITTEN or any(file.match(pattern) for pattern in COMPANIONS):
        return
    if place := ABSOLUTE_PATH.search(text.decode(errors="replace")):
        raise UserError(f"{file} contains {place[0]}, a path of this machine: recreate it, or keep only its last part")


def push(upload: Upload) -> str:
    """Upload as one commit, to a new private repository if there is none. Return the URL of the commit.

    Raise UserError if the hub or the network fails; the repository is then unchanged.
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
    # Raised outside the handler, so that the original error, which may quote the request, is not chained.
    raise UserError(f"nothing was uploaded: {redacted(reason, token)}; rerun the command to retry")


def redacted(text: str, token: str) -> str:
    """Replace the token, and anything that looks like one, by ***."""
    return TOKEN.sub(b"***", text.replace(token, "***").encode()).decode()


def table(upload: Upload) -> str:
    """Table of the files to upload with hashes and sizes in bytes, then the files left out with reasons."""
    lines = [f"{item.sha256}  {item.bytes:>14,}  {item.path}" for item in upload.items]
    lines += [f"left out: {path}: {reason}" for path, reason in upload.left_out.items()]
    if not any(item.path == "README.md" for item in upload.items):
        lines.append("no model card: run `mlaforge card FOLDER --out CARD` and add CARD to the folders")
    total = f"{len(upload.items)} files, {upload.bytes:,} bytes for {upload.repo}"
    return "\n".join([*lines, f"{total}; --push uploads them"])
