"""What an op is, declared once beside its code: entry, twin, what it moves, what it must cost.

Pipelines launch ops by name. An executor looks up the entry or the twin, the meter what is moved
between ranks, the kernel table what the op computes and moves at given sizes.

Legend: T tokens per rank, D hidden, F expert width, E experts in all, e experts of this rank, K
experts per token, P ranks, R rows that a rank has room for, N = T * K, O operands kept.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .device import Launch, Target
from .peers import Kept, Peers
from .words import DECIDE_WORDS, HEAD_WORDS, PEAK_WORDS, TEXT_BYTES

Arguments = Mapping[str, Any]
Move = tuple[str, str]
"""Arguments of an op: the peers' buffer, and the peer of each row (None: the rank itself)."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """One call of a layer; defaults are the published study's shape at EP 64, balanced."""

    T: int = 2048
    D: int = 7168
    F: int = 3072
    E: int = 384
    K: int = 6
    ep: int = 64
    dtype: torch.dtype = torch.bfloat16

    @property
    def e(self) -> int:
        return self.E // self.ep

    @property
    def R(self) -> int:
        return self.T * self.K

    def bytes(self, *shape: int) -> int:
        """Bytes of a buffer of the layer's dtype."""
        return torch.Size(shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What an op must do at least on one rank with balanced rows: FLOP, bytes of HBM traffic (every
    operand read and every result written once; a gathered row is read at its owner, written, and
    read again), and bytes of rows received from or sent to all ranks, itself among them, in the
    busier direction."""

    flop: int = 0
    hbm_bytes: int
    link_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Op:
    """An op of the layer. `entry(target, **arguments)` returns its launches, `twin(**arguments)`
    does the same with torch; `pulls` and `pushes` are the rows that it reads from peers or writes
    to them. `examples` gives arguments for sizes, by variant ("" for the plain one); `cost` what
    such a call must do, and `main` and `tiles` which launch does it, and in how many tiles."""

    name: str
    entry: Callable[..., list[Launch]]
    twin: Callable[..., None]
    pulls: tuple[Move, ...]
    pushes: tuple[Move, ...]
    examples: Callable[["Blanks"], Mapping[str, Arguments]]
    cost: Callable[[Sizes, Arguments], Cost]
    main: int
    tiles: Callable[[Sizes, Launch], int]


@dataclass(frozen=True, kw_only=True)
class Example:
    """A variant of an op at given sizes: `label` is its name in tables."""

    op: Op
    label: str
    sizes: Sizes
    arguments: Arguments

    def launches(self, target: Target) -> list[Launch]:
        """What the entry launches for the target; nothing is run or allocated."""
        return self.op.entry(target, **self.arguments)

    @property
    def cost(self) -> Cost:
        return self.op.cost(self.sizes, self.arguments)


OPS: dict[str, Op] = {}
"""Every op by name; filled as the modules that write them are imported."""


def op(
    *,
    twin: Callable[..., None],
    examples: Callable[["Blanks"], Mapping[str, Arguments]],
    cost: Callable[[Sizes, Arguments], Cost],
    pulls: tuple[Move, ...] = (),
    pushes: tuple[Move, ...] = (),
    main: int = -1,
    tiles: Callable[[Sizes, Launch], int] = lambda sizes, launch: launch.grid,
) -> Callable[[Callable[..., list[Launch]]], Callable[..., list[Launch]]]:
    """Registers the decorated host entry as the op of its name."""

    def register(entry: Callable[..., list[Launch]]) -> Callable[..., list[Launch]]:
        name = entry.__name__
        assert name not in OPS, f"two ops are called {name}"
        OPS[name] = Op(
            name=name,
            entry=entry,
            twin=twin,
            pulls=pulls,
            pushes=pushes,
            examples=examples,
            cost=cost,
            main=main,
            tiles=tiles,
        )
        return entry

    return register


def examples(sizes: Sizes) -> Iterator[Example]:
    """Every variant of every op, in the order of their registration."""
    blanks = Blanks(sizes)
    for name, known in OPS.items():
        for variant, arguments in known.examples(blanks).items():
            label = f"{name}, {variant}" if variant else name
            yield Example(op=known, label=label, sizes=sizes, arguments=arguments)


class Blanks:
    """Tensors that hold nothing (device meta), of the shapes that a call at `sizes` has."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.sizes.dtype, device="meta")

    def peers(self, *shape: int, dtype: torch.dtype | None = None) -> Peers:
        return Peers(
            all_P=self.empty(self.sizes.ep, *shape, dtype=dtype),
            bases_P=self.empty(self.sizes.ep, dtype=torch.int64),
            offset=1 << 33,
        )

    def kept(self, index: int, width: int) -> Kept:
        return Kept(
            arena_B=self.empty(1 << 40, dtype=torch.uint8),
            decision=self.decision,
            row_bytes_O=self.empty(2, dtype=torch.int64),
            index=index,
            width=width,
            dtype=self.sizes.dtype,
        )

    @cached_property
    def decision(self) -> Tensor:
        return self.empty(DECIDE_WORDS, dtype=torch.int64)

    @property
    def x_kept(self) -> Kept:
        return self.kept(0, self.sizes.D)

    @property
    def h1_kept(self) -> Kept:
        return self.kept(1, 2 * self.sizes.F)

    @property
    def x_TD(self) -> Tensor:
        return self.empty(self.sizes.T, self.sizes.D)

    @property
    def rows_RD(self) -> Tensor:
        return self.empty(self.sizes.R, self.sizes.D)

    @property
    def act_RF(self) -> Tensor:
        return self.empty(self.sizes.R, self.sizes.F)

    @property
    def w13_E2FD(self) -> Tensor:
        return self.empty(self.sizes.e, 2 * self.sizes.F, self.sizes.D)

    @property
    def w2_EDF(self) -> Tensor:
        return self.empty(self.sizes.e, self.sizes.D, self.sizes.F)

    @property
    def ids_TK(self) -> Tensor:
        return self.empty(self.sizes.T, self.sizes.K, dtype=torch.int32)

    @property
    def scores_TK(self) -> Tensor:
        return self.empty(self.sizes.T, self.sizes.K, dtype=torch.float32)

    @property
    def order_N(self) -> Tensor:
        return self.empty(self.sizes.R, dtype=torch.int64)

    @property
    def head(self) -> Tensor:
        return self.empty(HEAD_WORDS, dtype=torch.int64)

    @property
    def peaks(self) -> Tensor:
        return self.empty(PEAK_WORDS, dtype=torch.int64)

    @property
    def starts_e(self) -> Tensor:
        return self.empty(self.sizes.e + 1, dtype=torch.int64)

    @property
    def counts_PE(self) -> Tensor:
        return self.empty(self.sizes.ep, self.sizes.E, dtype=torch.int64)

    def route(self, prefix: str = "") -> dict[str, Tensor]:
        """The source of each row, or with a prefix where its results go."""
        return {
            f"{prefix}rank_R": self.empty(self.sizes.R, dtype=torch.int32),
            f"{prefix}row_R": self.empty(self.sizes.R, dtype=torch.int32),
        }

    def errors(self) -> dict[str, Any]:
        """What ops that agree on an error read and write."""
        return {
            "heads": self.peers(HEAD_WORDS, dtype=torch.int64),
            "texts": self.peers(TEXT_BYTES, dtype=torch.uint8),
            "first_error": self.empty(DECIDE_WORDS, dtype=torch.int64),
            "error_text": self.empty(TEXT_BYTES, dtype=torch.uint8),
        }

    def over_experts(self) -> dict[str, Tensor]:
        """What every grouped product is given."""
        return {"starts_e": self.starts_e, "decision": self.decision}
