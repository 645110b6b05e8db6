"""A CUDA device that is simulated on the CPU, with real values: the engine's CUDA code path runs without a GPU.

A tensor "on cuda:0" is a `SimulatedTensor`, which holds a CPU tensor. Operations run on these CPU tensors, Triton
kernels in Triton's interpreter, and a captured graph is a closure that is called again. What the host of a real GPU
would wait for is counted, as `torch.cuda.set_sync_debug_mode` reports it there:

- values that are read on the host: item(), tolist(), bool(), numpy(), copies to the CPU;
- operations whose output shape depends on values: nonzero, boolean indices, unique, masked_select, bincount;
- copies to the device from a host list or from pageable memory, and from pinned memory without non_blocking=True;
- torch.cuda.synchronize, and streams and events that are waited for.

The simulation is stricter than the debug mode in one case: a copy from pageable memory with non_blocking=True, for
which CUDA waits before it copies, though PyTorch does not report it. It does not model the order of streams.
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

DEVICE = torch.device("cuda", 0)
# Each reads values on the host, to return them or to know the shape of its output.
READS = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount", "_unique", "_unique2",
    "unique_dim", "unique_consecutive", "unique_dim_consecutive", "multinomial", "allclose",
}  # fmt: skip
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
SCALARS = {
    Tensor.__int__: int, Tensor.__index__: int, Tensor.__float__: float, Tensor.__bool__: bool,
    Tensor.__complex__: complex,
}  # fmt: skip
# What PyTorch's bindings do before they dispatch needs a CUDA build.
DISPATCHED = {
    Tensor.copy_: torch.ops.aten.copy_.default, Tensor.nonzero: torch.ops.aten.nonzero.default,
    torch.nonzero: torch.ops.aten.nonzero.default, Tensor.__invert__: torch.ops.aten.bitwise_not.default,
    Tensor.contiguous: torch.ops.aten.contiguous.default,
}  # fmt: skip
# Composite operations that choose an implementation by the device: computed whole, on the CPU tensors.
WHOLE = {"scaled_dot_product_attention"}


@dataclasses.dataclass(frozen=True)
class Wait:
    """`reason` is the operation; `line` is the innermost line of mlaforge that led to it."""

    reason: str
    line: str

    def __str__(self) -> str:
        return f"{self.reason} at {self.line}"


class SimulatedTensor(Tensor):
    """A tensor that reports to be on cuda:0 and holds its values in `on_cpu`, which has the same strides."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, on_cpu: Tensor) -> SimulatedTensor:
        assert not isinstance(on_cpu, SimulatedTensor)
        # A view that is created in inference mode of a tensor that is not has a version counter.
        with torch.inference_mode(False):
            tensor: SimulatedTensor = Tensor._make_wrapper_subclass(
                cls, on_cpu.shape, strides=on_cpu.stride(), storage_offset=on_cpu.storage_offset(), dtype=on_cpu.dtype,
                device=DEVICE, requires_grad=False,
            )  # fmt: skip
        tensor.on_cpu = on_cpu
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a simulated CUDA tensor outside of the simulation")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu() first")
        return self.cpu().numpy()

    def data_ptr(self) -> int:
        return self.on_cpu.data_ptr()

    def untyped_storage(self) -> Any:
        return self.on_cpu.untyped_storage()

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SimulatedTensor({self.on_cpu!r})"

    def __deepcopy__(self, memo: Any) -> SimulatedTensor:
        return SimulatedTensor(self.on_cpu.clone())


