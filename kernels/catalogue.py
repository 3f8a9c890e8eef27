"""Every op's launches at given sizes, on tensors that hold nothing: what is compiled and tabled.

Legend: T tokens per rank, D hidden, F expert width, E experts in all, e experts of this rank, K
experts per token, P ranks, R rows that a rank has room for.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .combine import w2_combine, w13_dgrad_combine
from .device import Launch, Target
from .dispatch_w13 import dispatch_w13
from .memory import Peers
from .w2_dgrad import w2_dgrad
from .words import DECIDE_WORDS, Decide


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


def launches(sizes: Sizes, target: Target) -> dict[str, list[Launch]]:
    """Op name -> what its host entry launches for the target; nothing is run or allocated."""
    s, dtype = sizes, sizes.dtype

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def peers(*shape: int, dtype: torch.dtype = dtype) -> Peers:
        return Peers(all_P=empty(s.ep, *shape, dtype=dtype),
                     bases_P=empty(s.ep, dtype=torch.int64), offset=1 << 33)  # fmt: skip

    N = s.T * s.K
    decision = empty(DECIDE_WORDS, dtype=torch.int64)
    arena_B = empty(1 << 40, dtype=torch.uint8)
    starts_e = empty(s.e + 1, dtype=torch.int64)
    rank_R, slot_R = empty(s.R, dtype=torch.int32), empty(s.R, dtype=torch.int32)
    route = {"rank_R": rank_R, "row_R": slot_R}
    w13, w2 = empty(s.e, 2 * s.F, s.D), empty(s.e, s.D, s.F)
    rows_RD, act_RF = empty(s.R, s.D), empty(s.R, s.F)
    ops: dict[str, Callable[[], list[Launch]]] = {
        "dispatch_w13": lambda: dispatch_w13(
            target, x=peers(s.T, s.D), **route, divisor=s.K, starts_e=starts_e, w13_E2FD=w13,
            arena_B=arena_B, decision=decision, when=Decide.OK),
        "w2_combine": lambda: w2_combine(
            target, act_RF=act_RF, w2_EDF=w2, starts_e=starts_e, decision=decision, **route,
            rows_RD=rows_RD, out=peers(N, s.D)),
        "w2_dgrad": lambda: w2_dgrad(
            target, dy=peers(s.T, s.D), **route, divisor=s.K, starts_e=starts_e, w2_EDF=w2,
            decision=decision, dy_RD=rows_RD, g_RF=act_RF),
        "w13_dgrad_combine": lambda: w13_dgrad_combine(
            target, arena_B=arena_B, w13_E2FD=w13, starts_e=starts_e, decision=decision, **route,
            rows_RD=rows_RD, out=peers(N, s.D)),
    }  # fmt: skip
    return {name: entry() for name, entry in ops.items()}
