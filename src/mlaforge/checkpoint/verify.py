"""`verify`: comparison of a directory's files with the hashes in its manifest."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mlaforge.artifact import MANIFEST, Manifest, sha256
from mlaforge.checkpoint import draft_head, eagle3, loading, source_model
from mlaforge.checkpoint.head_reader import HeadReader
from mlaforge.checkpoint.reader import Reader, read_config
from mlaforge.runtime import UserError, log, progress


@dataclasses.dataclass(frozen=True)
class Verification:
    """`problems`: one line per wrong file. `checked`: the criterion of the comparison."""

    directory: Path
    problems: list[str]
    checked: str

    def render(self) -> str:
        """Return a text, the conclusion last."""
        conclusion = f"{self.checked}: correct" if not self.problems else f"{len(self.problems)} wrong; {self.checked}"
        return "\n".join([*self.problems, f"{self.directory}: {conclusion}"])


def run(directory: Path) -> Verification:
    """Compare an artifact with its manifest's hashes. Without hashes (an original model, a manifest of an older
    version) compare a model's tensors with its config.json: names, shapes, finite values.

    Raises UserError for a directory that holds neither manifest.json nor config.json.
    """
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory; give an artifact of mlaforge or a model directory")
    manifest, model = Manifest.load(directory), (directory / "config.json").exists()
    unreadable = manifest is None and (directory / MANIFEST).exists()
    if not (manifest or model or unreadable):
        raise UserError(f"{directory} holds neither {MANIFEST} nor config.json: there is nothing to compare it with")
    problems, files = [f"{MANIFEST}: cannot be read"] if unreadable else [], manifest.files if manifest else {}
    hashes = sum(map(bool, files.values()))
    for name in progress(sorted(files), "verify"):
        if problem := _compare(directory / name, files[name]):
            problems.append(f"{name}: {problem}")
    if manifest:
        others = sorted({path.name for path in directory.glob("*.safetensors")} - set(files))
        problems += [f"{name}: not in {MANIFEST}, but loaders of the directory may read it" for name in others]
    if hashes:
        return Verification(directory, problems, f"{hashes} files by their SHA-256 in {MANIFEST}")
    reason = f"no {MANIFEST}" if manifest is None else f"a {MANIFEST} without hashes"
    if not model:
        return Verification(directory, problems, f"{reason}, the names of {len(files)} files")
    if problem := _check_tensors(directory):
        problems.append(problem)
    return Verification(
        directory, problems, f"{reason}; tensors by config.json: their names, shapes, and that all numbers are finite"
    )


def require(directory: Path) -> None:
    """Raises UserError for the first problem that `run` finds, else logs the result."""
    verification = run(directory)
    if verification.problems:
        raise UserError(f"{directory}: {verification.problems[0]}; `mlaforge verify {directory}` names every such file")
    log(verification.render())


def _compare(path: Path, digest: str) -> str | None:
    """Return the problem of a file in the manifest, or None."""
    if not path.is_file():
        return "missing"
    if digest and (current := sha256(path)) != digest:
        return f"changed since it was written: SHA-256 {current[:12]}…, {MANIFEST} has {digest[:12]}…"
    return None


def _check_tensors(directory: Path) -> str | None:
    """Return the first problem of the config or the tensors of a model, or of a draft head, whose shapes depend on
    its target; None if there is none."""
    try:
        config = read_config(directory)
        if set(draft_head.ARCHITECTURES) & set(config.get("architectures") or ()):
            with HeadReader(directory) as head:
                head.check({name: head.shape(name) for name in head.weights}, whole=eagle3.VOCABULARY)
        else:
            with Reader(directory) as reader:
                _ = source_model.read_spec(config)
                reader.check(*loading.expected_tensors(config))
    except UserError as error:
        return str(error)
    return None
