"""`mlaforge env` and `mlaforge build-kernels`."""

import json

import pytest

from mlaforge import __version__
from mlaforge.ops import native
from mlaforge.ops.kernel_library import FORMS, KernelLibrary

# Writes a line of its arguments to the file after -o.
COMPILER = '#!/bin/sh\nall="$*"\nwhile [ "$1" != -o ]; do shift; done\necho "$all" >> "$2"\n'


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("MLAFORGE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLAFORGE_KERNELS", raising=False)
    return tmp_path / "home"


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    script = tmp_path / "g++"
    script.write_text(COMPILER)
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))


def printed(done) -> str:
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_env_prints_json(cli, monkeypatch):
    monkeypatch.setenv("MLAFORGE_API_KEY", "secret")
    output = printed(cli("env", "--json"))
    facts = json.loads(output)
    assert facts["mlaforge"] == __version__
    assert {"python", "torch", "transformers", "safetensors", "triton", "platform", "device"} < set(facts)
    assert facts["variables"]["MLAFORGE_API_KEY"] == "(set)" and "secret" not in output


def test_env_says_which_kernels_are_compiled_and_in_use(cli, home):
    assert list(json.loads(printed(cli("env", "--json")))["kernels"]) == list(FORMS)
    library = home / "native" / KernelLibrary.of("amx").file_name()
    library.parent.mkdir(parents=True)
    library.touch()
    lines = {line.split()[0]: line.split() for line in printed(cli("env")).splitlines() if line}
    assert lines["amx"][3:] == [str(library)] and lines["avx2"][3:5] == ["not", "compiled"]
    for name in FORMS:
        assert lines[name][1] == ("yes" if native.runs(name) else "no")
        assert lines[name][2] == ("yes" if name == native.form() and native.why_not() is None else "no")
    assert f"MLAFORGE_HOME={home}" in lines


@pytest.mark.usefixtures("compiler")
def test_build_kernels_compiles_forms_of_other_machines(cli, home, tmp_path):
    assert printed(cli("build-kernels", "--out", tmp_path / "kernels")).split() == [
        str(tmp_path / "kernels" / KernelLibrary.of(name).file_name()) for name in FORMS
    ]
    assert len(list((tmp_path / "kernels").iterdir())) == 3 and not home.exists()
    path = printed(cli("build-kernels", "--form", "avx512")).strip()
    assert path == str(home / "native" / KernelLibrary.of("avx512").file_name())
    assert KernelLibrary.of("avx512").find() is not None and KernelLibrary.of("amx").find() is None


def test_build_kernels_refuses_what_it_cannot_do(refused, monkeypatch, tmp_path):
    refused("form 'avx3' of the CPU kernels is unknown; use all, amx, avx512, avx2", "build-kernels", "--form", "avx3")
    monkeypatch.setenv("CXX", "nothing")
    refused("avx2: there is no C++ compiler (nothing)", "build-kernels", "--form", "avx2")
