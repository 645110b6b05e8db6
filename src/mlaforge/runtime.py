"""The process: the user's mistakes, device and dtype, seeds, progress, and every environment variable.

Imports nothing of ours, so that anything may import it.
"""

from __future__ import annotations

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
    """Something that the user gave is wrong. The text is one line: what was wrong and what would be right.

    The command line turns it into exit code 2 without a traceback; every other exception is ours (code 1).
    """


class Resumable(UserError):
    """A stage cannot go on, but what it has finished is worth keeping."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a stage that can go on later. The text is one line that says from where."""


# Ctrl-C that came while `interruptible` work ran. A list, because a signal's handler must wait for no lock.
_received_signals: list[int] = []


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt in here as it always does, and is remembered, for `interrupted`."""

    def remember(number: int, frame: Any) -> None:
        _received_signals.append(number)
        signal.default_int_handler(number, frame)

    # Whoever has another handler, or ignores the signal, goes on doing so; only the main thread may set one.
    ours = threading.current_thread() is threading.main_thread()
    ours = ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            forget_interrupts()


def interrupted(error: BaseException) -> bool:
    """Whether it is Ctrl-C that ended the work, also where another error arrives: C code that calls back into Python
    (safetensors making a tensor, for one) swallows a KeyboardInterrupt and raises what it makes of it."""
    return isinstance(error, KeyboardInterrupt) or bool(_received_signals)


def forget_interrupts() -> None:
    """Ctrl-C has been answered: what goes wrong from here on is not its doing."""
    _received_signals.clear()


def cache_home() -> Path:
    """Where dequantised models are kept: $MLAFORGE_HOME, else $XDG_CACHE_HOME/mlaforge, else ~/.cache/mlaforge."""
    if home := os.environ.get("MLAFORGE_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlaforge"


def ops_choice() -> str:
    """$MLAFORGE_OPS: which implementations of ops/ to take, as ops/dispatch.py says; "" leaves it to the inputs."""
    return os.environ.get("MLAFORGE_OPS", "")


def native_choice() -> str:
    """$MLAFORGE_NATIVE: which form of its CPU kernels ops/native.py may compile and use. 1 (unset) is the fastest that
    the processor has, 0 none; amx, avx512 and avx2 are forms. Raises UserError for anything else."""
    choice = os.environ.get("MLAFORGE_NATIVE", "1")
    if choice not in ("0", "1", "amx", "avx512", "avx2"):
        raise UserError(f"MLAFORGE_NATIVE={choice!r} is not known; use 0, 1, amx, avx512 or avx2")
    return choice


def compiler_name() -> str:
    """$CXX, the C++ compiler; g++ where it is unset."""
    return os.environ.get("CXX") or "g++"


def triton_interpreted() -> bool:
    """Whether $TRITON_INTERPRET has Triton run its kernels in Python, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def version() -> str:
    """mlaforge's own."""
    from mlaforge import __version__

    return __version__


def api_key() -> str | None:
    """$MLAFORGE_API_KEY: what clients of `serve` must show; None where it is unset. Raises UserError where it is
    empty: what was to fill it is missing, and nobody may take that for a wish to serve without a key."""
    key = os.environ.get("MLAFORGE_API_KEY")
    if key is not None and not key.strip():
        raise UserError("MLAFORGE_API_KEY is empty; give it a key, or unset it to serve anybody")
    return key


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one, else CPU.

    Raises UserError for a name torch does not know or a device this machine lacks.
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
        raise UserError(f"device {name!r} was asked for, but a machine's processors are one device; use cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name!r} was asked for, but torch sees no CUDA device here; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise UserError(f"device {name!r} was asked for, but torch sees {count} CUDA device(s), counted from 0")
    return device


DTYPES = ("float32", "bfloat16", "float16")


def resolve_dtype(name: str, default: torch.dtype) -> torch.dtype:
    """A torch dtype by name; `auto` gives `default` (the checkpoint's own)."""
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
    """A small tensor from host numbers; the host does not wait for the copy, which is made from pinned memory."""
    import torch

    return uploaded(torch.tensor(values, dtype=dtype), device)


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the CPU on `device`; the host does not wait for the copy, which is made from pinned memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


# Seconds between two lines of progress where nobody watches a terminal, and before a bar shows at all.
LINE_SECONDS, BAR_SECONDS = 10.0, 2.0


class Lines:
    """A stream that makes lines of what progress bars draw again and again: of all bars one every LINE_SECONDS."""

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
    """A bar of tqdm's on stderr (`options` are its own) that shows only what lasts longer than two seconds; lines now
    and then where stderr is no terminal."""
    from tqdm import tqdm

    drawn = (
        {"file": sys.stderr, "dynamic_ncols": True} if sys.stderr.isatty() else {"file": Lines(sys.stderr), "ncols": 0}
    )
    return tqdm(items, desc=what, total=total, delay=BAR_SECONDS, leave=False, **drawn, **{"disable": False, **options})


def progress(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Iterate with a progress bar as `progress_bar` makes it."""
    yield from progress_bar(what, total, items)


def install(extra: str) -> str:
    """The command that installs an extra: mlaforge is installed from its checkout, no index has it."""
    return f"pip install '.[{extra}]' in mlaforge's checkout"


def disable_progress_bars() -> None:
    """Without a terminal the bars of libraries that ask nobody are not drawn. To be called before they are imported."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def log(line: str) -> None:
    """One line for the person who watches; stdout is kept for results."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Adds the wall time of the block, in seconds, to `seconds[name]`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def environment() -> dict[str, str | int]:
    """Versions and machine, as recorded in every manifest."""
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
