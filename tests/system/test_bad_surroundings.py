"""Conversions on a full disk, under Ctrl-C and kill: one line of error, and no file is lost.

The previous result stays, and the same command resumes the run and writes the same files.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from safetensors import SafetensorError

from mlaforge.runtime import UserError
from support.killed import command, started


def fail_on_last_replace(error: BaseException) -> Callable[..., None]:
    """Return an os.replace that fails at the rename to the final name."""
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        if Path(source).name == ".out.partial":
            raise error
        real(source, target)

    return replace


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


FULL = OSError(errno.ENOSPC, "No space left on device")
HIDDEN = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
MOMENTS = [
    "mlaforge.conversion.convert.collect",
    "mlaforge.conversion.convert.write_checkpoint",
    "mlaforge.checkpoint.writer.Writer.finish",
]
BREAKS = {
    **{f"full disk in {at}": (at, FULL) for at in ("shutil.copyfile", "mlaforge.checkpoint.writer.Writer._flush")},
    "full disk in the manifest": ("mlaforge.artifact.Manifest.save", FULL),
    "full disk reported by safetensors": ("safetensors.torch.save_file", HIDDEN),
    "full disk on the rename": ("os.replace", FULL),
    **{f"Ctrl-C in {at}": (at, KeyboardInterrupt()) for at in MOMENTS},
    "Ctrl-C in the manifest": ("mlaforge.artifact.Manifest.save", KeyboardInterrupt()),
    "Ctrl-C on the rename": ("os.replace", KeyboardInterrupt()),
}


@pytest.fixture(scope="module")
def whole(tiny_models, cli, short, tree, tmp_path_factory) -> dict[str, str]:
    """The files of an uninterrupted conversion."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert cli("convert", tiny_models["llama"], out, *short, "--budget", 0.75).exit_code == 0
    return files(tree, out)


def files(tree: Callable[[Path], dict[str, str]], out: Path) -> dict[str, str]:
    """All files but the manifest, which records wall times."""
    return {name: digest for name, digest in tree(out).items() if name != "manifest.json"}


