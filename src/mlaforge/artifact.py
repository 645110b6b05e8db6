"""Artifacts: directories with a `manifest.json`, the only thing that stages exchange.

An artifact appears whole or not at all: it is written in a hidden sibling, by one process at a time, and renamed when
complete. What made it (stage, resolved config, hashes of its inputs) is its fingerprint; the same fingerprint is never
made twice.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlaforge.runtime import Interrupted, Resumable, UserError, environment, interrupted, log, progress

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MANIFEST = "manifest.json"
# A place on somebody's machine, wherever it stands in a text: below a home or a drive, or below `/` at least two deep.
# /v1 is an API's and /dev, /proc and /sys are every Linux's; what follows a word or a slash is part of a longer one.
ABSOLUTE = re.compile(
    r"""(?<![\w./\\~*+<>,)}\]-])(?:~/|[A-Za-z]:[\\/]{1,2}|/(?!(?:v1|dev|proc|sys)/)[\w.@-]+/)"""
    r"""[\w.@-][^\s"'`,;|<>()\[\]{}]*"""
)
# In an unfinished artifact, a folder: the lock of the process that makes it, and of a resumable stage what it has
# finished and the fingerprint of what it is making.
WORK, LOCK, BEGUN = "work", "lock", "begun"
# What a file is called until it is whole.
UNFINISHED = ".unfinished"
HALF_MANIFEST = f".{MANIFEST}{UNFINISHED}"
# What a file system answers that has no locks.
LOCKLESS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


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
    # Every file beside the manifest -> its SHA-256; "" where an older version of mlaforge recorded none.
    files: dict[str, str] = dataclasses.field(default_factory=dict)
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
        half = directory / HALF_MANIFEST
        half.write_text(json.dumps(body, indent=1, default=str) + "\n", encoding="utf-8")
        os.replace(half, directory / MANIFEST)

    @classmethod
    def load(cls, directory: Path) -> Manifest | None:
        """The manifest of an artifact, or None where `directory` is not one (or its manifest cannot be read)."""
        try:
            return cls.from_dict(json.loads((directory / MANIFEST).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return None

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> Manifest:
        """The manifest that a JSON object describes. Raises TypeError or AttributeError where it describes none."""
        names = {f.name for f in dataclasses.fields(cls)}
        manifest = cls(**{key: value for key, value in body.items() if key in names})
        if isinstance(manifest.files, list):
            manifest.files = dict.fromkeys(manifest.files, "")
        return manifest


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
    if path.exists() and not path.is_file():
        # A pipe would be waited for, for ever.
        raise UserError(f"{path} is no file")
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


def existing(out: Path, reads: Iterable[str | Path | None] = ()) -> Manifest | None:
    """The manifest of the artifact at `out`, None where there is nothing.

    Raises UserError where `out` is what mlaforge did not make, or is one of the folders that it is made from, or lies
    in one (`reads`; files and names that are no place at all may be among them): an input is never written to.
    """
    for place in reads:
        folder = Path(place or "").expanduser()
        if place and folder.is_dir() and out.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{out} is or lies in {folder}, which is read and never written to; choose another output")
    _tidy(out.resolve())
    if not out.exists() and not out.is_symlink():
        return None
    if out.is_dir() and not any(out.iterdir()):
        return None
    found = Manifest.load(out) if out.is_dir() else None
    if found is None or not (isinstance(found.config, dict) and isinstance(found.inputs, dict)):
        raise UserError(f"{out} exists and was not made by mlaforge; choose another output directory")
    return found


def finished(
    out: Path, wanted: Manifest, overwrite: bool = False, reads: Iterable[str | Path | None] = ()
) -> Manifest | None:
    """The manifest at `out` if that artifact is what `wanted` would make again and all its files are there.

    None means that it is to be made. Raises UserError as `existing` does, and if `out` is something else, or an
    interrupted run with other options is there: only with `overwrite` another artifact is replaced.
    """
    if (found := existing(out, reads)) is None:
        if not overwrite:
            _keep_interrupted(out, wanted)
        return None
    complete = all((out / name).is_file() for name in found.files)
    if found.fingerprint == wanted.fingerprint and complete:
        return found
    if overwrite:
        if foreign := sorted({*_files(out)} - {*found.files, MANIFEST, HALF_MANIFEST}):
            raise UserError(f"{out} also holds {foreign[0]}, which mlaforge did not make; move it away first")
        return None
    what = _difference(found, wanted) if complete else "some of its files are gone"
    raise UserError(
        f"{out} holds another {found.stage} result ({what}); choose another output directory, or pass --overwrite"
    )


def _keep_interrupted(out: Path, wanted: Manifest) -> None:
    """Raises UserError where a run with other options or inputs was interrupted: hours of work may lie there."""
    partial = unfinished(out.resolve())
    begun = partial / WORK / BEGUN
    if begun.is_file() and begun.read_text() != wanted.fingerprint:
        with locked(partial / WORK / LOCK, str(out)):
            raise UserError(
                f"{partial} holds the work of an interrupted run with other options or inputs; repeat that "
                "command to go on, choose another output directory, or pass --overwrite to discard it"
            )


def _files(directory: Path) -> list[str]:
    """The files below a directory, sorted, as paths relative to it with `/`."""
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir())


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


def unfinished(out: Path) -> Path:
    """Where the artifact `out` is written until it is complete. A link to a directory stays; what it points to is
    replaced."""
    resolved = out.resolve()
    return resolved.with_name(f".{resolved.name}.partial")


def _former(out: Path) -> Path:
    """Where what is replaced waits until the new result has its name."""
    return out.with_name(f".{out.name}.former.partial")


def _tidy(out: Path) -> None:
    """Ends what a process was at when it was killed in the very last moment of `writing`: between the two renames, or
    before what was replaced and its work were removed."""
    if not out.exists():
        with suppress(OSError):
            os.replace(_former(out), out)
    else:
        shutil.rmtree(_former(out), ignore_errors=True)
    if (out / MANIFEST).is_file():
        if (out / WORK / LOCK).is_file():
            _remove(out / WORK)
        with suppress(OSError):
            # What is still there is not ours, and not empty.
            (out / WORK).rmdir()


def _remove(work: Path) -> None:
    """A work folder, the lock last: without it nobody could tell that the folder is ours."""
    with suppress(OSError):
        for path in work.iterdir():
            if path.name != LOCK:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def locked(path: Path, what: str, wait: bool = False) -> Iterator[None]:
    """Holds the file `path` as a lock that dies with this process; it is made for this and removed after, and so are
    its folders, where nothing else has come into them.

    what: what only one process may be at work on at a time, in words. Where another process is: UserError, or with
    `wait` as long as it takes.
    """
    with ExitStack() as opened:
        opened.callback(_remove_empty, [parent for parent in path.parents if not parent.exists()])
        while True:
            _make(path.parent)
            try:
                file = opened.enter_context(path.open("a"))
            except FileNotFoundError:
                # Its folder has been renamed since, because what was made there is complete.
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise UserError(f"another process is at work on {what}; let it end first") from None
                log(f"waiting for another process that is at work on {what}")
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in LOCKLESS:
                    raise
                log(f"this file system has no locks: see to it that no other process is at work on {what}")
            # A lock on a file that its last owner has removed or renamed keeps nobody out.
            if _same(file.fileno(), path):
                break
            file.close()
        try:
            yield
        finally:
            if _same(file.fileno(), path):
                path.unlink()


def _make(folder: Path) -> None:
    """mkdir while others make the same folder and remove it when it is empty: between its own looks it may come or
    go."""
    for _ in range(100):
        with suppress(FileExistsError, FileNotFoundError):
            folder.mkdir(parents=True, exist_ok=True)
            return
    folder.mkdir(parents=True, exist_ok=True)


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _same(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def writing(out: Path, manifest: Manifest, resumable: bool = False) -> Iterator[Path]:
    """Yields a directory beside `out` to write into; on success writes the manifest and renames it to `out`.

    Whether `out` may be replaced is for `finished` to say, before any work. On any failure the directory is removed
    and `out` stays as it was; what a killed process left is removed by the next one, and UserError where another one
    is at work on `out`. A `resumable` stage goes on with what it finds there, if it was begun with the same
    fingerprint, and says so; for it, Ctrl-C and a full disk leave the directory as a kill would. It keeps what it needs
    for that, and nothing that belongs to the artifact, in WORK.
    """
    out = out.resolve()
    partial, former = unfinished(out), _former(out)
    absent = [parent for parent in out.parents if not parent.exists()]
    begun, ours = partial / WORK / BEGUN, False
    with ExitStack() as held:
        try:
            held.enter_context(locked(partial / WORK / LOCK, str(out)))
            ours = True
            if resumable and begun.is_file() and begun.read_text() == manifest.fingerprint:
                log(_resumed(out, partial))
            else:
                _empty(partial)
                if resumable:
                    begun.write_text(manifest.fingerprint)
            if former.exists():
                shutil.rmtree(former)
            yield partial
            written = set(_files(partial)) - {MANIFEST, HALF_MANIFEST}
            names = sorted(name for name in written if not name.startswith(f"{WORK}/"))
            manifest.files = {name: sha256(partial / name) for name in progress(names, "hash")}
            manifest.save(partial)
            # safetensors writes files that only their owner can read.
            mode = (partial / MANIFEST).stat().st_mode
            for name in names:
                (partial / name).chmod(mode)
            _appear(partial, out)
        except BaseException as error:
            full, stopped = disk_is_full(error), interrupted(error)
            kept = ours and begun.is_file() and (full or stopped or isinstance(error, Resumable))
            if ours:
                if former.exists() and not out.exists():
                    os.replace(former, out)
                for left in (former,) if kept else (partial, former):
                    shutil.rmtree(left, ignore_errors=True)
            resume = f"the same command goes on from what {partial} holds; delete it to give that up"
            if kept and stopped:
                raise Interrupted(resume) from error
            if full:
                choose = "or choose an output on another disk"
                raise UserError(full_disk(out.parent, choose, resume if kept else "nothing was written")) from error
            place = error.filename if isinstance(error, OSError) else None
            if place and (Path(place).is_relative_to(partial) or Path(place) in absent):
                assert isinstance(error, OSError)
                raise UserError(f"cannot write {out}: {error.strerror}; choose another output directory") from error
            raise


def disk_is_full(error: BaseException) -> bool:
    """Whether that is what an error says."""
    # safetensors hides the number in its message.
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(error)


def full_disk(folder: Path, choose: str, then: str) -> str:
    """What a user is told whose disk is full at `folder`, which need not exist."""
    free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
    return f"the disk is full ({free / 2**30:.1f} GiB free at {folder}): free some room {choose}; {then}"


def _empty(partial: Path) -> None:
    """Removes what another run left, but for the lock, which is this one's."""
    for folder, spared in ((partial, WORK), (partial / WORK, LOCK)):
        for path in folder.iterdir():
            if path.name != spared:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _resumed(out: Path, partial: Path) -> str:
    """That a run goes on, and from where: what was finished last."""
    work = partial / WORK
    pieces = [p for p in work.rglob("*") if p.is_file() and p.suffix != UNFINISHED and p.name not in (BEGUN, LOCK)]
    since = datetime.fromtimestamp((work / BEGUN).stat().st_mtime).strftime("%Y-%m-%d %H:%M")
    last = max(pieces, key=lambda path: path.stat().st_mtime, default=None)
    after = "it had finished nothing" if last is None else f"the last of {len(pieces)} pieces is {last.stem}"
    return f"{out}: going on where the run begun {since} stopped; in {partial} {after}"


def _appear(partial: Path, out: Path) -> None:
    """Renames what is complete, in place of what was there. Its work goes after that: until then a killed run goes on
    from it."""
    while True:
        if out.is_dir():
            os.replace(out, _former(out))
        try:
            os.replace(partial, out)
            break
        except OSError as error:
            # Another process has come between the two renames and put back what is replaced (`_tidy`).
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    shutil.rmtree(_former(out), ignore_errors=True)
    _remove(out / WORK)
