"""Shared fixtures: tiny random models of every family with a byte-level tokenizer, disjoint texts, the command line in
this process, and comparisons of directory trees.

A user error is one line and exit code 2, and leaves no files behind: `refused` compares every byte below tmp_path, the
source model included, before and after.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from hypothesis import settings

from support import kernel_forms, quick_interpreter
from support.tiny_models import FAMILIES, save_model

# A busy machine must not fail a test.
settings.register_profile("mlaforge", deadline=None)
settings.load_profile("mlaforge")
# Set before huggingface_hub is imported: no test may wait for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A table that this machine's user tuned must not decide what a test measures.
os.environ.setdefault("MLAFORGE_TUNED", "none")
# Set before Triton is imported: without a GPU, tests run its kernels in Python.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Lines that a stage may write to stderr before it fails; on a slow machine progress bars, too.
PROGRESS = re.compile(
    r"(Original|Partial RoPE|MLA|Sparse) ppl: |rows are coded: |no index: |context limited to |dequantising |"
    r"dtype auto: |compil(ing|ed) CPU kernels|[\w .-]+: +\d+%"
)


def pytest_configure(config: pytest.Config) -> None:
    """Run tiny models on one thread: on a busy machine more threads make the tests ten times slower."""
    if config.option.markexpr == "not slow":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if os.environ.get("MLAFORGE_EMULATE_AMX") == "1":
        from support import emulated_amx

        emulated_amx.replace_amx(pytest.MonkeyPatch())


def pytest_collection_finish() -> None:
    """Exempt modules and test items from garbage collection, which would look at them thousands of times."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    # Else bindings report at the process's end that objects are left.
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def modules_stay_frozen() -> Iterator[None]:
    """A bench freezes the heap of its process and unfreezes all of it at its end, which here are all modules and tests:
    every later collection would look at them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed torch, so that a test gives the same result alone, after other tests and in another process; and speed
    up Triton's interpreter once it is imported, where kernels are interpreted."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter and os.environ.get("TRITON_INTERPRET") == "1":
        quick_interpreter.speed_up(interpreter)
    kernel_forms.note(item)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, [])]
    if line := kernel_forms.summary(reports):
        terminalreporter.write_line(line)


# Emulated tiles are slow, and compared with the other forms in test_block_sizes.py anyway.
FORMS = [
    pytest.param(form, marks=pytest.mark.slow if form == kernel_forms.EMULATED else ())
    for form in kernel_forms.EVERY_FORM
]


@pytest.fixture(scope="module", params=FORMS)
def compiled(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The compiled CPU kernels in every form of this processor, and emulated AMX; ops use them."""
    from mlaforge.ops import native
    from support import emulated_amx

    with pytest.MonkeyPatch.context() as patch:
        emulated_amx.add_form(patch)
        if not native.runs(request.param) or native.compiler() is None:
            pytest.skip(f"no compiler, or this processor lacks {request.param}")
        reason = native.load(request.param)
        assert reason is None, reason
        operations = native.operations(request.param)
        patch.setattr(native, "kernels", lambda: operations)
        yield operations


@pytest.fixture
def cuda() -> Iterator[Any]:
    """The device "cuda": a GPU where there is one, else the simulated one (support/simulated_cuda.py)."""
    import torch

    from support.simulated_cuda import simulated_cuda

    with contextlib.nullcontext() if torch.cuda.is_available() else simulated_cuda() as simulation:
        yield simulation


@pytest.fixture(scope="session", autouse=True)
def no_absolute_paths() -> Iterator[None]:
    """Fail every test that saves a manifest with an absolute path."""
    from mlaforge.artifact import ABSOLUTE_PATH, Manifest

    save = Manifest.save

    def checked(manifest: Manifest, directory: Path) -> None:
        path = ABSOLUTE_PATH.search(json.dumps([manifest.config, manifest.inputs], default=str))
        assert path is None, f"the manifest of {manifest.stage} names {path[0] if path else ''}"
        save(manifest, directory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Manifest, "save", checked)
        yield


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """shared(name, make) -> the folder `name`, which make(folder) fills once for all processes of a test run."""
    from filelock import FileLock

    root = tmp_path_factory.getbasetemp()
    root = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "shared"

    def get(name: str, make: Callable[[Path], Any]) -> Path:
        folder = root / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        done, lock = (root / f"{name.replace('/', '-')}.{suffix}" for suffix in ("done", "lock"))
        with FileLock(lock):
            if not done.exists():
                make(folder)
                done.touch()
        return folder

    return get


