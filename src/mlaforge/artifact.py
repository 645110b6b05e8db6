"""Artifacts: directories with a `manifest.json`, the only objects that stages exchange.

An artifact is written atomically: in a hidden sibling directory, by one process at a time, and renamed when complete.
Its fingerprint hashes the stage, the resolved config and the hashes of its inputs; an artifact that already exists with
the same fingerprint is not computed again.
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

from mlaforge.runtime import Interrupted, Resumable, UserError, compact_json, environment, interrupted, log, progress

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MANIFEST = "manifest.json"
# An absolute path anywhere in a text: below a home or a drive, or at least two levels below `/`. /v1 is an API's and
# /dev, /proc and /sys exist on every Linux; what follows a word or a slash is part of a longer path.
ABSOLUTE_PATH = re.compile(
    r"""(?<![\w./\\~*+<>,)}\]-])(?:~/|[A-Za-z]:[\\/]{1,2}|/(?!(?:v1|dev|proc|sys)/)[\w.@-]+/)"""
    r"""[\w.@-][^\s"'`,;|<>()\[\]{}]*"""
)
# Folder in an unfinished artifact: the lock of the process that writes it, and for a resumable stage its checkpoints
# and the fingerprint of the artifact.
WORK, LOCK, FINGERPRINT = "work", "lock", "begun"
# Suffix of a file that is still being written.
UNFINISHED = ".unfinished"
UNFINISHED_MANIFEST = f".{MANIFEST}{UNFINISHED}"
# Longest line of a manifest with more than one value.
MANIFEST_WIDTH = 320
# Error numbers of a file system without locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclasses.dataclass
class Manifest:
    """Record of an artifact: the stage that wrote it, its inputs and its files.

    `config` and `inputs` are part of the fingerprint; `metrics` holds measured numbers only.
    """

    stage: str
    config: dict[str, Any]
    inputs: dict[str, Any]
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Every file beside the manifest -> its SHA-256; "" where an older version of mlaforge recorded none.
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    # Whether it passed its criteria (`mlaforge eval --criteria`), and the measurements of that evaluation.
    canonical: bool = False
    acceptance: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over stage, config, inputs and the version of mlaforge."""
        from mlaforge import __version__

        version = self.environment.get("mlaforge", __version__)
        identity = json.dumps([self.stage, self.config, self.inputs, version], sort_keys=True, default=str)
        return hashlib.sha256(identity.encode()).hexdigest()

    def save(self, directory: Path) -> None:
        self.environment = self.environment or environment()
        body = {**dataclasses.asdict(self), "fingerprint": self.fingerprint}
        unfinished = directory / UNFINISHED_MANIFEST
        text = compact_json(json.loads(json.dumps(body, default=str)), MANIFEST_WIDTH)
        unfinished.write_text(text + "\n", encoding="utf-8")
        os.replace(unfinished, directory / MANIFEST)

    @classmethod
    def load(cls, directory: Path) -> Manifest | None:
        """Return the manifest of the artifact at `directory`, or None if there is none or it cannot be read."""
        try:
            return cls.from_dict(json.loads((directory / MANIFEST).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return None

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> Manifest:
        """Return the manifest that a JSON object describes. Raises TypeError or AttributeError for another object."""
        names = {f.name for f in dataclasses.fields(cls)}
        manifest = cls(**{key: value for key, value in body.items() if key in names})
        if isinstance(manifest.files, list):
            manifest.files = dict.fromkeys(manifest.files, "")
        return manifest


def artifacts_below(folder: Path) -> dict[str, Manifest | None]:
    """Return the artifacts below a folder by their relative path, with None for an unreadable manifest. Unfinished
    artifacts of running or killed stages are left out. Raises UserError if the folder does not exist."""
    if not folder.is_dir():
        raise UserError(f"folder {str(folder)!r} does not exist; give the folder that holds the artifacts")
    folders = {path.parent.relative_to(folder).as_posix(): path.parent for path in sorted(folder.rglob(MANIFEST))}
    return {name: Manifest.load(path) for name, path in folders.items() if ".partial/" not in f"{name}/"}


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, hex. Raises UserError if it cannot be read."""
    digest = hashlib.sha256()
    if path.exists() and not path.is_file():
        # Reading a pipe would block for ever.
        raise UserError(f"{path} is not a file")
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def record_name(source: str | Path) -> str:
    """Return the name by which a manifest records a file or folder: without its parent folders, because paths are not
    part of the fingerprint; manifests record a content hash beside the name. A source that is not on this disk (a hub
    id, `embedded`) is returned unchanged."""
    path = Path(source).expanduser()
    return Path(os.path.abspath(path)).name if path.exists() else str(source)


