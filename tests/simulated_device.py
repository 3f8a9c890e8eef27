"""A device that is not the CPU, for tests: CPU memory behind torch's PrivateUse1 key.

Named in WORKBENCH_DEVICES, it is a kind of device like `cuda`: executor triton (in the interpreter,
so TRITON_INTERPRET=1), symmetric memory over POSIX memory of other processes, events, graphs. It
fails a program with the line at fault for what a GPU refuses, or would be slow or wrong at:

- a host read of its memory outside of `to_host`: item, tolist, cpu, bool, numpy, nonzero, ...
- an assigned number (`head[i] = 3`), which on a GPU is a copy from the host;
- an op that mixes its tensors with the CPU's, and a kernel that is given CPU memory;
- a time of events that the host has not waited for;
- between the start and the end of a capture: any host read and any copy from or to the host.

A capture is a tape of what was done to its memory; a replay does that again, and runs no Python of
the step. So a branch taken on the host, or an input that was replaced rather than refilled, shows.
"""

import ctypes
import dataclasses
import mmap
import os
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

from tests.interpreter import list_names_once
from workbench.domain import COMPLETED, SUCCESS, Fabric, this_host

KIND = "simulated"
GPUS = "SIMULATED_GPUS"
"""Environment: devices of a host."""


class _Backend(backend_registration._DummyBackendModule):  # type: ignore[misc]
    """What torch asks of a backend wherever one is there, also where it is not used."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


backend_registration._setup_privateuseone_for_python_backend(KIND, backend_module=_Backend())


class DeviceError(RuntimeError):
    """What a GPU would refuse, or do slowly or wrongly, with the line at fault."""


class _State:
    def __init__(self) -> None:
        self.reads = 0
        """Depth of places that may read."""
        self.tape: list[Callable[[], object]] | None = None
        self.done, self.queued = 0, 0
        """Marks that the host has waited for, and marks in all."""
        self.stuck: list[int] = []
        """Ranks that the stream waits for."""
        self.used, self.most = 0, 0
        """Bytes handed out, now and at most."""


STATE = _State()


def line_at_fault() -> str:
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith(_TORCH)]
    ours = [f for f in frames if os.path.basename(f.filename) != os.path.basename(__file__)]
    found = ours[-1]
    return f"{os.path.basename(found.filename)}:{found.lineno} `{found.line}`"


_TORCH = os.path.dirname(torch.__file__)


def refuse(what: str) -> None:
    raise DeviceError(f"{what} at {line_at_fault()}")


# Memory: the same bytes as a tensor of either device, through DLPack's structure.


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_id", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """No deleter: one in Python would run while an exception is on its way. What is reused is the
    structure, once the storage that was made of it is gone."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_DTYPES = {
    torch.float64: (2, 64),
    torch.float32: (2, 32),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.int64: (0, 64),
    torch.int32: (0, 32),
    torch.int16: (0, 16),
    torch.int8: (0, 8),
    torch.uint8: (1, 8),
    torch.bool: (6, 8),
}
_CPU, _EXTENSION = 1, 12
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_spare: list[_Managed] = []


def _let_go(managed: _Managed, shape: Any, strides: Any, memory: Any, nbytes: int) -> None:
    STATE.used -= nbytes
    _spare.append(managed)


def _over(tensor: torch.Tensor, device_type: int, fresh: bool = False) -> torch.Tensor:
    """A tensor of the device over the memory of `tensor`, which it keeps alive; `fresh` memory
    counts as handed out."""
    dims = max(tensor.dim(), 1)
    shape = (ctypes.c_int64 * dims)(*tensor.shape)
    strides = (ctypes.c_int64 * dims)(*tensor.stride())
    code, bits = _DTYPES[tensor.dtype]
    managed = _spare.pop() if _spare else _Managed()
    managed.tensor = _Tensor(
        tensor.data_ptr(), device_type, 0, tensor.dim(), code, bits, 1, shape, strides, 0
    )
    nbytes = tensor.untyped_storage().nbytes() if fresh else 0
    STATE.used += nbytes
    STATE.most = max(STATE.most, STATE.used)
    made = torch._C._from_dlpack(_capsule(ctypes.addressof(managed), b"dltensor", None))
    kept = (managed, shape, strides, tensor, nbytes)
    weakref.finalize(made.untyped_storage(), _let_go, *kept).atexit = False
    return made


def to_simulated(cpu: torch.Tensor, fresh: bool = False) -> torch.Tensor:
    return _over(cpu.detach(), _EXTENSION, fresh)


def on_cpu(simulated: torch.Tensor) -> torch.Tensor:
    return _over(simulated.detach(), _CPU)


def is_simulated(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == KIND


# Ops: each runs on the CPU's view of the same memory, after what a GPU would say of it.

_READS = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "bincount",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
}
"""Ops that hand a value or a shape that depends on one to the host."""


