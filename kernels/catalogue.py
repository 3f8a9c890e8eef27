"""Every op's launches at given sizes, on tensors that hold nothing: what is compiled and tabled.

Legend: T tokens per rank, D hidden, F expert width, E experts in all, e experts of this rank, K
experts per token, P ranks, R rows that a rank has room for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .combine import w2_combine, w13_dgrad_combine
from .decide import decide, decide_backward, release
from .device import Launch, Target, cdiv
from .dispatch_w13 import dispatch_w13
from .memory import Peers
from .permute import pack, receive_order, send_order, unpack
from .publish import publish, publish_grad
from .route_table import route_table
from .sum_k import sum_k, take_dscores
from .swiglu import swiglu, swiglu_backward
from .w2_dgrad import w2_dgrad
from .wgrad import w2_wgrad, w13_wgrad
from .words import DECIDE_WORDS, HEAD_WORDS, PEAK_WORDS, TEXT_BYTES, Decide


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

    N, F32, I32, I64 = s.T * s.K, torch.float32, torch.int32, torch.int64
    decision, decisions_L = empty(DECIDE_WORDS, dtype=I64), empty(11, DECIDE_WORDS, dtype=I64)
    arena_B = empty(1 << 40, dtype=torch.uint8)
    starts_e, counts_PE = empty(s.e + 1, dtype=I64), empty(s.ep, s.E, dtype=I64)
    rank_R, slot_R = empty(s.R, dtype=I32), empty(s.R, dtype=I32)
    route = {"rank_R": rank_R, "row_R": slot_R}
    w13, w2 = empty(s.e, 2 * s.F, s.D), empty(s.e, s.D, s.F)
    x_TD, rows_RD, act_RF = empty(s.T, s.D), empty(s.R, s.D), empty(s.R, s.F)
    ids_TK, scores_TK = empty(s.T, s.K, dtype=I32), empty(s.T, s.K, dtype=F32)
    head, order_N = empty(HEAD_WORDS, dtype=I64), empty(N, dtype=I64)
    say = {"heads": peers(HEAD_WORDS, dtype=I64), "texts": peers(TEXT_BYTES, dtype=torch.uint8),
           "first_error": empty(DECIDE_WORDS, dtype=I64),
           "error_text": empty(TEXT_BYTES, dtype=torch.uint8)}  # fmt: skip
    scores, dscores = peers(N, 1, dtype=F32), peers(N, 1, dtype=F32)
    home = {"back_rank_R": rank_R, "back_row_R": slot_R}
    common = {"starts_e": starts_e, "decision": decision}
    activation = {"arena_B": arena_B, "decision": decision, "act_RF": act_RF}
    backward = {**activation, **route, **home, "scores": scores, "g_RF": act_RF,
                "dscores": dscores}  # fmt: skip
    calls: dict[str, tuple[Callable[..., list[Launch]], dict[str, Any]]] = {
        "publish": (publish, {
            "x_TD": x_TD, "ids_TK": empty(s.T, s.K, dtype=I64), "scores_TK": scores_TK,
            "x_out_TD": x_TD, "ids_out_TK": ids_TK, "scores_out_TK": scores_TK, "head": head,
            "num_experts": s.E}),
        "route_table": (route_table, {
            "ids": peers(s.T, s.K, dtype=I32), "rank": 1 % s.ep, "rank_R": rank_R,
            "slot_R": slot_R, "starts_e": starts_e, "counts_PE": counts_PE}),
        "decide": (decide, {
            **say, "counts_PE": counts_PE, "decisions_L": decisions_L, "entry": 2,
            "rank": 1 % s.ep, "rows_available": 8 * N, "slot_at": 1 << 33,
            "slot_bytes": 1 << 34, "x_row_bytes": 2 * s.D, "h1_row_bytes": 4 * s.F,
            "x_scratch_at": 1 << 35, "h1_scratch_at": 1 << 36, "saves": True,
            "peaks": empty(PEAK_WORDS, dtype=I64)}),
        "dispatch_w13": (dispatch_w13, {
            **common, **route, "x": peers(s.T, s.D), "divisor": s.K, "w13_E2FD": w13,
            "arena_B": arena_B, "when": Decide.OK}),
        "swiglu": (swiglu, activation),
        "swiglu, clamped": (swiglu, {**activation, "limit": 7.0}),
        "w2_combine": (w2_combine, {
            **common, **route, "act_RF": act_RF, "w2_EDF": w2,
            "out": peers(N, s.D)}),
        "sum_k": (sum_k, {
            "rows_TKD": empty(s.T, s.K, s.D), "scores_TK": scores_TK, "decision": decision,
            "out_TD": x_TD}),
        "publish_grad": (publish_grad, {"dy_TD": x_TD, "dy_out_TD": x_TD, "head": head}),
        "decide_backward": (decide_backward, {**say, "decision": decision}),
        "w2_dgrad": (w2_dgrad, {
            **common, **route, "dy": peers(s.T, s.D), "divisor": s.K, "w2_EDF": w2,
            "dy_RD": rows_RD, "g_RF": act_RF}),
        "swiglu_backward": (swiglu_backward, backward),
        "swiglu_backward, clamped": (swiglu_backward, {**backward, "limit": 7.0}),
        "w2_wgrad": (w2_wgrad, {
            **common, "dy_RD": rows_RD, "act_RF": act_RF, "dw2_EDF": w2}),
        "w2_wgrad, FP32, accumulating": (w2_wgrad, {
            **common, "dy_RD": rows_RD, "act_RF": act_RF, "accumulate": True,
            "dw2_EDF": empty(s.e, s.D, s.F, dtype=F32)}),
        "w13_dgrad_combine": (w13_dgrad_combine, {
            **common, **route, "arena_B": arena_B, "w13_E2FD": w13,
            "out": peers(N, s.D)}),
        "w13_wgrad": (w13_wgrad, {**common, "arena_B": arena_B, "dw13_E2FD": w13}),
        "take_dscores": (take_dscores, {
            "dscores_TK": scores_TK, "decision": decision, "out_TK": scores_TK}),
        "release": (release, {"decision": decision}),
        "send_order": (send_order, {
            "ids_TK": ids_TK, "decision": decision, "order_N": order_N, "num_experts": s.E}),
        "receive_order": (receive_order, {
            "rank_R": rank_R, "decision": decision, "ranks": s.ep,
            "position_R": empty(s.R, dtype=I64)}),
        "pack": (pack, {
            "rows_ND": x_TD, "order_N": order_N, "divisor": s.K, "decision": decision,
            "send_ND": empty(N, s.D)}),
        "unpack": (unpack, {
            "received_ND": empty(N, s.D), "order_N": order_N, "decision": decision,
            "out_ND": empty(N, s.D)}),
    }  # fmt: skip
    return {name: entry(target, **arguments) for name, (entry, arguments) in calls.items()}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What an op must do at least on one rank: FLOP, bytes of HBM traffic, bytes received from or
    sent to peers in the busier direction; and how many tiles it is cut into."""

    flop: int
    hbm_bytes: int
    link_bytes: int
    tiles: int


