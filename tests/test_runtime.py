"""Progress bars, with and without a terminal, and files that are replaced as a whole."""

import errno
import io
import os

import pytest

from mlaforge import runtime


@pytest.fixture
def clock(monkeypatch):
    """A fake clock, for tqdm too."""
    now = [1000.0]
    monkeypatch.setattr("mlaforge.runtime.time.monotonic", lambda: now[0])
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    monkeypatch.setattr(runtime.Lines, "last", now[0])
    return now


def slowly(clock, steps, seconds):
    for step in range(steps):
        clock[0] += seconds
        yield step


def test_without_a_terminal_progress_is_a_line_every_ten_seconds(clock, capsys):
    """Counted over consecutive bars, and independent of how often a bar is refreshed."""
    for name in ("first", "second"):
        assert list(runtime.progress(slowly(clock, 50, 0.5), name, 50)) == list(range(50))
    with runtime.progress_bar("third", 10) as bar:
        for _ in slowly(clock, 10, 1.0):
            bar.set_postfix(loss="0.5")
            bar.update()
    drawn = capsys.readouterr().err
    lines = drawn.splitlines()
    assert "\r" not in drawn and drawn.endswith("\n")
    # 25, 25 and 10 seconds.
    assert [line.partition(":")[0] for line in lines] == ["first", "first", "second", "second", "second", "third"]
    assert "%" in lines[0] and "/50 [" in lines[0] and "loss=0.5" in lines[-1]


def test_short_work_shows_no_progress(clock, capsys):
    for _ in range(20):
        list(runtime.progress(slowly(clock, 9, 0.05), "short", 9))
    assert capsys.readouterr().err == ""


def test_progress_is_a_bar_on_a_terminal(clock, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    list(runtime.progress(slowly(clock, 50, 0.5), "first", 50))
    assert terminal.getvalue().count("\rfirst:") > 30


def test_a_failed_write_leaves_the_previous_file(tmp_path, monkeypatch):
    """As of a table of tuned kernels or a file of results on a full disk."""
    file = tmp_path / "folder" / "table.json"
    runtime.replace_file(file, "first")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        runtime.replace_file(file, "second")
    assert file.read_text() == "first" and list(file.parent.iterdir()) == [file]