@pytest.fixture(scope="session", autouse=True)
def kernels_are_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes that need the same library of CPU kernels wait for the one that compiles it: half a minute."""
    from filelock import FileLock

    from mlaforge.ops.kernel_library import KernelLibrary

    build, root = KernelLibrary.build, tmp_path_factory.getbasetemp().parent

    def once(library: KernelLibrary, folder: Path) -> Path:
        with FileLock(root / f"{library.file_name()}.lock"):
            path = folder / library.file_name()
            return path if path.is_file() else build(library, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelLibrary, "build", once)
        yield


@pytest.fixture(scope="session", autouse=True)
def libraries_prepare_once() -> Iterator[None]:
    """typer's runner would build every verb with its options for each command line (60 ms), and httpx would read the
    certificates of authorities for each client (30 ms)."""
    import ssl

    from typer import testing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "_get_command", functools.cache(testing._get_command))
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session")
def tiny_models(shared: Callable[..., Path]) -> dict[str, Path]:
    """Family -> directory of a tiny random model. Read-only: use `model` for a copy to modify."""
    return {
        family: shared(f"models/{family}", lambda folder, family=family, seed=seed: save_model(folder, family, seed))
        for seed, family in enumerate(FAMILIES)
    }


@pytest.fixture(scope="session")
def biased_llama(shared: Callable[..., Path]) -> Path:
    """A tiny llama with biases in q, k, v and o. Read-only."""
    return shared("biased/llama", lambda folder: save_model(folder, "llama", 3, attention_bias=True))


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model of the demo; skips if it is not available."""
    from filelock import FileLock

    from mlaforge.demo import model as demo_model
    from mlaforge.runtime import UserError

    try:
        # It is fetched and dequantised once per machine, by one process at a time.
        with FileLock(tmp_path_factory.getbasetemp().parent / "smollm2.lock"):
            return demo_model.fetch()
    except UserError as error:
        pytest.skip(f"the demo's model cannot be had here: {error}")


@pytest.fixture(scope="session")
def offline_embedder() -> Path:
    """The directory of the default embedder; skips if the extra is not installed."""
    pytest.importorskip("sentence_transformers", reason="the extra mlaforge[calibrate] is not installed")
    from mlaforge.calibration import embedder
    from mlaforge.runtime import UserError

    try:
        return embedder.directory(embedder.OFFLINE)
    except UserError as error:
        pytest.skip(f"the offline embedder cannot be had here: {error}")