@pytest.mark.parametrize("before", ["a result", "missing folders"])
@pytest.mark.parametrize("how", BREAKS)
def test_a_failed_conversion_keeps_the_previous_result_and_resumes(
    how, before, tiny_models, cli, converts, tree, short, whole, tmp_path, monkeypatch
):
    out, source = tmp_path / "out", tiny_models["llama"]
    if before == "a result":
        converts(source, out)
    else:
        out = tmp_path / "a" / "b" / "out"
    was, (at, error) = tree(out), BREAKS[how]
    with monkeypatch.context() as patch:
        patch.setattr(at, fail_on_last_replace(error) if at == "os.replace" else raising(error))
        done = cli("convert", source, out, *short, "--budget", 0.75, "--overwrite")
    assert tree(out) == was
    *_, line = done.stderr.splitlines()
    if isinstance(error, KeyboardInterrupt):
        assert done.exit_code == 130 and line.startswith("mlaforge: interrupted; ")
    else:
        assert done.exit_code == 2 and line.startswith("mlaforge: the disk is full (")
    assert "Traceback" not in done.stderr
    assert (out.parent / ".out.partial").exists() and "the same command resumes" in line
    converts(source, out, "--budget", 0.75, "--overwrite")
    assert files(tree, out) == whole
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_other_options_do_not_resume_an_interrupted_run(tiny_models, cli, converts, tree, short, whole, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlaforge.conversion.convert.write_checkpoint", raising(KeyboardInterrupt()))
        assert cli("convert", tiny_models["llama"], tmp_path / "out", *short, "--budget", 0.5).exit_code == 130
    before = tree(tmp_path)
    done = cli("convert", tiny_models["llama"], tmp_path / "out", *short, "--budget", 0.75)
    assert done.exit_code == 2 and "an interrupted run with other options" in done.stderr
    assert tree(tmp_path) == before
    converts(tiny_models["llama"], tmp_path / "out", "--budget", 0.75, "--overwrite")
    assert files(tree, tmp_path / "out") == whole


def test_an_internal_error_keeps_its_traceback(tiny_models, cli, tree, short, tmp_path, monkeypatch):
    """It is not reported as a user error or a full disk, and leaves no files."""
    monkeypatch.setattr(
        "mlaforge.conversion.convert.write_checkpoint", raising(OSError(errno.EIO, "Input/output error"))
    )
    done = cli("convert", tiny_models["llama"], tmp_path / "out", *short)
    assert done.exit_code == 1
    assert "Traceback" in done.stderr and "Input/output error" in done.stderr
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("room", [2**16, 2**19, 2**20], ids=["no states fit", "some moments fit", "no weights fit"])
def test_a_full_file_system_is_reported(room, tiny_models, cli, short, small_disk):
    disk = small_disk(room)
    for where in ("out", "a/out"):
        done = cli("convert", tiny_models["llama"], disk / where, *short)
        assert done.exit_code == 2
        assert done.stderr.splitlines()[-1].startswith("mlaforge: the disk is full (0.0 GiB free")
        assert not (disk / where).exists()


@pytest.mark.parametrize("where", ["out", "new/out"])
def test_a_read_only_file_system_is_reported(where, tiny_models, refused, short, small_disk):
    refused("Read-only file system", "convert", tiny_models["llama"], small_disk(2**20, ",ro") / where, *short)


def wait_for(name: str, out: Path, runs: Callable[[], bool]) -> None:
    """Wait until the conversion into `out` has such a file in its work folder, or has ended."""
    deadline, work = time.monotonic() + 60, out.parent / f".{out.name}.partial" / "work"
    while not any(work.rglob(name)) and runs():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def lengthy(calibration_file, evaluation_file) -> list[str]:
    """Options with which a conversion runs every phase and takes about a second."""
    options = {"calibration": calibration_file, "evaluation": evaluation_file, "seqlen": 64, "nsamples": 60}
    options |= {"eval-windows": 20, "layout": "latent_rope", "device": "cpu"}
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def swallowing(error: BaseException) -> Callable[..., Any]:
    """Return a function that receives Ctrl-C and raises `error` instead, as C code that calls Python does."""

    def fail(*_: Any, **__: Any) -> Any:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise error from None
        raise AssertionError("nothing was interrupted")

    return fail


@pytest.mark.parametrize("error", [ValueError("no such type"), UserError("no such file")], ids=["internal", "user"])
def test_ctrl_c_is_recognised_behind_another_error(
    error, tiny_models, cli, converts, tree, short, whole, tmp_path, monkeypatch
):
    out, source = tmp_path / "out", tiny_models["llama"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr("mlaforge.conversion.convert.write_checkpoint", swallowing(error))
            done = cli("convert", source, out, *short, "--budget", 0.75)
        assert done.exit_code == 130 and "Traceback" not in done.stderr
        assert done.stderr.splitlines()[-1].startswith("mlaforge: interrupted; the same command resumes from")
        # The next error is not attributed to it.
        with monkeypatch.context() as patch:
            patch.setattr("mlaforge.conversion.convert.write_checkpoint", raising(ValueError("internal")))
            assert cli("convert", source, tmp_path / "other", *short).exit_code == 1
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    converts(source, out, "--budget", 0.75)
    assert files(tree, out) == whole


def test_a_real_ctrl_c(tiny_models, tree, lengthy, tmp_path):
    """The child handles SIGINT even if the tests run in the background of a shell, whose children ignore it."""
    out = tmp_path / "out"
    words = [sys.executable, "-m", "mlaforge", "convert", str(tiny_models["gpt_oss"]), str(out), *lengthy]
    words += ["--nsamples", "150"]
    pipe, reset = subprocess.PIPE, partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    child = subprocess.Popen(words, stderr=pipe, stdout=pipe, text=True, preexec_fn=reset)
    # Not earlier: at the end of an import Python may print a Ctrl-C and continue.
    wait_for("input-*", out, lambda: child.poll() is None)
    child.send_signal(signal.SIGINT)
    stdout, stderr = child.communicate(timeout=30)
    # Python kills itself with the signal if it arrived within an exec(); a shell shows 130 for both.
    assert child.returncode in (130, -signal.SIGINT)
    assert stdout == "" and "Traceback" not in stderr
    line = stderr.splitlines()[-1]
    assert line.startswith("mlaforge: interrupted; the same command resumes from") and ".out.partial" in line
    assert not out.exists()


def test_a_second_conversion_into_the_same_out_is_refused(tiny_models, cli, converts, tree, lengthy, short, tmp_path):
    """With any options; the first one writes the same files as without the second."""
    alone, out = tmp_path / "alone", tmp_path / "work" / "out"
    assert cli("convert", tiny_models["gpt_oss"], alone, *lengthy).exit_code == 0
    child = started(command, "convert", tiny_models["gpt_oss"], out, *lengthy)
    wait_for("input-*", out, child.is_alive)
    refusals = [cli("convert", tiny_models["gpt_oss"], out, *options) for options in (lengthy, short)]
    assert child.is_alive(), "too fast for a second one"
    for done in refusals:
        assert done.exit_code == 2 and done.stdout == "", done.stderr
        assert done.stderr.splitlines()[-1] == f"mlaforge: another process is at work on {out}; let it end first"
    child.join()
    assert child.exitcode == 0 and files(tree, out) == files(tree, alone)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "gpt_oss"])
def test_a_repeatedly_killed_conversion_writes_the_same_checkpoint(family, tiny_models, cli, tree, lengthy, tmp_path):
    """kill -9 several times; every run resumes from the work of the previous one."""
    alone = tmp_path / "alone"
    assert cli("convert", tiny_models[family], alone, *lengthy).exit_code == 0
    (tmp_path / "work").mkdir()
    out, random, finished = tmp_path / "work" / "out", Random(family), set[str]()
    for _ in range(5):
        child = started(command, "convert", tiny_models[family], out, *lengthy)
        wait_for("begun", out, child.is_alive)
        child.join(random.uniform(0.05, 1.2))
        child.kill()
        child.join()
        present = {path.name for path in (tmp_path / "work").rglob("backward-*") if path.is_file()}
        assert out.exists() or present >= finished, "finished work is lost"
        finished = present
    assert cli("convert", tiny_models[family], out, *lengthy).exit_code == 0
    assert files(tree, out) == files(tree, alone)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