def _check(op: Any, leaves: list[Any], here: list[bool], to_cpu: bool, kwargs: Any) -> None:
    name = op._schema.name.removeprefix("aten::")
    indexed = name in ("index", "index_put", "_index_put_impl_", "index_put_")
    if indexed and any(t.dtype == torch.bool for t in leaves[1:]):
        refuse("a host read, of how many are true,")
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        refuse("a host read, of how many repeats there are,")
    if name in _READS or (to_cpu and any(here)):
        if STATE.tape is not None:
            refuse(f"a host read ({name}) in a capture")
        if not STATE.reads:
            refuse(f"a host read ({name})")
        return
    mixed = any(here) and not all(here)
    if name in ("copy_", "_copy_from", "_to_copy") or not any(here):
        copied = mixed or (kwargs.get("device") is not None and leaves and not any(here))
        if copied and STATE.tape is not None:
            refuse(f"a copy from the host ({name}) in a capture")
        return
    if mixed and any(t.dim() for t, sim in zip(leaves, here, strict=True) if not sim):
        refuse(f"devices are mixed in {name}")


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    leaves = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
    here = [is_simulated(a) for a in leaves]
    name = op._schema.name.removeprefix("aten::")
    asked = kwargs.get("device")
    to_cpu = asked is not None and torch.device(asked).type == "cpu"
    if name in ("_copy_from", "copy_") and not here[1 if name == "_copy_from" else 0]:
        to_cpu = True
    _check(op, leaves, here, to_cpu, kwargs)

    def other(value: Any) -> Any:
        if is_simulated(value):
            return on_cpu(value)
        simulated = isinstance(value, torch.device) and value.type == KIND
        return torch.device("cpu") if simulated else value

    with torch.no_grad():
        if name == "_copy_from":
            source, target = other(args[0]), other(args[1])
            _do(lambda: target.copy_(source))
            return args[1]
        out = kwargs.get("out")
        if is_simulated(out) and out.numel() == 0:  # to be resized
            fresh = torch.empty(0, dtype=out.dtype)
            rest = {k: v for k, v in kwargs.items() if k != "out"}
            op(*tree_map(other, args), **tree_map(other, rest), out=fresh)
            out.data = to_simulated(fresh)
            return out
        cpu_args, cpu_kwargs = tree_map(other, args), tree_map(other, kwargs)
        found = op(*cpu_args, **cpu_kwargs)
        given = {
            id(mine): theirs
            for mine, theirs in zip(
                tree_leaves((cpu_args, cpu_kwargs)), tree_leaves((args, kwargs)), strict=True
            )
            if _is(mine)
        }
        known = {
            t.untyped_storage().data_ptr() for t in tree_leaves((cpu_args, cpu_kwargs)) if _is(t)
        }
        if STATE.tape is not None:
            STATE.tape.append(_again(op, cpu_args, cpu_kwargs, found, given))

    def back(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in given:
            return given[id(value)]
        if to_cpu:
            return value
        return to_simulated(value, fresh=value.untyped_storage().data_ptr() not in known)

    return tree_map(back, found)


def _do(act: Callable[[], object]) -> None:
    act()
    if STATE.tape is not None:
        STATE.tape.append(act)


def _again(
    op: Any, args: Any, kwargs: Any, found: Any, given: dict[int, Any]
) -> Callable[[], None]:
    """The op once more into the memory of what it gave; a view of an argument needs nothing."""
    inputs = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if _is(t)}
    old = [t for t in tree_leaves(found) if _is(t)]
    views = [t.untyped_storage().data_ptr() in inputs for t in old]

    def act() -> None:
        if old and all(views) and not op._schema.is_mutable:
            return
        with torch.no_grad():
            new = [t for t in tree_leaves(op(*args, **kwargs)) if _is(t)]
        for was, now, view in zip(old, new, views, strict=True):
            if not view and was.data_ptr() != now.data_ptr():
                was.copy_(now)

    return act


def _is(value: object) -> bool:
    return isinstance(value, torch.Tensor)


_library = torch.library.Library("_", "IMPL")
_library.fallback(_run, "PrivateUse1")
# one op on a GPU, where the CPU's is made of others that read offsets on the host
_aten = torch.library.Library("aten", "IMPL")
_aten.impl(
    "_grouped_mm",
    lambda *args, **kwargs: _run(torch.ops.aten._grouped_mm.default, *args, **kwargs),
    "PrivateUse1",
)


_assign = torch.Tensor.__setitem__


def _setitem(self: torch.Tensor, index: Any, value: Any) -> None:
    if is_simulated(self) and not isinstance(value, torch.Tensor):
        refuse("a number is assigned to an element, a copy from the host,")
    _assign(self, index, value)


torch.Tensor.__setitem__ = _setitem  # type: ignore[method-assign]


# The device's interface.


class SimulatedEvent:
    def record(self) -> None:
        STATE.queued += 1
        self.number, self.at = STATE.queued, time.perf_counter()

    def done(self) -> bool:
        if STATE.stuck:
            return False
        STATE.done = max(STATE.done, self.number)
        return True

    def ms_since(self, earlier: Any) -> float:
        if max(self.number, earlier.number) > STATE.done:
            refuse("the time of an event that the host has not waited for")
        return float(self.at - earlier.at) * 1e3