class FakeCapture:
    """Stands in for CudaCapture: a graph is a closure, whose replay overwrites the output of its capture."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.captures = self.replays = 0

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.captures += 1
        if torch.cuda.is_available():
            # As torch.cuda.graph does.
            torch.cuda.synchronize()
        out = run()

        def replay() -> None:
            self.replays += 1
            out.copy_(run())

        return replay, out


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _indexed(x: Any) -> Any:
    return DEVICE if (isinstance(x, str) and x == "cuda") or (isinstance(x, torch.device) and x.type == "cuda") else x


class Simulation:
    """Counts `waits` and `uploaded` bytes while it is active, and lists the `kernels` that it launches: PyTorch's
    operations on simulated tensors, except views and allocations, and Triton's kernels, by name."""

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self.kernels: list[str] = []
        self.uploaded = 0
        self.sync_debug_mode: int | str = 0
        self._dispatch, self._functions = _Dispatch(self), _Functions(self)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with self._dispatch, self._functions:
            yield

    def clear(self) -> None:
        self.waits, self.uploaded = [], 0
        self.kernels.clear()

    def wait(self, reason: str) -> None:
        self.waits.append(Wait(reason, _line()))
        if self.sync_debug_mode in (1, "warn"):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        if self.sync_debug_mode in (2, "error"):
            raise RuntimeError("called a synchronizing CUDA operation")

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy in memory that counts as pinned."""
        pinned = tensor.clone()
        # PyTorch keeps the Python object of a storage, and its attributes, as long as the storage.
        pinned.untyped_storage().simulated_pinned = True
        return pinned

    def upload(self, tensor: Tensor, non_blocking: bool, reason: str = "copy from the host") -> None:
        self.uploaded += tensor.numel() * tensor.element_size()
        if not is_pinned(tensor):
            self.wait(f"{reason}, from pageable memory")
        elif not non_blocking:
            self.wait(f"{reason}, without non_blocking=True")


def is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "simulated_pinned", False)


def _line() -> str:
    ours = "/src/mlaforge/"
    stack = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    frame = next((frame for frame in reversed(stack) if ours in frame.filename), None)
    if frame is None:
        frame = next(frame for frame in reversed(stack) if "/torch/" not in frame.filename)
    return f"{frame.filename.rpartition(ours)[2]}:{frame.lineno} in {frame.name}"


class _Functions(TorchFunctionMode):
    """What PyTorch does before it dispatches: pinned memory, host lists that become tensors."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self.simulation = simulation

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.pin_memory:
            return self.simulation.pin(args[0])
        if func is Tensor.is_pinned:
            return is_pinned(args[0])
        # PyTorch's bindings of these need a CUDA build.
        if func is Tensor.__getitem__ and isinstance(args[0], SimulatedTensor):
            return SimulatedTensor(args[0].on_cpu[self._index(args[1])])
        if func is Tensor.__setitem__ and isinstance(args[0], SimulatedTensor):
            return self._set(args[0], args[1], args[2])
        if func in SCALARS:
            return SCALARS[func](args[0].item())
        func = DISPATCHED.get(func, func)
        if func is Tensor.cuda:
            func, args = Tensor.to, (args[0], DEVICE, *args[2:])
        # "cuda" is the current device, which only a CUDA build knows.
        if func is torch.device:
            return func(*args, **kwargs)
        args = tuple(map(_indexed, args))
        kwargs = {name: _indexed(value) for name, value in kwargs.items()}
        pinned = kwargs.pop("pin_memory", False)
        if func is Tensor.new_tensor:
            kwargs = {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
            func, args = torch.tensor, args[1:]
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and not isinstance(args[0], SimulatedTensor):
            device = kwargs.pop("device", None)
            out = func(*args, **kwargs)
            if _is_cuda(device):
                self.simulation.upload(out, False, "host values copied")
                return SimulatedTensor(out)
        else:
            out = func(*args, **kwargs)
        return self.simulation.pin(out) if pinned else out

    def _set(self, tensor: SimulatedTensor, index: Any, value: Any) -> None:
        if isinstance(value, Tensor) and not isinstance(value, SimulatedTensor) and value.dim():
            self.simulation.upload(value, False)
        tensor.on_cpu[self._index(index, fills=not isinstance(value, Tensor) or value.numel() == 1)] = _on_cpu(value)

    def _index(self, index: Any, fills: bool = False) -> Any:
        """The index of a simulated tensor, for its CPU tensor. `fills`: PyTorch fills where a mask is true."""
        if isinstance(index, tuple):
            return tuple(self._index(item) for item in index)
        if isinstance(index, slice):
            parts = (index.start, index.stop, index.step)
            return slice(*(part.item() if isinstance(part, Tensor) else part for part in parts))
        if isinstance(index, list | range):
            index = torch.tensor(list(index))
        if not isinstance(index, Tensor):
            return index
        if not isinstance(index, SimulatedTensor):
            self.simulation.upload(index, False, "host index")
        if index.dtype in (torch.bool, torch.uint8):
            if not fills:
                self.simulation.wait("boolean index")
        elif not index.dim():
            return index.item()
        return _on_cpu(index)


class _Dispatch(TorchDispatchMode):
    """Runs operations on the CPU tensors that simulated tensors hold."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self.simulation = simulation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat, spec = tree_flatten((args, kwargs or {}))
        if not any(isinstance(x, SimulatedTensor) or (isinstance(x, torch.device) and _is_cuda(x)) for x in flat):
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_unflatten(list(map(_indexed, flat)), spec)
        name = func._schema.name.removeprefix("aten::")
        if name not in WHOLE:
            # In inference mode composite operations arrive whole.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if name in ("_to_copy", "copy_"):
            return self._copy(func, name, args, kwargs)
        if name in READS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.simulation.wait(name)
        if name == "histc" and not args[0].is_floating_point():
            # The CPU has none of integers.
            counts = func(args[0].on_cpu.double(), *args[1:], **kwargs)
            return SimulatedTensor(counts.to(args[0].dtype))
        if name in INDEXED:
            args = self._indices(name, args)
        return self._compute(func, args, kwargs)

    def _copy(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "copy_":
            target, source = args[0], args[1]
            non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            to_device = isinstance(target, SimulatedTensor)
        else:
            source, non_blocking = args[0], kwargs.get("non_blocking", False)
            device = kwargs.pop("device", None)
            to_device = isinstance(source, SimulatedTensor) if device is None else _is_cuda(device)
        if to_device and not isinstance(source, SimulatedTensor):
            # PyTorch casts on the host, into pageable memory.
            cast = (target.dtype if name == "copy_" else kwargs.get("dtype") or source.dtype) != source.dtype
            self.simulation.upload(source.clone() if cast else source, non_blocking)
        elif not to_device:
            self.simulation.wait("copy to the host")
        kwargs.pop("non_blocking", None)
        self.simulation.kernels.append(name)
        out = func(*tree_map(_on_cpu, args[:2]), **kwargs)
        if name == "copy_":
            return target
        return SimulatedTensor(out) if to_device else out

    def _indices(self, name: str, args: Any) -> Any:
        indices = [i for i in args[1] if isinstance(i, Tensor)]
        masks = [i for i in indices if i.dtype in (torch.bool, torch.uint8)]
        # PyTorch computes this as masked_fill.
        fills = name.startswith("index_put") and len(indices) == len(masks) == 1 and args[2].numel() == 1
        if masks and not fills:
            self.simulation.wait("boolean index")
        for index in indices:
            if isinstance(args[0], SimulatedTensor) and not isinstance(index, SimulatedTensor):
                self.simulation.upload(index, False, "index copied from the host")
        if isinstance(args[0], SimulatedTensor):
            moved = [i if i is None or isinstance(i, SimulatedTensor) else SimulatedTensor(i) for i in args[1]]
            args = (args[0], moved, *args[2:])
        return args

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        flat, spec = tree_flatten((args, kwargs))
        simulated = [x for x in flat if isinstance(x, SimulatedTensor)]
        if simulated:
            for x in flat:
                if isinstance(x, Tensor) and not isinstance(x, SimulatedTensor) and x.dim():
                    raise RuntimeError(
                        f"Expected all tensors to be on the same device, but {func} has some on cuda:0 and some on cpu"
                    )
        to_device = _is_cuda(kwargs["device"]) if kwargs.get("device") is not None else True
        wrappers = {id(x.on_cpu): x for x in simulated}
        flat = [torch.device("cpu") if isinstance(x, torch.device) else _on_cpu(x) for x in flat]
        args, kwargs = tree_unflatten(flat, spec)
        if simulated and not func.is_view and not any(word in func.__name__ for word in ("empty", "view", "detach")):
            self.simulation.kernels.append(func.__name__)
        out = func(*args, **kwargs)

        def wrapped(x: Any) -> Any:
            if not isinstance(x, Tensor) or not to_device:
                return x
            if id(x) in wrappers:
                assert wrappers[id(x)].shape == x.shape, f"{func} changes a shape in place"
                return wrappers[id(x)]
            return SimulatedTensor(x)

        return tree_map(wrapped, out)


def _on_cpu(x: Any) -> Any:
    return x.on_cpu if isinstance(x, SimulatedTensor) else x


class _Generator(torch.Generator):
    """A generator for simulated tensors draws on the CPU."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu")


