"""Artifacts: directories with a `manifest.json`, the only thing that stages exchange.

An artifact appears whole or not at all: it is written in a hidden sibling and renamed when complete. What made
it (stage, resolved config, hashes of its inputs) is its fingerprint; the same fingerprint is never made twice.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlaforge.runtime import Interrupted, Resumable, UserError, environment

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MANIFEST = "manifest.json"
# A place on somebody's machine, wherever it stands in a text: below a home or a drive, or below `/` at least two deep.
# /v1 is an API's and /dev, /proc and /sys are every Linux's; what follows a word or a slash is part of a longer one.
ABSOLUTE = re.compile(
    r"""(?<![\w./\\~*+<>,)}\]-])(?:~/|[A-Za-z]:[\\/]{1,2}|/(?!(?:v1|dev|proc|sys)/)[\w.@-]+/)"""
    r"""[\w.@-][^\s"'`,;|<>()\[\]{}]*"""
)
# In an unfinished artifact: what a resumable stage has finished, and the fingerprint of what it is making.
WORK, BEGUN = "work", "begun"


@dataclasses.dataclass
class Manifest:
    """What an artifact is and how it came to be.

    `config` and `inputs` make the fingerprint; `metrics` holds measured numbers only.
    """

    stage: str
    config: dict[str, Any]
    inputs: dict[str, Any]
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    files: list[str] = dataclasses.field(default_factory=list)
    # Whether it passed its criteria (`mlaforge eval --criteria`), and what was measured then.
    canonical: bool = False
    acceptance: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over stage, config, inputs and the version of mlaforge."""
        from mlaforge import __version__

        version = self.environment.get("mlaforge", __version__)
        what = json.dumps([self.stage, self.config, self.inputs, version], sort_keys=True, default=str)
        return hashlib.sha256(what.encode()).hexdigest()

    def save(self, directory: Path) -> None:
        self.environment = self.environment or environment()
        body = {**dataclasses.asdict(self), "fingerprint": self.fingerprint}
        (directory / MANIFEST).write_text(json.dumps(body, indent=1, default=str) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> Manifest | None:
        """The manifest of an artifact, or None where `directory` is not one (or its manifest cannot be read)."""
        try:
            body = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
            names = {f.name for f in dataclasses.fields(cls)}
            return cls(**{key: value for key, value in body.items() if key in names})
        except (OSError, ValueError, TypeError, AttributeError):
            return None


def artifacts_below(folder: Path) -> dict[str, Manifest | None]:
    """The artifacts below a folder by their path in it, None for one whose manifest cannot be read. What a stage is
    still at work on, or left when it was killed, is none. UserError where there is no such folder."""
    if not folder.is_dir():
        raise UserError(f"folder {str(folder)!r} does not exist; give the folder that holds the artifacts")
    named = {path.parent.relative_to(folder).as_posix(): path.parent for path in sorted(folder.rglob(MANIFEST))}
    return {name: Manifest.load(path) for name, path in named.items() if ".partial/" not in f"{name}/"}


def sha256(path: Path) -> str:
    """SHA-256 of a file, hex. Raises UserError where it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def record_name(place: str | Path) -> str:
    """How a manifest calls a file or folder: by its name. Where it lies is nobody's affair and must not matter to the
    fingerprint; a hash of what it holds stands beside the name. What is not on this disk (a hub id, `embedded`) is
    called as it is."""
    path = Path(place).expanduser()
    return Path(os.path.abspath(path)).name if path.exists() else str(place)


def record_names(config: DataclassInstance, *options: str) -> dict[str, str | list[str] | None]:
    """Those options of a stage that may be files or folders, or lists of them, as its manifest calls them."""
    places = {name: getattr(config, name) for name in options}
    return {
        name: [*map(record_name, place)] if isinstance(place, tuple) else place and record_name(place)
        for name, place in places.items()
    }


def record_place(path: str | Path) -> str:
    """How results of a measurement call a file: relative to the working folder, by its name where it lies outside."""
    whole, here = Path(os.path.abspath(Path(path).expanduser())), Path.cwd()
    return whole.relative_to(here).as_posix() if whole.is_relative_to(here) else whole.name


def record_text(text: str) -> str:
    """A command or another program's words, without the folders of this machine."""
    return ABSOLUTE.sub(lambda path: record_place(path[0]), text)