class Simulated:
    kind, executor, clock, captures, backend = KIND, "triton", "simulated event", True, "gloo"

    def count(self) -> int:
        return int(os.environ.get(GPUS, max(len(os.sched_getaffinity(0)), 2)))

    def problem(self, ranks: int) -> str | None:
        if ranks > self.count():
            return f"has {self.count()} devices here, must have ranks={ranks}"
        return None

    def select(self, index: int) -> torch.device:
        return self.current()

    def current(self) -> torch.device:
        return torch.device(KIND, 0)

    def label(self) -> str:
        return "simulated"

    def fabric(self) -> Fabric:
        """SIMULATED_RACK: the cluster that all hosts are of, in one fabric."""
        rack = os.environ.get("SIMULATED_RACK", "")
        return dataclasses.replace(this_host(), cluster=rack, state=COMPLETED, status=SUCCESS)

    def normal(self, seed: int, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(KIND)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        STATE.reads += 1
        try:
            return tensor.detach().to("cpu")
        finally:
            STATE.reads -= 1

    def for_backend(self, tensor: torch.Tensor) -> torch.Tensor:
        if STATE.tape is not None:
            refuse("a collective through the host in a capture")
        return on_cpu(tensor)

    def launch(self, where: torch.device, launches: Iterable[Any]) -> None:
        for launch in launches:
            for name, value in launch.args.items():
                if isinstance(value, torch.Tensor) and not is_simulated(value):
                    refuse(f"{launch.name} is given CPU memory as {name}")
            _do(launch.run)

    def event(self) -> SimulatedEvent:
        return SimulatedEvent()

    def synchronize(self) -> None:
        STATE.done = STATE.queued

    def capture(self, steps: Sequence[Callable[[], Any]]) -> list[Callable[[], Any]]:
        return [self._captured(step) for step in steps]

    def _captured(self, step: Callable[[], Any]) -> Callable[[], None]:
        STATE.tape = []
        try:
            step()
            tape = tuple(STATE.tape)
        finally:
            STATE.tape = None

        def replay() -> None:
            for act in tape:
                act()

        return replay

    def l2_bytes(self) -> int:
        return 1 << 16

    def idle(self, ms: float) -> None:
        pass

    def reset_peak(self) -> None:
        STATE.most = STATE.used

    def peak(self) -> tuple[int, int | None, str]:
        return STATE.most, STATE.most, "simulated allocator"

    def symmetric(self, group: dist.ProcessGroup) -> "SimulatedSymmetric":
        return SimulatedSymmetric(group)

    def telemetry(self) -> dict[str, Any] | None:
        return {"clockMHz": 1000.0}


class SimulatedSymmetric:
    """Memory without a name, which peers open through its maker's descriptor; a barrier that
    counts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._files: dict[int, int] = {}
        self._kept: list[mmap.mmap] = []
        self._pad = self.empty(8)
        self._arrivals: list[torch.Tensor] = []

    def empty(self, nbytes: int) -> torch.Tensor:
        limit = os.environ.get("SIMULATED_BYTES")  # "RANK:BYTES": that rank has no more
        if limit and self._rank == int(limit.split(":")[0]) and nbytes > int(limit.split(":")[1]):
            raise MemoryError(f"{nbytes:,} bytes of symmetric memory cannot be had")
        file = os.memfd_create("simulated", os.MFD_CLOEXEC)
        os.posix_fallocate(file, 0, max(nbytes, 1))
        own = to_simulated(torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8))
        self._files[own.data_ptr()] = file
        return own

    def exchange(self, own: torch.Tensor) -> list[int]:
        return [view.data_ptr() for view in self._views(own)]

    def _views(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Each rank's memory, mapped for as long as this process lives."""
        file = self._files.pop(own.data_ptr())
        everyone: list[Any] = [None] * self._size
        dist.all_gather_object(everyone, (os.getpid(), file), group=self._group)
        views = []
        for rank, (pid, number) in enumerate(everyone):
            if rank == self._rank:
                views.append(on_cpu(own))
                continue
            opened = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            self._kept.append(mmap.mmap(opened, own.numel()))
            os.close(opened)
            views.append(torch.frombuffer(self._kept[-1], dtype=torch.uint8))
        dist.barrier(self._group)
        os.close(file)
        return views

    def connect(self) -> None:
        self._arrivals = [view.view(torch.int64) for view in self._views(self._pad)]

    def barrier(self, timeout_s: float) -> None:
        _do(lambda: self._meet(timeout_s / 2))

    def _meet(self, patience_s: float) -> None:
        self._arrivals[self._rank] += 1
        end = time.monotonic() + patience_s
        while not STATE.stuck and self.unanswered():
            if time.monotonic() > end:
                STATE.stuck = self.unanswered()
            time.sleep(1e-4)

    def unanswered(self) -> list[int]:
        mine = int(self._arrivals[self._rank])
        return [p for p, one in enumerate(self._arrivals) if int(one) < mine]


list_names_once()
DEVICES = {KIND: Simulated()}