def record_names(config: DataclassInstance, *options: str) -> dict[str, str | list[str] | None]:
    """Return the options of a stage that are paths or lists of paths by the names that its manifest records."""
    sources = {name: getattr(config, name) for name in options}
    return {
        name: [*map(record_name, source)] if isinstance(source, tuple) else source and record_name(source)
        for name, source in sources.items()
    }


def record_path(path: str | Path) -> str:
    """Return a file as results record it: relative to the working folder, or only its name if it is outside."""
    absolute, here = Path(os.path.abspath(Path(path).expanduser())), Path.cwd()
    return absolute.relative_to(here).as_posix() if absolute.is_relative_to(here) else absolute.name


def record_text(text: str) -> str:
    """Return a command or a program's output without the absolute paths of this machine."""
    return ABSOLUTE_PATH.sub(lambda path: record_path(path[0]), text)


def existing(out: Path, reads: Iterable[str | Path | None] = ()) -> Manifest | None:
    """Return the manifest of the artifact at `out`, or None if nothing is there.

    Raises UserError if mlaforge did not write `out`, or if `out` is or is inside one of the inputs (`reads`, which may
    also hold files, hub ids and None): inputs are never written to.
    """
    for source in reads:
        folder = Path(source or "").expanduser()
        if source and folder.is_dir() and out.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{out} is or lies in {folder}, which is read and never written to; choose another output")
    _recover(out.resolve())
    if not out.exists() and not out.is_symlink():
        return None
    if out.is_dir() and not any(out.iterdir()):
        return None
    manifest = Manifest.load(out) if out.is_dir() else None
    if manifest is None or not (isinstance(manifest.config, dict) and isinstance(manifest.inputs, dict)):
        raise UserError(f"{out} exists and was not made by mlaforge; choose another output directory")
    return manifest


def finished(
    out: Path, expected: Manifest, overwrite: bool = False, reads: Iterable[str | Path | None] = ()
) -> Manifest | None:
    """Return the manifest at `out` if it has the fingerprint of `expected` and all its files exist.

    Returns None if the artifact has to be computed. Raises UserError as `existing` does, and if `out` holds another
    artifact or an interrupted run with other options: only `overwrite` replaces these.
    """
    if (present := existing(out, reads)) is None:
        if not overwrite:
            _refuse_interrupted(out, expected)
        return None
    complete = all((out / name).is_file() for name in present.files)
    if present.fingerprint == expected.fingerprint and complete:
        return present
    if overwrite:
        if foreign := sorted({*_list_files(out)} - {*present.files, MANIFEST, UNFINISHED_MANIFEST}):
            raise UserError(f"{out} also holds {foreign[0]}, which mlaforge did not make; move it away first")
        return None
    difference = _difference(present, expected) if complete else "some of its files are missing"
    raise UserError(
        f"{out} holds another {present.stage} result ({difference}); choose another output directory, or pass "
        "--overwrite"
    )


def _refuse_interrupted(out: Path, expected: Manifest) -> None:
    """Raises UserError if a run with other options or inputs was interrupted: it may hold hours of work."""
    partial = unfinished(out.resolve())
    fingerprint = partial / WORK / FINGERPRINT
    if fingerprint.is_file() and fingerprint.read_text() != expected.fingerprint:
        with locked(partial / WORK / LOCK, str(out)):
            raise UserError(
                f"{partial} holds the work of an interrupted run with other options or inputs; repeat that "
                "command to resume it, choose another output directory, or pass --overwrite to discard it"
            )