MAIN = {"publish": 0, "route_table": 0, "send_order": 0, "receive_order": 0}
"""Index of the launch that does an op's work, where it is not the last."""


def work(sizes: Sizes, op: str, launch: Launch) -> Work:
    """Of an op and its main launch, for balanced rows: every operand is read and every result
    written once; a gathered row is read at its owner, written, and read again."""
    s, item = sizes, sizes.dtype.itemsize
    N, R, D, F, e = s.T * s.K, s.R, s.D, s.F, s.e
    x, act, h1, w2, w13 = (item * n for n in (R * D, R * F, 2 * R * F, e * D * F, 2 * e * D * F))
    tokens, ids = item * s.T * D, 4 * N
    table = {
        "publish": (0, 2 * tokens + 5 * ids, 0),
        "route_table": (0, s.ep * ids + 16 * N, s.ep * ids),
        "decide": (0, 8 * s.ep * s.E, 0),
        "dispatch_w13": (4 * R * D * F, 3 * x + w13 + h1, x),
        "swiglu": (0, h1 + act, 0),
        "w2_combine": (2 * R * D * F, act + w2 + x, x),
        "sum_k": (0, item * N * D + ids + tokens, 0),
        "publish_grad": (0, 2 * tokens, 0),
        "decide_backward": (0, 8 * s.ep, 0),
        "w2_dgrad": (2 * R * D * F, 3 * x + w2 + act, x),
        "swiglu_backward": (0, 2 * h1 + 2 * act + 8 * R, 4 * R),
        "w2_wgrad": (2 * R * D * F, x + act + w2, 0),
        "w2_wgrad, FP32, accumulating": (2 * R * D * F, x + act + 8 * e * D * F, 0),
        "w13_dgrad_combine": (4 * R * D * F, h1 + w13 + x, x),
        "w13_wgrad": (4 * R * D * F, h1 + x + w13, 0),
        "take_dscores": (0, 2 * ids, 0),
        "release": (0, 8, 0),
        "send_order": (0, 3 * ids, 0),
        "receive_order": (0, 12 * R, 0),
        "pack": (0, tokens + item * N * D, 0),
        "unpack": (0, 2 * item * N * D, 0),
    }
    flop, hbm, link = table.get(op) or table[op.partition(",")[0]]
    return Work(flop=flop, hbm_bytes=hbm, link_bytes=link * (s.ep - 1) // s.ep,
                tiles=_tiles(sizes, launch))  # fmt: skip


def _tiles(sizes: Sizes, launch: Launch) -> int:
    """Tiles of a launch's work for balanced rows."""
    args, c = launch.integers, launch.constants
    if launch.name == "grouped_gemm_kernel":
        return sizes.e * cdiv(sizes.R // sizes.e, c["BM"]) * cdiv(args["N"], c["BN"])
    if launch.name == "wgrad_kernel":
        return args["E"] * cdiv(args["M"], c["BM"]) * cdiv(args["N"], c["BN"])
    if launch.name == "swiglu_kernel":
        return cdiv(sizes.R, c["BR"]) * cdiv(args["F"], c["BF"])
    if launch.name == "swiglu_backward_kernel":
        return cdiv(sizes.R, c["BR"])
    return launch.grid
