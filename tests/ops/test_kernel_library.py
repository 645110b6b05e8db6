"""Libraries of the CPU kernels that are compiled ahead: where they are looked up, and what is said if there is none."""

import os
import shutil
import subprocess
import sys

import pytest

from mlaforge.ops import native
from mlaforge.ops.kernel_library import FOLDER, CompilationError, KernelLibrary

RUN = """
import torch
from mlaforge.ops import native

kernels = native.kernels()
if kernels is not None:
    print(kernels.rms_norm(torch.ones(1, 32).bfloat16(), torch.ones(32).bfloat16(), 0.0).sum().item())
"""


@pytest.fixture
def unwritable(tmp_path):
    """A home that cannot be created, also by root."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "home"


def run(**variables) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    return subprocess.run([sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, timeout=120)


def test_kernels_compiled_ahead_need_no_home_and_no_compiler(unwritable, tmp_path):
    if (form := native.form()) is None or (native.compiler() is None and KernelLibrary.of(form).find() is None):
        pytest.skip("no compiler, or a processor without kernels")
    assert native.load(form) is None
    library = KernelLibrary.of(form).find()
    (tmp_path / "kernels").mkdir()
    shutil.copy(library, tmp_path / "kernels")
    done = run(MLAFORGE_HOME=unwritable, MLAFORGE_KERNELS=tmp_path / "kernels", CXX=tmp_path / "nothing")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == "32.0\n"


@pytest.mark.skipif(native.form() is None or native.compiler() is None, reason="no compiler")
@pytest.mark.parametrize(("compiler", "reason"), [("g++", "Not a directory"), ("nothing", "there is no C++ compiler")])
def test_without_a_library_one_line_says_what_to_do(compiler, reason, unwritable, tmp_path):
    """Torch's operations are used."""
    done = run(MLAFORGE_HOME=unwritable, MLAFORGE_KERNELS=tmp_path, CXX=compiler)
    assert (done.returncode, done.stdout) == (0, "")
    line = done.stderr.splitlines()[-1]
    assert line.startswith("compiled CPU kernels are not used: ") and reason in line
    assert line.endswith("`mlaforge build-kernels --out DIR` compiles ahead, on any machine; set MLAFORGE_KERNELS=DIR")
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(native.form() is None, reason="no form of the kernels runs here")
def test_a_damaged_library_is_reported_in_one_line(tmp_path):
    library = tmp_path / KernelLibrary.of(native.form()).file_name()
    library.touch()
    done = run(MLAFORGE_KERNELS=tmp_path)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (0, "") and f"{library} cannot be loaded (" in line


@pytest.mark.skipif(native.form() is None or native.compiler() is None, reason="no compiler")
def test_a_folder_without_the_library_is_not_ignored_silently(tmp_path):
    """The library of the cache is used, with a message."""
    assert native.load(native.form()) is None
    done = run(MLAFORGE_KERNELS=tmp_path / "other")
    assert done.stdout == "32.0\n"
    assert done.stderr.startswith(f"MLAFORGE_KERNELS={tmp_path / 'other'} has no {native.form()}-")


def test_a_name_depends_on_the_sources_the_formats_and_the_flags(tmp_path):
    source = tmp_path / "cpu"
    shutil.copytree(FOLDER, source)
    library = KernelLibrary("avx2", native.FORMS["avx2"], source)
    names = {KernelLibrary.of("avx2").file_name()}
    assert names == {library.file_name()}
    names.add(KernelLibrary("avx2", native.FORMS["avx2"], source, ("-O1",)).file_name())
    (source / "rows/toy_rows.h").touch()
    names.add(library.file_name())
    (source / "native.cpp").write_text("")
    names.add(library.file_name())
    assert len(names) == 4


def test_every_header_of_a_format_is_listed(tmp_path):
    assert "FormatList<CodedRows, Int4Rows, Int8Rows>" in KernelLibrary.of("avx2").row_formats()
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/two_words_rows.h").touch()
    text = KernelLibrary("avx2", (), tmp_path).row_formats()
    assert '#include "rows/two_words_rows.h"\n' in text and "FormatList<TwoWordsRows>" in text


def test_a_failed_compilation_writes_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(CompilationError, match=r"^the compiler failed: "):
        KernelLibrary.of("avx2").build(tmp_path / "kernels")
    assert list((tmp_path / "kernels").iterdir()) == []
