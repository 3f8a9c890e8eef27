"""What device code and host entries share: launches as values, addresses, waits and signals.

A host entry `op(target, ...)` takes what its torch twin takes and returns the launches that do the
op, without doing them: the same list is run on a GPU, run in Triton's interpreter, or compiled
ahead of time for a GPU that is not there.

Kernels take addresses as int64, not tensors: rows lie in arenas at offsets that only the device
knows, peers' memory belongs to other processes, and the interpreter copies the whole storage of
every tensor that it is given, over what peers write meanwhile.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget

from .peers import Kept
from .words import ALIGNMENT_BYTES, Decide

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter: TRITON_INTERPRET=1 before Python starts."""
SPIN_LIMIT = tl.constexpr(1000)
"""Looks at a counter before the interpreter gives up; its producer would have run before."""
ROWS, BASE = tl.constexpr(int(Decide.ROWS)), tl.constexpr(int(Decide.BASE))
ALIGNED = tl.constexpr(ALIGNMENT_BYTES)
TRITON_DTYPE = {
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """What launches are chosen for. `arch` 90, 100, 103 as in sm_90a; 0 is the interpreter."""

    arch: int
    sms: int

    @property
    def interprets(self) -> bool:
        return self.arch == 0


INTERPRETER = Target(arch=0, sms=2)


def kernel(fn: Callable[..., None]) -> Any:
    """`triton.jit` of a kernel that is launched. Arguments annotated with a type, such as `entry:
    tl.int32`, have that type and make no other code whatever their value: addresses, and all that
    differs between the ranks, entries or calls of one context. Without it a rank would compile
    while its peers wait. Other integers are specialised: 1, multiples of 16, their width."""
    parameters = inspect.signature(fn).parameters.values()
    fixed = [p.name for p in parameters if isinstance(p.annotation, tl.dtype)]
    return triton.jit(do_not_specialize=fixed)(fn)


def target_of(device: torch.device) -> Target:
    """The target of a tensor's device. Raises ValueError for a GPU that kernels are not made for,
    and for a CPU without TRITON_INTERPRET=1."""
    if INTERPRET.value:
        return INTERPRETER
    if device.type != "cuda":
        raise ValueError(
            f"device={device} must be cuda, or set TRITON_INTERPRET=1 before Python starts"
        )
    properties = torch.cuda.get_device_properties(device)
    arch = properties.major * 10 + properties.minor
    if arch not in (90, 100, 103):
        raise ValueError(f"arch=sm_{arch} must be one of sm_90, sm_100, sm_103")
    return Target(arch=arch, sms=properties.multi_processor_count)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel launch. Arguments that end in `_at` are addresses in bytes: the kernel is given
    that of the tensor's first element, or 0 for None. Tensors live as long as the launch."""

    kernel: Any
    grid: int
    args: dict[str, int | Tensor | None]
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    @property
    def integers(self) -> dict[str, int]:
        """`args` as the kernel takes them."""
        return {
            name: value if isinstance(value, int) else address(value)
            for name, value in self.args.items()
        }

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is told besides arguments; the interpreter is told nothing."""
        if INTERPRET.value:
            return {}
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            # A product and a sum are rounded one after the other, as in the twins.
            "enable_fp_fusion": False,
        }

    def run(self) -> None:
        self.kernel[(self.grid,)](**self.integers, **self.constants, **self.options)

    def compile(self) -> Any:
        """What Triton would launch here, compiled and not launched; see `prepare`. Under
        `absent_device` it is compiled for that device. Not for the interpreter."""
        return self.kernel.warmup(
            grid=(self.grid,), **self.integers, **self.constants, **self.options
        )


def prepare(launches: Iterable[Launch]) -> None:
    """Compiles the launches' kernels and loads them onto the current device, so that `run` does
    neither, which could last while peers wait. In the interpreter there is nothing to do."""
    if INTERPRET.value:
        return
    for launch in launches:
        launch.compile().run  # noqa: B018 (Triton loads a kernel as this is looked up)


@contextmanager
def absent_device(arch: int, name: str = "absent") -> Iterator[None]:
    """Inside, Triton compiles for an NVIDIA GPU that is not there, by the very way of a launch.
    `name` tells Triton's caches of kernels apart. Not for several threads at a time."""
    before = triton.runtime.driver._active  # asking for it would look for a GPU
    triton.runtime.driver.set_active(_AbsentDriver(GPUTarget("cuda", arch, 32), f"{name}-{arch}"))
    try:
        yield
    finally:
        triton.runtime.driver.set_active(before)


@dataclass(frozen=True)
class _AbsentDriver:
    """What compiling asks of Triton's driver."""

    target: GPUTarget
    device: str

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return self.device

    def get_current_stream(self, device: str) -> int:
        return 0


def specialisation(launch: Launch, arch: int) -> str:
    """The key by which Triton finds the code of a launch: launches of one key share it. Nothing is
    compiled, and no GPU is needed. The process must not be in interpreter mode."""
    found: list[str] = []

    def keep(*, key: str, **_: Any) -> bool:
        found.append(key)
        return True  # tells Triton that the code comes from elsewhere

    with absent_device(arch, "key"), triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = keep
        launch.compile()
    (key,) = found
    return f"{launch.name}{key}"


def run(launches: Iterable[Launch]) -> None:
    """Queues the launches in order on the current stream; in the interpreter, runs them."""
    if not INTERPRET.value:
        triton.set_allocator(_descriptors)
    for launch in launches:
        launch.run()


def _descriptors(size: int, alignment: int, stream: int | None) -> Tensor:
    """Device memory for the tensor descriptors that a kernel makes."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def address(tensor: Tensor | None) -> int:
    """Address of the first element in bytes; 0 for none and for a meta tensor."""
    # Kernels are given no strides.
    assert tensor is None or tensor.is_contiguous(), tensor.stride()
    return 0 if tensor is None or tensor.is_meta else tensor.data_ptr()


def in_16_bytes(*bytes_: int) -> bool:
    """Whether every address or pitch in bytes is a whole number of 16-byte words, as vector
    accesses and tensor descriptors want it."""
    return all(b % 16 == 0 for b in bytes_)


Operand = Tensor | Kept | None


def operand_args(**operands: Operand) -> dict[str, Tensor | None]:
    """Address arguments of operands, each a tensor, or kept by the layer: `NAME_at`, 0 for a kept
    one, and `arena_at` and `row_bytes_at`, which those share."""
    kept = next((o for o in operands.values() if isinstance(o, Kept)), None)
    return {
        "arena_at": None if kept is None else kept.arena_B,
        "row_bytes_at": None if kept is None else kept.row_bytes_O,
        **{f"{name}_at": o if isinstance(o, Tensor) else None for name, o in operands.items()},
    }


def operand_constants(**operands: Operand) -> dict[str, int]:
    """`NAME_INDEX` of operands: the place among those that the layer keeps, -1 for a tensor."""
    return {
        f"{name.upper()}_INDEX": o.index if isinstance(o, Kept) else -1
        for name, o in operands.items()
    }


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@triton.jit
def pointer(at, dtype: tl.constexpr, VECTOR: tl.constexpr = False):
    """A typed pointer of an address, or of each; VECTOR promises that it divides by 16."""
    # To the interpreter an address of 0, which stands for none, is an int32.
    p = (at + tl.full([], 0, tl.int64)).to(tl.pointer_type(dtype))
    if VECTOR:
        p = tl.multiple_of(p, 16)
    return p


@triton.jit
def word(words_at, index: tl.constexpr):
    """One int64 word, e.g. of a decision."""
    return tl.load(pointer(words_at, tl.int64) + index)


@triton.jit
def operand_at(arena_at, decision_at, row_bytes_at, INDEX: tl.constexpr):
    """Address of operand INDEX of those that the layer keeps; see memory.Kept."""
    at = arena_at + word(decision_at, BASE)
    rows = word(decision_at, ROWS)
    for i in tl.static_range(INDEX):
        at += (rows * word(row_bytes_at, i) + ALIGNED - 1) // ALIGNED * ALIGNED
    return at


@triton.jit
def operand(
    at,
    arena_at,
    decision_at,
    row_bytes_at,
    INDEX: tl.constexpr,
    DTYPE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """A pointer to an operand: at its address, or with INDEX >= 0 where the layer keeps it."""
    if INDEX >= 0:
        return pointer(operand_at(arena_at, decision_at, row_bytes_at, INDEX), DTYPE, VECTOR)
    return pointer(at, DTYPE, VECTOR)


@triton.jit
def peer_rows(
    bases_at,
    offset,
    rank_at,
    row_at,
    r,
    mask,
    divisor,
    pitch,
    ROW: tl.constexpr,
    RANKED: tl.constexpr,
):
    """Byte addresses of the rows row[r] // divisor of ranks rank[r] (0 if not RANKED), `pitch`
    bytes apart; int64. rank: int32; row: ROW, int32 or int64."""
    row = tl.load(pointer(row_at, ROW) + r, mask=mask, other=0).to(tl.int64)
    if RANKED:
        rank = tl.load(pointer(rank_at, tl.int32) + r, mask=mask, other=0)
        base = tl.load(pointer(bases_at, tl.int64) + rank, mask=mask, other=0)
    else:
        base = tl.load(pointer(bases_at, tl.int64))
    return base + offset + (row // divisor) * pitch


@triton.jit
def wait(counter, value, SCOPE: tl.constexpr):
    """Returns when *counter >= value, an acquire. What ordinary stores wrote before the signal may
    then be read by ordinary loads and through tensor descriptors.

    Every thread of the program is behind it: a scalar atomic ends in a barrier of the program.
    """
    if INTERPRET:
        looks = 0
        while tl.atomic_add(counter, 0, sem="acquire", scope=SCOPE) < value:
            looks += 1
            assert looks < SPIN_LIMIT, "a task waits for one that is not before it"
    else:
        while tl.atomic_add(counter, 0, sem="acquire", scope=SCOPE) < value:
            pass  # until the program that it waits for signals
        # Descriptors read through the async proxy, which an acquire alone does not order.
        tl.inline_asm_elementwise(
            "fence.proxy.async; mov.b32 $0, $1;",
            "=r,r",
            [value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def signal(counter, SCOPE: tl.constexpr):
    """Adds 1, a release of everything that all threads of the program have written."""
    # A release orders what its own thread knows of: the other threads' stores come first.
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope=SCOPE)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """float32 x as DTYPE, to nearest, ties to even."""
    if INTERPRET and tl.bfloat16 == DTYPE:
        # The interpreter's own conversion truncates.
        bits = tl.where(x == x, x, 0.0).to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, bits, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def widened(x):
    """x as float32."""
    if INTERPRET and x.dtype == tl.bfloat16:
        # Exact, and many times faster than the interpreter's own conversion.
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def matmul(a, b, acc, DTYPE: tl.constexpr):
    """acc + a @ b in FP32; float32 operands are not rounded."""
    if INTERPRET:
        # The interpreter multiplies the raw integers of BF16.
        return tl.dot(widened(a), widened(b), acc, input_precision="ieee")
    if tl.float32 == DTYPE:
        return tl.dot(a, b, acc, input_precision="ieee")
    return tl.dot(a, b, acc)