def _text(tmp_path_factory: pytest.TempPathFactory, name: str, keys: list[str]) -> Path:
    path = tmp_path_factory.mktemp("text") / f"{name}.txt"
    path.write_text("\n\n".join(topics[key] for key in keys)[:12000], encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def calibration_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _text(tmp_path_factory, "calibration", sorted(topics)[:20])


@pytest.fixture(scope="session")
def healing_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text disjoint from the calibration and evaluation texts."""
    return _text(tmp_path_factory, "healing", sorted(topics)[25:50])


@pytest.fixture(scope="session")
def evaluation_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _text(tmp_path_factory, "evaluation", sorted(topics)[-20:])


@pytest.fixture(scope="session")
def converted(
    tiny_models: dict[str, Path], biased_llama: Path, calibration_file: Path, evaluation_file: Path,
    shared: Callable[..., Path],
) -> Callable[..., Path]:  # fmt: skip
    """(family, layout, **options) -> the converted directory, read-only and made once."""
    from mlaforge.conversion import convert
    from mlaforge.conversion.config import ConvertConfig

    sources = {**tiny_models, "biased_llama": biased_llama}
    # Families of which the default converts all layers.
    without_windows = {"llama", "biased_llama", "qwen2"}

    def get(family: str, layout: str | None, **options: Any) -> Path:
        # What means the same is converted once.
        if options.get("layers") == "auto" or (options.get("layers") == "all" and family in without_windows):
            del options["layers"]
        # Plain rows, unless a test sets bits.
        options |= {} if "bits" in options or "budget" in options else {"budget": 0.5}

        def convert_to(out: Path) -> None:
            sizes = {"seqlen": 64, "nsamples": 12, "batch_size": 1 if "bits" in options else 12, "eval_windows": 4}
            settings = {**sizes, "device": "cpu", **options}
            config = ConvertConfig(
                layout=layout, calibration=str(calibration_file), evaluation=str(evaluation_file), **settings
            )
            convert.run(str(sources[family]), out, config)

        key = json.dumps([family, layout, options], sort_keys=True)
        return shared(f"{family}-{layout}-{hashlib.sha256(key.encode()).hexdigest()[:12]}/model", convert_to)

    return get


@pytest.fixture
def model(tiny_models: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """model("llama") -> a copy of that tiny model in tmp_path, to be modified."""

    def copy(family: str = "llama") -> Path:
        return Path(shutil.copytree(tiny_models[family], tmp_path / family))

    return copy


@pytest.fixture(scope="session")
def short(calibration_file: Path, evaluation_file: Path) -> list[str]:
    """Options with which `convert` takes a fraction of a second on a tiny model."""
    options = {"calibration": calibration_file, "evaluation": evaluation_file, "seqlen": 64, "nsamples": 4}
    options |= {"batch-size": 4, "eval-windows": 2, "device": "cpu"}
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


@pytest.fixture(scope="session")
def cli() -> Callable[..., Any]:
    """cli("convert", MODEL, OUT, ..., stdin=None) -> exit_code, stdout and stderr of the command, run in this process.

    The traceback of an unexpected exception is appended to stderr.
    """
    from typer.testing import CliRunner

    from mlaforge.cli.main import app

    class Done:
        def __init__(self, result: Any):
            self.exit_code: int = result.exit_code
            self.stdout: str = result.stdout
            self.stderr: str = result.stderr
            if result.exception is not None and not isinstance(result.exception, SystemExit):
                self.stderr += "".join(traceback.format_exception(result.exception))

    return lambda *arguments, stdin=None: Done(CliRunner().invoke(app, [str(a) for a in arguments], input=stdin))


@pytest.fixture(scope="session")
def tree() -> Callable[[Path], dict[str, str]]:
    """tree(folder) -> relative path of every entry, hidden ones included -> its kind, for a file its SHA-256."""

    def describe(path: Path) -> str:
        if path.is_symlink():
            return f"link to {os.readlink(path)}"
        if not path.is_file():
            return "folder" if path.is_dir() else "no file"
        return hashlib.sha256(path.read_bytes()).hexdigest()

    return lambda folder: {str(p.relative_to(folder)): describe(p) for p in sorted(folder.rglob("*"))}


@pytest.fixture
def refused(cli, tree, tmp_path) -> Callable[..., str]:
    """refused(words, "convert", MODEL, OUT, ...) -> the error line, which must contain all of `words`."""

    def check(words: tuple[str, ...] | str, *arguments: Any) -> str:
        before = tree(tmp_path)
        done = cli(*arguments)
        assert done.exit_code == 2, (done.exit_code, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        *progress, line = (line for line in done.stderr.splitlines() if line.strip())
        assert line.startswith("mlaforge: ")
        assert all(PROGRESS.match(other) for other in progress), progress
        assert done.stdout == ""
        assert tree(tmp_path) == before
        for word in (words,) if isinstance(words, str) else words:
            assert word in line, line
        return str(line)

    return check


@pytest.fixture
def converts(cli, short) -> Callable[..., Any]:
    """converts(MODEL, OUT, ...) runs a conversion and asserts that it succeeds."""

    def run(source: Path, out: Path, *more: Any) -> Any:
        done = cli("convert", source, out, *short, *more)
        assert done.exit_code == 0, done.stderr
        return done

    return run


@pytest.fixture(scope="module")
def known_roof() -> Iterator[Any]:
    """Fixed roofline of a CPU: measuring one takes 400 MB and an idle machine."""
    from mlaforge.planning import machines
    from mlaforge.planning.costs import Gpu

    gpu = Gpu("cpu", 0.05, 0.01, 8.0, "made up", achievable=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machines, "cpu_peaks", lambda: gpu)
        yield gpu


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Callable[..., Path]]:
    """small_disk(size) -> a folder on a new file system of `size` bytes; skips if none can be mounted."""
    with contextlib.ExitStack() as mounted:

        def mount(size: int, options: str = "") -> Path:
            at = tmp_path / "disk"
            at.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={size}{options}", "mlaforge-test", str(at)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except FileNotFoundError:
                pytest.skip("there is no mount command here")
            if done.returncode:
                pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
            mounted.callback(subprocess.run, ["umount", str(at)], check=True)
            # The frames of an exception keep files open until they are collected.
            mounted.callback(gc.collect)
            return at

        yield mount
