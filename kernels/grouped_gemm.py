"""Grouped products over received rows: out[r] = a[r] @ weights of r's expert, FP32 inside.

One kernel serves the four products of the layer: rows may first be gathered from their owners
(dispatch + W13, W2's dgrad) and results may be scattered to theirs (W2 + combine, W13's dgrad).
Persistent programs work through a task table. Programs that gather come first in the grid and
share the later products once they are done; the grid is no larger than what runs at the same time,
so that waits end.

Legend: R rows received, K inner and N outer width of the product, E experts of this rank, P ranks.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from .device import (
    TRITON_DTYPE,
    Launch,
    Target,
    address,
    cdiv,
    in_16_bytes,
    operand_args,
    operand_constants,
)
from .grouped_gemm_kernel import grouped_gemm_kernel
from .ops import Sizes
from .peers import Kept, Peers
from .tasks import GATHER, PRODUCT, Shape, Task, interleaving, task_table
from .words import Decide


@dataclass(frozen=True, kw_only=True)
class GemmChoice:
    """How a grouped product is launched: tile BM x BN, BK deep, `stages` tiles in flight, row
    tiles taken `group` at a time, each gathered in `parts` parts by `gatherers` programs, GK
    columns at a time. The other programs alone do the first `early` percent of the products.
    `warp_specialize` splits loads and products over warps."""

    BM: int
    BN: int
    BK: int
    stages: int
    warps: int
    programs: int
    group: int
    parts: int
    gatherers: int
    early: int
    GK: int
    warp_specialize: bool


FLOP_PER_LINK_BYTE = 2500
"""BF16 FLOP in the time of a byte from a peer, at the peaks of B200 (2250 TFLOP/s, 900 GB/s) and,
a tenth less, of H200 (989, 450). Sources: hardware.toml."""


def choose_grouped_gemm(
    target: Target, *, N: int, K: int, itemsize: int, gather: bool, tma: bool
) -> GemmChoice:
    """Pure. 128 x 256 x 64 tiles of BF16 in 4 stages fill an SM's shared memory, so one program
    runs on it; its FP32 accumulator is 128 registers of each of 256 threads on Hopper, and half
    of the tensor memory on Blackwell. Without `tma` for both operands, every element has an address
    in registers: small tiles, and loads that the compiler cannot put on warps of their own. With
    `gather` loads stay on the warps that wait: Hopper's compiler refuses to part them, and on
    Blackwell the fence behind the wait would be run by other warps than those that load."""
    if target.interprets:
        # Small, so that small tests have several tiles, tails and groups.
        return GemmChoice(
            BM=64,
            BN=64,
            BK=64,
            stages=1,
            warps=4,
            programs=1,
            group=2,
            parts=2 if gather else 0,
            gatherers=0,
            early=0,
            GK=64,
            warp_specialize=False,
        )
    # A pull is 64 KiB per program and round trip: an eighth of the SMs keeps up with the product.
    gatherers = target.sms // 8 if gather else 0
    # Gathering a row costs `itemsize` bytes per K, multiplying it 2 N FLOP per K.
    early = min(100, FLOP_PER_LINK_BYTE * itemsize * 100 // (2 * N)) if gather else 0
    if itemsize == 4 or not tma:  # float32, a test dtype, is for FMA units, not tensor cores
        return GemmChoice(
            BM=64,
            BN=64,
            BK=32,
            stages=2,
            warps=8,
            programs=target.sms,
            group=8,
            parts=4 if gather else 0,
            gatherers=gatherers,
            early=early,
            GK=128,
            warp_specialize=False,
        )
    BN = 256 if N > 128 else 128
    if not gather:
        # Loads on warps of their own; Hopper's compiler adds the product's second warp group.
        return GemmChoice(
            BM=128,
            BN=BN,
            BK=64,
            stages=3,
            warps=4 if target.arch == 90 else 8,
            programs=target.sms,
            group=8,
            parts=0,
            gatherers=0,
            early=0,
            GK=2048,
            warp_specialize=True,
        )
    return GemmChoice(
        BM=128,
        BN=BN,
        BK=64,
        stages=4,
        warps=8,
        programs=target.sms,
        group=8,
        parts=8,
        gatherers=gatherers,
        early=early,
        GK=min(2048, triton.next_power_of_2(K)),
        warp_specialize=False,
    )


def grouped_gemm(
    target: Target,
    *,
    weights: Tensor,
    weights_NK: bool,
    starts_e: Tensor,
    decision: Tensor,
    again: bool = False,
    rows: int,
    peers: Peers,
    rank_R: Tensor | None,
    row_R: Tensor,
    divisor: int = 1,
    gather: bool = False,
    scatter: bool = False,
    a: Tensor | Kept,
    out: Tensor | Kept | None = None,
) -> list[Launch]:
    """Launches of a grouped product: its task table, then the product.

    weights: [E, N, K] with weights_NK, else [E, K, N]. `rows`: the most rows. a, out: [R, K],
    [R, N], tensors or kept by the layer. `again`: only where operands have to be made again.
    """
    E, first, second = weights.shape
    N, K = (first, second) if weights_NK else (second, first)
    dtype, size = weights.dtype, weights.element_size()
    tensors = [t.arena_B if isinstance(t, Kept) else t for t in (a, out) if t is not None]
    aligned = in_16_bytes(*map(address, tensors), peers.offset)
    pitches = in_16_bytes(K * size, N * size, address(weights))
    a_tma = aligned and in_16_bytes(K * size)
    b_tma = in_16_bytes((K if weights_NK else N) * size, address(weights))
    choice = choose_grouped_gemm(
        target, N=N, K=K, itemsize=size, gather=gather, tma=a_tma and b_tma
    )
    shape = Shape(
        block=choice.BM,
        parts=choice.parts,
        columns=cdiv(N, choice.BN),
        group=choice.group,
        merged=target.interprets,
    )
    table = task_table(
        target, starts_e=starts_e, decision=decision, again=again, rows=rows, shape=shape
    )
    args = {
        **operand_args(a=a, out=out),
        "decision_at": decision,
        "b_at": weights,
        "bases_at": peers.bases_P,
        "offset": peers.offset,
        "rank_at": rank_R,
        "row_at": row_R,
        "divisor": divisor,
        "tasks_at": table.tasks,
        "counts_at": table.counts,
        "counters_at": table.counters,
        "first_product": table.products_at,
        "E": E,
        "N": N,
        "K": K,
    }
    constants: dict[str, Any] = {
        **operand_constants(a=a, out=out),
        "ROWS_WORD": int(Decide.ROWS),
        "GATHERS": gather,
        "SCATTER": scatter,
        "MERGED": shape.merged,
        "B_NK": weights_NK,
        "A_TMA": a_tma,
        "B_TMA": b_tma,
        "VECTOR": aligned and pitches,
        "DTYPE": TRITON_DTYPE[dtype],
        "ROW": TRITON_DTYPE[row_R.dtype],
        "RANKED": rank_R is not None,
        "BM": choice.BM,
        "BN": choice.BN,
        "BK": choice.BK,
        "STAGES": choice.stages,
        "SPECIALIZE": choice.warp_specialize,
        "EACH": triton.next_power_of_2(cdiv(choice.BM, max(choice.parts, 1))),
        "GK": choice.GK,
        "GATHERERS": choice.gatherers,
        "EARLY": choice.early,
    }
    product = Launch(
        kernel=grouped_gemm_kernel,
        grid=choice.programs,
        args=args,
        constants=constants,
        num_warps=choice.warps,
        num_stages=choice.stages,
    )
    return [table.launch, product]


def product_tiles(sizes: Sizes, launch: Launch) -> int:
    """Tiles of a grouped product with balanced rows."""
    c = launch.constants
    rows = cdiv(sizes.R // sizes.e, c["BM"])
    return sizes.e * rows * cdiv(launch.integers["N"], c["BN"])


def grouped_gemm_tasks_torch(
    *,
    tasks: Tensor,
    shape: Shape,
    seed: int = 0,
    programs: dict[int, int] | None = None,
    weights_EKN: Tensor,
    a_RK: Tensor,
    source_RK: Tensor | None,
    out_RN: Tensor,
) -> None:
    """Does the tasks one by one in an order that their waits allow, drawn from `seed`.

    Gathers copy rows of source_RK (already in the order of the table) into a_RK; products read
    a_RK as it is at that moment. `programs`: how many share a kind's tasks, default one each.
    """
    shares = programs or {}
    BN = cdiv(weights_EKN.shape[2], shape.columns)
    for task in interleaving(tasks, lambda kind: shares.get(kind, 1 << 30), seed):
        rows = slice(task[Task.ROW], task[Task.ROW] + task[Task.ROWS])
        if task[Task.KIND] == GATHER:
            assert source_RK is not None
            a_RK[rows] = source_RK[rows]
        elif task[Task.KIND] == PRODUCT:
            columns = slice(task[Task.COLUMN] * BN, (task[Task.COLUMN] + 1) * BN)
            weights_KN = weights_EKN[task[Task.EXPERT]][:, columns]
            out_RN[rows, columns] = torch.mm(a_RK[rows], weights_KN)
