"""The process: errors, interrupts, device, dtype, progress, environment variables and the JSON that it writes.

Imports nothing else of this package, so that every module may import it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")


class UserError(ValueError):
    """Invalid input from the user. The message is one line: what is wrong and what would be right.

    The command line exits with code 2 and no traceback; every other exception is a fault of the program (code 1).
    """


class Resumable(UserError):
    """Error of a stage that leaves its finished work on disk, so that it can be resumed."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a resumable stage. The message is one line that says where it resumes."""


# SIGINT received inside `interruptible`. A list, because a signal handler must not wait for a lock.
_received_signals: list[int] = []


@contextmanager
def interruptible() -> Iterator[None]:
    """Record Ctrl-C for `interrupted`, and raise KeyboardInterrupt as usual."""

    def record(number: int, frame: Any) -> None:
        _received_signals.append(number)
        signal.default_int_handler(number, frame)

    # Another handler, or an ignored signal, stays; only the main thread may set a handler.
    install = threading.current_thread() is threading.main_thread()
    install = install and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if install:
        signal.signal(signal.SIGINT, record)
    try:
        yield
    finally:
        if install:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            forget_interrupts()


def interrupted(error: BaseException) -> bool:
    """Return whether Ctrl-C ended the work, also if another error was raised: C code that calls back into Python (such
    as safetensors constructing a tensor) replaces KeyboardInterrupt by an error of its own."""
    return isinstance(error, KeyboardInterrupt) or bool(_received_signals)


def forget_interrupts() -> None:
    """Clear the recorded Ctrl-C after it was handled, so that later errors are not attributed to it."""
    _received_signals.clear()


def cache_home() -> Path:
    """Return the cache of dequantised models: $MLAFORGE_HOME, else $XDG_CACHE_HOME/mlaforge, else ~/.cache/mlaforge."""
    if home := os.environ.get("MLAFORGE_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlaforge"


def ops_choice() -> str:
    """Return $MLAFORGE_OPS: the implementations of ops/ to use (see ops/dispatch.py); "" selects by the inputs."""
    return os.environ.get("MLAFORGE_OPS", "")


def native_choice() -> str:
    """Return $MLAFORGE_NATIVE: the form of the CPU kernels that ops/native.py compiles: 1 (default) for the fastest of
    this processor, 0 for none, or amx, avx512 or avx2. Raises UserError for another value."""
    choice = os.environ.get("MLAFORGE_NATIVE", "1")
    if choice not in ("0", "1", "amx", "avx512", "avx2"):
        raise UserError(f"MLAFORGE_NATIVE={choice!r} is not known; use 0, 1, amx, avx512 or avx2")
    return choice


def kernels_folder() -> Path | None:
    """Return $MLAFORGE_KERNELS, a folder that `mlaforge build-kernels --out` filled; None if unset."""
    folder = os.environ.get("MLAFORGE_KERNELS")
    return Path(folder) if folder else None


def tuned_file() -> str | None:
    """Return $MLAFORGE_TUNED, a table of tuned kernels (ops/tuned.py) or `none`; None if unset."""
    return os.environ.get("MLAFORGE_TUNED") or None


def processor_name() -> str:
    """Return the processor's model name from /proc/cpuinfo, `cpu` if unknown."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "cpu")


def compiler_name() -> str:
    """Return $CXX, the C++ compiler; g++ if it is unset."""
    return os.environ.get("CXX") or "g++"


def triton_interpreted() -> bool:
    """Return whether $TRITON_INTERPRET makes Triton run its kernels in Python, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def any_vllm_version() -> bool:
    """Return whether $MLAFORGE_VLLM_ANY_VERSION is 1: the vLLM plugin serves with untested versions too."""
    return os.environ.get("MLAFORGE_VLLM_ANY_VERSION", "0") == "1"


def torchrun_processes() -> int:
    """Return how many processes torchrun started ($WORLD_SIZE), this one included; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def is_first_process() -> bool:
    """Return whether this is the process of torchrun that prints results ($RANK is 0); True without torchrun."""
    return torchrun_processes() == 1 or os.environ.get("RANK", "0") == "0"


def version() -> str:
    """Return the version of mlaforge."""
    from mlaforge import __version__

    return __version__


def api_key() -> str | None:
    """Return $MLAFORGE_API_KEY, the key that clients of `serve` must send; None if unset. Raises UserError if it is
    empty: an empty variable is more likely a failed expansion than a wish to serve without a key."""
    key = os.environ.get("MLAFORGE_API_KEY")
    if key is not None and not key.strip():
        raise UserError("MLAFORGE_API_KEY is empty; set it to a key, or unset it to serve without a key")
    return key


def resolve_device(name: str) -> torch.device:
    """Return the device of a name; `auto` is CUDA if available, else CPU.

    Raises UserError for a name that torch does not know or a device that this machine lacks.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device {name!r} is not known to torch; use auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} is not supported; use auto, cpu or cuda")
    if device.type == "cpu" and device.index:
        raise UserError(f"device {name!r} was requested, but a machine's processors are one device; use cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name!r} was requested, but torch sees no CUDA device here; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise UserError(f"device {name!r} was requested, but torch sees {count} CUDA device(s), counted from 0")
    return device


DTYPES = ("float32", "bfloat16", "float16")


def resolve_dtype(name: str, default: torch.dtype) -> torch.dtype:
    """Return a torch dtype by name; `auto` is `default`, the dtype of the checkpoint. Raises UserError."""
    import torch

    if name == "auto":
        return default
    if name not in DTYPES:
        raise UserError(f"dtype {name!r} is not supported; use auto, {', '.join(DTYPES)}")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def on_device(
    values: Sequence[int] | Sequence[float] | Sequence[list[int]], dtype: torch.dtype, device: torch.device
) -> Tensor:  # fmt: skip
    """Return a small tensor of host values on `device`, copied from pinned memory without synchronising the host."""
    import torch

    return uploaded(torch.tensor(values, dtype=dtype), device)


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a small CPU tensor on `device`, copied from pinned memory without synchronising the host."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


# Seconds between two lines of progress without a terminal, and before a bar is shown.
LINE_SECONDS, BAR_SECONDS = 10.0, 2.0


class Lines:
    """Output stream for progress bars without a terminal: writes one line every LINE_SECONDS, counted over all bars."""

    last = time.monotonic()

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, drawn: str) -> None:
        now = time.monotonic()
        if (line := drawn.strip()) and now - Lines.last >= LINE_SECONDS:
            Lines.last = now
            self.stream.write(line + "\n")

    def flush(self) -> None:
        self.stream.flush()