def finished(out: Path, wanted: Manifest, overwrite: bool = False) -> Manifest | None:
    """The manifest at `out` if that artifact is what `wanted` would make again and all its files are there.

    None means that it is to be made. Raises UserError if `out` exists and is something else: only with
    `overwrite` another artifact is replaced, and what mlaforge did not make never is.
    """
    if not out.exists() and not out.is_symlink():
        return None
    if out.is_dir() and not any(out.iterdir()):
        return None
    existing = Manifest.load(out) if out.is_dir() else None
    if existing is None or not (isinstance(existing.config, dict) and isinstance(existing.inputs, dict)):
        raise UserError(f"{out} exists and was not made by mlaforge; choose another output directory")
    complete = all((out / name).is_file() for name in existing.files)
    if existing.fingerprint == wanted.fingerprint and complete:
        return existing
    if overwrite:
        if foreign := sorted({path.name for path in out.iterdir()} - {*existing.files, MANIFEST}):
            raise UserError(f"{out} also holds {foreign[0]}, which mlaforge did not make; move it away first")
        return None
    what = _difference(existing, wanted) if complete else "some of its files are gone"
    raise UserError(
        f"{out} holds another {existing.stage} result ({what}); choose another output directory, or pass --overwrite"
    )


def _difference(existing: Manifest, wanted: Manifest) -> str:
    if existing.stage != wanted.stage:
        return f"stage {existing.stage}, not {wanted.stage}"
    old, new = ({**_flat(manifest.config), **_flat(manifest.inputs)} for manifest in (existing, wanted))
    for key in dict.fromkeys([*old, *new]):
        if old.get(key) != new.get(key):
            was, now = (str(values.get(key))[:60] for values in (old, new))
            return f"{key} was {was}, now {now}"
    return "made by another version of mlaforge"


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"model": {"path": "x"}} -> {"model path": "x"}, as a person would name it."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        # As JSON has it.
        plain = list(value) if isinstance(value, tuple) else value
        flat |= _flat(plain, f"{prefix}{key} ") if isinstance(plain, dict) else {prefix + key: plain}
    return flat


@contextmanager
def writing(out: Path, manifest: Manifest, resumable: bool = False) -> Iterator[Path]:
    """Yields a directory beside `out` to write into; on success writes the manifest and renames it to `out`.

    Whether `out` may be replaced is for `finished` to say, before any work. On any failure the directory is removed
    and `out` stays as it was; what a killed process left is removed by the next one. A `resumable` stage goes on
    with what it finds there, if it was begun with the same fingerprint; for it, Ctrl-C and a full disk leave the
    directory as a kill would. It keeps what it needs for that, and nothing that belongs to the artifact, in WORK.
    """
    # A link to a directory stays; what it points to is replaced.
    out = out.resolve()
    partial, former = out.with_name(f".{out.name}.partial"), out.with_name(f".{out.name}.former.partial")
    absent = [parent for parent in out.parents if not parent.exists()]
    work, begun = partial / WORK, partial / WORK / BEGUN
    try:
        if partial.exists() and not (resumable and begun.is_file() and begun.read_text() == manifest.fingerprint):
            shutil.rmtree(partial)
        if former.exists():
            shutil.rmtree(former)
        partial.mkdir(parents=True, exist_ok=resumable)
        if resumable:
            work.mkdir(exist_ok=True)
            begun.write_text(manifest.fingerprint)
        yield partial
        manifest.files = sorted({path.name for path in partial.iterdir()} - {WORK, MANIFEST})
        manifest.save(partial)
        if resumable:
            begun.unlink()
            shutil.rmtree(work)
        if out.is_dir():
            os.replace(out, former)
        os.replace(partial, out)
        shutil.rmtree(former, ignore_errors=True)
    except BaseException as error:
        if former.exists() and not out.exists():
            os.replace(former, out)
        system = error if isinstance(error, OSError) else OSError()
        # safetensors hides the number of a full disk in its message.
        full = system.errno in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(error)
        kept = resumable and begun.is_file() and (full or isinstance(error, KeyboardInterrupt | Resumable))
        for left in (former,) if kept else (partial, former):
            shutil.rmtree(left, ignore_errors=True)
        for parent in () if kept else absent:
            with suppress(OSError):
                parent.rmdir()
        resume = f"the same command goes on from what {partial} holds; delete it to give that up"
        if kept and isinstance(error, KeyboardInterrupt):
            raise Interrupted(resume) from error
        if full:
            free = shutil.disk_usage(next(p for p in out.parents if p.exists())).free
            raise UserError(
                f"the disk is full ({free / 2**30:.1f} GiB free at {out.parent}): free some room or choose an output "
                f"on another disk; {resume if kept else 'nothing was written'}"
            ) from error
        if system.filename and (Path(system.filename).is_relative_to(partial) or Path(system.filename) in absent):
            raise UserError(f"cannot write {out}: {system.strerror}; choose another output directory") from error
        raise