_PROPERTIES = types.SimpleNamespace(
    name="Simulated GPU", major=9, minor=0, multi_processor_count=4, total_memory=2**30,
    shared_memory_per_block=48 * 1024, shared_memory_per_block_optin=227 * 1024,
    shared_memory_per_multiprocessor=228 * 1024, warp_size=32, L2_cache_size=50 * 2**20,
)  # fmt: skip


def _launched_on_cpu(run: Callable[..., Any], kernels: list[str]) -> Callable[..., Any]:
    def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        kernels.append(kernel.fn.__name__)
        # No operation of the interpreter is one of the engine's.
        with _disable_current_modes():
            return run(kernel, *tree_map(_on_cpu, args), **tree_map(_on_cpu, kwargs))

    return launch


@contextlib.contextmanager
def simulated_cuda(free_bytes: int = 2**30) -> Iterator[Simulation]:
    """PyTorch with one simulated CUDA device. Skips the test where Triton is absent or a GPU is present."""
    if torch.cuda.is_available():
        pytest.skip("the simulated device is for machines without a GPU")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    simulation = Simulation()

    def mode(value: int | str) -> None:
        simulation.sync_debug_mode = value

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": _PROPERTIES,
            "get_device_name": _PROPERTIES.name, "get_device_capability": (9, 0), "is_bf16_supported": True,
            "mem_get_info": (free_bytes, 2**30), "memory_allocated": 0, "max_memory_allocated": 0,
            "memory_reserved": 0, "reset_peak_memory_stats": None, "empty_cache": None, "_lazy_init": None,
            "_exchange_device": 0, "_maybe_exchange_device": 0, "set_device": None, "is_initialized": True,
        }.items():  # fmt: skip
            patch.setattr(torch.cuda, name, lambda *args, value=value, **kwargs: value)
        patch.setattr(torch.cuda, "synchronize", lambda *args: simulation.wait("synchronize"))
        patch.setattr(torch.cuda, "set_sync_debug_mode", mode)
        patch.setattr(torch.cuda, "get_sync_debug_mode", lambda: simulation.sync_debug_mode)
        patch.setattr(torch.cuda.nvtx, "range", lambda *args, **kwargs: contextlib.nullcontext())
        patch.setattr(torch, "Generator", _Generator)
        patch.setattr("mlaforge.engine.execution.runner.CudaCapture", FakeCapture)
        patch.setattr(
            interpreter.InterpretedFunction,
            "run",
            _launched_on_cpu(interpreter.InterpretedFunction.run, simulation.kernels),
        )
        # Parameters of a module that moves to the device become new ones: a CPU tensor cannot become a simulated one.
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            with simulation.active():
                yield simulation
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
