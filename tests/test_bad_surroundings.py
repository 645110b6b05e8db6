"""What goes wrong around a conversion (full disk, Ctrl-C, kill): one line, and everything is left as it was."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from safetensors import SafetensorError


def fail_on_last_replace(error: BaseException) -> Callable[..., None]:
    """os.replace, but for the rename that would make the result appear."""
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
MOMENTS = ["mlaforge.convert.collect", "mlaforge.convert.write_checkpoint", "mlaforge.checkpoint.Writer.finish"]
BREAKS = {
    **{f"full disk in {at}": (at, FULL) for at in ("shutil.copyfile", "mlaforge.checkpoint.Writer._flush")},
    "full disk in the manifest": ("mlaforge.artifact.Manifest.save", FULL),
    "full disk told by safetensors": ("safetensors.torch.save_file", HIDDEN),
    "full disk on the rename": ("os.replace", FULL),
    **{f"Ctrl-C in {at}": (at, KeyboardInterrupt()) for at in MOMENTS},
    "Ctrl-C in the manifest": ("mlaforge.artifact.Manifest.save", KeyboardInterrupt()),
    "Ctrl-C on the rename": ("os.replace", KeyboardInterrupt()),
}


@pytest.fixture(scope="module")
def result(tiny_models, cli, short, tmp_path_factory) -> Path:
    """A finished conversion. Read-only."""
    out = tmp_path_factory.mktemp("result") / "out"
    assert cli("convert", tiny_models["llama"], out, *short).exit_code == 0
    return out


@pytest.mark.parametrize("how", BREAKS)
def test_a_failure_half_way_leaves_everything_as_it_was(
    how, result, tiny_models, cli, tree, short, tmp_path, monkeypatch
):
    """Where a result is to be replaced, and where not even the folder exists."""
    shutil.copytree(result, tmp_path / "out")
    was, (at, error) = tree(tmp_path), BREAKS[how]
    monkeypatch.setattr(at, fail_on_last_replace(error) if at == "os.replace" else raising(error))
    for out in (tmp_path / "out", tmp_path / "a" / "b" / "out"):
        done = cli("convert", tiny_models["llama"], out, *short, "--budget", 0.75, "--overwrite")
        assert tree(tmp_path) == was
        *_, line = done.stderr.splitlines()
        if isinstance(error, KeyboardInterrupt):
            assert done.exit_code == 130 and line == "mlaforge: interrupted; nothing half-written was left"
        else:
            assert done.exit_code == 2 and line.startswith("mlaforge: the disk is full (")
        assert "Traceback" not in done.stderr


def test_an_error_of_ours_is_not_dressed_up(tiny_models, cli, tree, short, tmp_path, monkeypatch):
    """Neither as the user's mistake nor as a full disk; and it leaves nothing either."""
    monkeypatch.setattr("mlaforge.convert.write_checkpoint", raising(OSError(errno.EIO, "Input/output error")))
    done = cli("convert", tiny_models["llama"], tmp_path / "out", *short)
    assert done.exit_code == 1
    assert "Traceback" in done.stderr and "Input/output error" in done.stderr
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("room", [2**16, 2**19, 540 * 2**10], ids=["no weights fit", "almost", "only weights fit"])
def test_a_disk_that_is_really_full(room, tiny_models, refused, short, small_disk):
    disk = small_disk(room)
    for where in ("out", "a/out"):
        refused("the disk is full (0.0 GiB free", "convert", tiny_models["llama"], disk / where, *short)


@pytest.mark.parametrize("where", ["out", "new/out"])
def test_a_disk_that_may_not_be_written(where, tiny_models, refused, short, small_disk):
    refused("Read-only file system", "convert", tiny_models["llama"], small_disk(2**20, ",ro") / where, *short)


def started(source: Path, out: Path, folder: Path) -> subprocess.Popen[str]:
    """A conversion in a process of its own that has begun to calibrate and would take minutes to finish."""
    text = folder / "long.txt"
    text.write_text("\n\n".join(topics.values()), encoding="utf-8")
    command = [sys.executable, "-m", "mlaforge", "convert", str(source), str(out), "--device", "cpu", "--seqlen", "64"]
    command += ["--calibration", str(text), "--nsamples", "8000", "--evaluation", str(text), "--eval-windows", "0"]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (out.parent / f".{out.name}.partial").is_dir() and child.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.5)
    assert child.poll() is None, child.communicate()
    return child


def test_a_real_ctrl_c(tiny_models, tree, tmp_path):
    (tmp_path / "work").mkdir()
    child = started(tiny_models["llama"], tmp_path / "work" / "out", tmp_path)
    child.send_signal(signal.SIGINT)
    stdout, stderr = child.communicate(timeout=30)
    assert child.returncode == 130
    assert stdout == "" and "Traceback" not in stderr
    assert stderr.splitlines()[-1] == "mlaforge: interrupted; nothing half-written was left"
    assert tree(tmp_path / "work") == {}


def test_kill_leaves_nothing_that_the_next_run_minds(tiny_models, converts, tree, tmp_path):
    (tmp_path / "work").mkdir()
    out = tmp_path / "work" / "out"
    child = started(tiny_models["llama"], out, tmp_path)
    child.kill()
    child.communicate(timeout=30)
    assert child.returncode == -signal.SIGKILL
    assert not out.exists()
    # What kill -9 interrupted is still there: the next run has something to clear away.
    assert list(tree(tmp_path / "work")) == [".out.partial"]
    (tmp_path / "work" / ".out.partial" / "shard-00000.safetensors").write_bytes(b"half a shard")
    converts(tiny_models["llama"], out)
    assert [p.name for p in (tmp_path / "work").iterdir()] == ["out"]
    assert not (out / "shard-00000.safetensors").exists()