def _list_files(directory: Path) -> list[str]:
    """Return the files below a directory, sorted, as relative paths with `/`."""
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir())


def _difference(existing: Manifest, expected: Manifest) -> str:
    if existing.stage != expected.stage:
        return f"stage {existing.stage}, not {expected.stage}"
    old, new = ({**_flatten(manifest.config), **_flatten(manifest.inputs)} for manifest in (existing, expected))
    for key in dict.fromkeys([*old, *new]):
        if old.get(key) != new.get(key):
            was, now = (str(values.get(key))[:60] for values in (old, new))
            return f"{key} was {was}, now {now}"
    return "made by another version of mlaforge"


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"model": {"path": "x"}} -> {"model path": "x"}, for messages."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        # JSON has no tuples.
        plain = list(value) if isinstance(value, tuple) else value
        flat |= _flatten(plain, f"{prefix}{key} ") if isinstance(plain, dict) else {prefix + key: plain}
    return flat


def unfinished(out: Path) -> Path:
    """Return the directory in which the artifact `out` is written until it is complete. Links are resolved: the target
    directory is replaced, the link stays."""
    resolved = out.resolve()
    return resolved.with_name(f".{resolved.name}.partial")


def _previous(out: Path) -> Path:
    """Return the name of the replaced artifact until the new one is in place."""
    return out.with_name(f".{out.name}.former.partial")


def _recover(out: Path) -> None:
    """Finish what a process killed at the end of `writing` left undone: the second rename, or the removal of the
    replaced artifact and of the work folder."""
    if not out.exists():
        with suppress(OSError):
            os.replace(_previous(out), out)
    else:
        shutil.rmtree(_previous(out), ignore_errors=True)
    if (out / MANIFEST).is_file():
        if (out / WORK / LOCK).is_file():
            _remove_work(out / WORK)
        with suppress(OSError):
            # A folder that is not empty now is not ours.
            (out / WORK).rmdir()


