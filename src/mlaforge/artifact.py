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
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlaforge.runtime import UserError, environment

MANIFEST = "manifest.json"


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
    files: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over stage, config, inputs and the version of mlaforge."""
        from mlaforge import __version__

        made_by = self.environment.get("mlaforge", __version__)
        what = json.dumps([self.stage, self.config, self.inputs, made_by], sort_keys=True, default=str)
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


def sha256(path: Path) -> str:
    """SHA-256 of a file, hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def finished(out: Path, wanted: Manifest) -> Manifest | None:
    """The manifest at `out` if that artifact is what `wanted` would make again and all its files are there.

    Raises UserError if `out` exists and is something else: nothing of the user's is ever overwritten.
    """
    if not out.exists() and not out.is_symlink():
        return None
    if out.is_dir() and not any(out.iterdir()):
        return None
    found = Manifest.load(out) if out.is_dir() else None
    if found is None:
        raise UserError(f"{out} exists and was not made by mlaforge; choose another output directory")
    if found.fingerprint != wanted.fingerprint:
        raise UserError(
            f"{out} holds another {found.stage} result ({_difference(found, wanted)}); "
            "choose another output directory, or pass --overwrite"
        )
    missing = [name for name in found.files if not (out / name).is_file()]
    if missing:
        raise UserError(f"{out} has lost {missing[0]}; pass --overwrite to make it again")
    return found


def _difference(found: Manifest, wanted: Manifest) -> str:
    if found.stage != wanted.stage:
        return f"stage {found.stage}, not {wanted.stage}"
    for part in ("config", "inputs"):
        old, new = getattr(found, part), getattr(wanted, part)
        for key in sorted({*old, *new}):
            if old.get(key) != new.get(key):
                shown = [text if len(text) < 60 else text[:57] + "..." for text in (str(old.get(key)), str(new.get(key)))]
                return f"{key} was {shown[0]}, now {shown[1]}"
    return "made by another version of mlaforge"


@contextmanager
def writing(out: Path, manifest: Manifest, overwrite: bool = False) -> Iterator[Path]:
    """Yields a directory beside `out` to write into; on success writes the manifest and renames it to `out`.

    On any failure, Ctrl-C included, the directory is removed and `out` stays as it was. What a killed process
    left behind is removed by the next one that writes to the same `out`.
    """
    out = out.absolute()
    partial = out.with_name(f".{out.name}.partial")
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        yield partial
        manifest.save(partial)
        if out.exists():
            # `finished` has refused what is not ours, so this is an empty directory or ours to replace.
            assert overwrite or not any(out.iterdir())
            shutil.rmtree(out)
        os.replace(partial, out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(next(p for p in (out, *out.parents) if p.exists())).free
            raise UserError(
                f"the disk is full ({free / 2**30:.1f} GiB free at {out.parent}); nothing was written: "
                "free some room or choose an output on another disk"
            ) from error
        if isinstance(error, PermissionError | NotADirectoryError | FileExistsError):
            raise UserError(f"cannot write to {out}: {error.strerror}; choose another output directory") from error
        raise