def progress_bar(what: str, total: int | None = None, items: Iterable[Any] | None = None, **options: Any) -> Any:
    """Return a tqdm bar on stderr, shown after two seconds; occasional lines if stderr is not a terminal. `options` are
    passed to tqdm."""
    from tqdm import tqdm

    output = (
        {"file": sys.stderr, "dynamic_ncols": True} if sys.stderr.isatty() else {"file": Lines(sys.stderr), "ncols": 0}
    )
    return tqdm(
        items, desc=what, total=total, delay=BAR_SECONDS, leave=False, **output, **{"disable": False, **options}
    )  # fmt: skip


def progress(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Iterate with the progress bar of `progress_bar`."""
    yield from progress_bar(what, total, items)


def install(extra: str) -> str:
    """Return the command that installs an extra, from a checkout: mlaforge is not on a package index."""
    return f"pip install '.[{extra}]' in mlaforge's checkout"


def disable_progress_bars() -> None:
    """Disable the progress bars of libraries if stderr is not a terminal. Call it before they are imported."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def log(line: str) -> None:
    """Write one line to stderr; stdout is reserved for results."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall time of the block, in seconds, to `seconds[name]`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def environment() -> dict[str, str | int]:
    """Return the package versions and the machine, as recorded in every manifest."""
    import platform

    import safetensors
    import torch
    import transformers

    from mlaforge import __version__

    cuda = torch.cuda.is_available()
    return {
        "mlaforge": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
    }


def replace_file(path: Path, text: str) -> None:
    """Write a text file atomically: readers never see a partial file, and a failure leaves the previous one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def compact_json(value: Any, width: int, indent: int = 0) -> str:
    """Return `value` as JSON in which a list or mapping that fits into `width` characters has one line, unless it holds
    a list of mappings, each of which begins a line. indent: of the line on which the value begins."""
    line = json.dumps(value)
    if not isinstance(value, dict | list | tuple) or not value or (indent + len(line) <= width and "[{" not in line):
        return line
    begin, end = "{}" if isinstance(value, dict) else "[]"
    pairs = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    inner = " " * (indent + 1)
    items = (
        inner + ("" if key is None else f"{json.dumps(key)}: ") + compact_json(item, width, indent + 1)
        for key, item in pairs
    )
    return f"{begin}\n" + ",\n".join(items) + f"\n{' ' * indent}{end}"