def _remove_work(work: Path) -> None:
    """Remove a work folder, the lock last: only the lock shows that the folder is ours."""
    with suppress(OSError):
        for path in work.iterdir():
            if path.name != LOCK:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def locked(path: Path, what: str, wait: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, which is released when the process ends. The file and its missing
    parent folders are created, and removed afterwards unless other files are in them.

    what: the object of the lock, for messages. If another process holds the lock, raise UserError, or with `wait` block
    until it is released.
    """
    with ExitStack() as opened:
        opened.callback(_remove_empty, [parent for parent in path.parents if not parent.exists()])
        while True:
            _make_folder(path.parent)
            try:
                file = opened.enter_context(path.open("a"))
            except FileNotFoundError:
                # The folder was renamed meanwhile, because its artifact is complete.
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise UserError(f"another process is at work on {what}; let it end first") from None
                log(f"waiting for another process that is at work on {what}")
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                log(f"this file system has no locks: make sure that no other process is at work on {what}")
            # A lock on a file that its last owner removed or renamed excludes no other process.
            if _is_same_file(file.fileno(), path):
                break
            file.close()
        try:
            yield
        finally:
            if _is_same_file(file.fileno(), path):
                path.unlink()


def _make_folder(folder: Path) -> None:
    """mkdir that tolerates other processes creating and removing the same folder concurrently."""
    for _ in range(100):
        with suppress(FileExistsError, FileNotFoundError):
            folder.mkdir(parents=True, exist_ok=True)
            return
    folder.mkdir(parents=True, exist_ok=True)


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _is_same_file(descriptor: int, path: Path) -> bool:
    """Return whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def writing(out: Path, manifest: Manifest, resumable: bool = False) -> Iterator[Path]:
    """Yield a directory beside `out` to write into; on success write the manifest and rename the directory to `out`.

    Call `finished` before any work: it decides whether `out` may be replaced. On a failure the directory is removed and
    `out` stays unchanged; the next process removes the remains of a killed one. Raises UserError if another process is
    at work on `out`. A `resumable` stage resumes from a directory with the same fingerprint and logs it; Ctrl-C and a
    full disk keep that directory, as a kill does. It stores its checkpoints, and no file of the artifact, in WORK.
    """
    out = out.resolve()
    partial, previous = unfinished(out), _previous(out)
    absent = [parent for parent in out.parents if not parent.exists()]
    fingerprint, have_lock = partial / WORK / FINGERPRINT, False
    with ExitStack() as lock:
        try:
            lock.enter_context(locked(partial / WORK / LOCK, str(out)))
            have_lock = True
            if resumable and fingerprint.is_file() and fingerprint.read_text() == manifest.fingerprint:
                log(_resume_message(out, partial))
            else:
                _clear(partial)
                if resumable:
                    fingerprint.write_text(manifest.fingerprint)
            if previous.exists():
                shutil.rmtree(previous)
            yield partial
            written = set(_list_files(partial)) - {MANIFEST, UNFINISHED_MANIFEST}
            names = sorted(name for name in written if not name.startswith(f"{WORK}/"))
            manifest.files = {name: sha256(partial / name) for name in progress(names, "hash")}
            manifest.save(partial)
            # safetensors writes files that only their owner can read.
            mode = (partial / MANIFEST).stat().st_mode
            for name in names:
                (partial / name).chmod(mode)
            _publish(partial, out)
        except BaseException as error:
            full, stopped = disk_is_full(error), interrupted(error)
            can_resume = have_lock and fingerprint.is_file() and (full or stopped or isinstance(error, Resumable))
            if have_lock:
                if previous.exists() and not out.exists():
                    os.replace(previous, out)
                for folder in (previous,) if can_resume else (partial, previous):
                    shutil.rmtree(folder, ignore_errors=True)
            resume = f"the same command resumes from {partial}; delete that folder to start over"
            if can_resume and stopped:
                raise Interrupted(resume) from error
            if full:
                choose = "or choose an output on another disk"
                outcome = resume if can_resume else "nothing was written"
                raise UserError(full_disk(out.parent, choose, outcome)) from error
            path = error.filename if isinstance(error, OSError) else None
            if path and (Path(path).is_relative_to(partial) or Path(path) in absent):
                assert isinstance(error, OSError)
                raise UserError(f"cannot write {out}: {error.strerror}; choose another output directory") from error
            raise


def disk_is_full(error: BaseException) -> bool:
    """Return whether an error reports a full disk or an exceeded quota."""
    # safetensors gives the error number only in its message.
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(error)


def full_disk(folder: Path, choose: str, outcome: str) -> str:
    """Return the message for a full disk at `folder`, which need not exist."""
    free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
    return f"the disk is full ({free / 2**30:.1f} GiB free at {folder}): free some room {choose}; {outcome}"


def _clear(partial: Path) -> None:
    """Remove the files of another run, except the lock, which this process holds."""
    for folder, spared in ((partial, WORK), (partial / WORK, LOCK)):
        for path in folder.iterdir():
            if path.name != spared:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _resume_message(out: Path, partial: Path) -> str:
    """Return the log line of a resumed run: when it was started and its last checkpoint."""
    work = partial / WORK
    skipped = (FINGERPRINT, LOCK)
    pieces = [p for p in work.rglob("*") if p.is_file() and p.suffix != UNFINISHED and p.name not in skipped]
    start = datetime.fromtimestamp((work / FINGERPRINT).stat().st_mtime).strftime("%Y-%m-%d %H:%M")
    last = max(pieces, key=lambda path: path.stat().st_mtime, default=None)
    state = (
        "had finished nothing" if last is None else f"had finished {len(pieces)} pieces, the last of them {last.stem}"
    )
    return f"{out}: resuming the run of {start} from {partial}; it {state}"


def _publish(partial: Path, out: Path) -> None:
    """Rename the complete artifact to `out`, replacing the previous one. The work folder is removed afterwards: until
    then a killed run can resume from it."""
    while True:
        if out.is_dir():
            os.replace(out, _previous(out))
        try:
            os.replace(partial, out)
            break
        except OSError as error:
            # Between the two renames another process restored the previous artifact (`_recover`).
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    shutil.rmtree(_previous(out), ignore_errors=True)
    _remove_work(out / WORK)
