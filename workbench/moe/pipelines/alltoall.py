"""`alltoall`: the unfused baseline, all-to-all, grouped products, all-to-all.

Forward: publish; gather heads, ids and scores; route table, decision, pack; all-to-all; W13,
SwiGLU, W2; all-to-all back; unpack and sum over k. Backward mirrors it. Peers' memory is not
touched, so it runs across machines. It keeps every layer: nothing is recomputed.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from workbench.kernels.words import HEAD_WORDS, TEXT_BYTES
from workbench.moe.config import MoEConfig
from workbench.moe.pipelines import standard
from workbench.moe.pipelines.parts import AllToAll, Buffer, Gather, Phase, Pipeline
from workbench.moe.pipelines.standard import (
    publish,
    publish_grad,
    sum_up,
    sum_up_backward,
    w2_wgrad,
    w13_wgrad,
)

if TYPE_CHECKING:
    from workbench.moe.step import Step


def regions(c: MoEConfig, R: int) -> Iterator[Buffer]:
    N, P = c.T * c.K, c.ep
    yield from standard.regions(c, R)
    yield Buffer("call", "heads_PH", (P, HEAD_WORDS), "int64")
    yield Buffer("call", "texts_PB", (P, TEXT_BYTES), "uint8")
    yield Buffer("call", "ids_PTK", (P, c.T, c.K), "int32")
    yield Buffer("call", "send_ND", (N, c.D), c.dtype)
    yield Buffer("call", "send_N1", (N, 1), "float32")
    yield Buffer("call", "received_RD", (R, c.D), c.dtype)
    yield Buffer("call", "received_R1", (R, 1), "float32")
    yield Buffer("layer", "scores_PN1", (P, N, 1), "float32")
    yield Buffer("layer", "order_N", (N,), "int64")
    yield Buffer("layer", "position_R", (R,), "int64")


def pack(s: "Step") -> None:
    s.launch(
        "route_table",
        ids=s.local("ids_PTK"),
        rank=s.rank,
        rank_R=s.own("rank_R"),
        slot_R=s.own("slot_R"),
        starts_e=s.own("starts_e"),
        counts_PE=s.own("counts_PE"),
    )
    # Each entry has a part of the slot to itself, large enough in whatever order backwards come.
    part = s.plan.saved_bytes(s.plan.rows_available)
    s.launch(
        "decide",
        heads=s.local("heads_PH"),
        counts_PE=s.own("counts_PE"),
        decisions_L=s.own("decisions")[s.entry : s.entry + 1],
        entry=0,
        rank=s.rank,
        rows_available=s.plan.rows_available,
        slot_at=s.offset("slot") + s.entry * part,
        slot_bytes=part,
        row_bytes_O=s.memory.row_bytes_O,
        scratch_at=s.offset("operands"),
        saves=s.saves,
        texts=s.local("texts_PB"),
        first_error=s.own("first_error"),
        error_text=s.own("error_text"),
        peaks=s.own("peaks"),
    )
    s.launch(
        "send_order",
        ids_TK=s.own("ids_TK"),
        decision=s.decision,
        order_N=s.own("order_N"),
        num_experts=s.config.E,
    )
    s.launch(
        "receive_order",
        rank_R=s.own("rank_R"),
        decision=s.decision,
        position_R=s.own("position_R"),
        ranks=s.config.ep,
    )
    s.launch(
        "pack",
        rows_ND=s.own("x_TD"),
        order_N=s.own("order_N"),
        divisor=s.config.K,
        decision=s.decision,
        send_ND=s.own("send_ND"),
    )


def experts(s: "Step") -> None:
    s.launch(
        "dispatch_w13",
        x=s.local_rows("received_RD"),
        rank_R=None,
        row_R=s.own("position_R"),
        divisor=1,
        starts_e=s.own("starts_e"),
        w13_E2FD=s.weights.w13_E2FD,
        x_kept=s.kept("x_RD"),
        h1=s.kept("h1_R2F"),
        decision=s.decision,
    )
    s.launch("swiglu", h1=s.kept("h1_R2F"), decision=s.decision, act_RF=s.own("act_RF"))
    s.launch(
        "w2_combine",
        act_RF=s.own("act_RF"),
        w2_EDF=s.weights.w2_EDF,
        starts_e=s.own("starts_e"),
        decision=s.decision,
        rank_R=None,
        row_R=s.own("position_R"),
        out=s.local_rows("received_RD"),
    )


def unpack(s: "Step") -> None:
    s.launch(
        "unpack",
        received_ND=s.own("send_ND"),
        order_N=s.own("order_N"),
        decision=s.decision,
        out_ND=s.own("rows_TKD"),
    )
    sum_up(s)


def pack_grad(s: "Step") -> None:
    s.launch(
        "decide_backward",
        heads=s.local("heads_PH"),
        decision=s.decision,
        texts=s.local("texts_PB"),
        first_error=s.own("first_error"),
        error_text=s.own("error_text"),
    )
    s.launch(
        "pack",
        rows_ND=s.own("dy_TD"),
        order_N=s.own("order_N"),
        divisor=s.config.K,
        decision=s.decision,
        send_ND=s.own("send_ND"),
    )


def experts_backward(s: "Step") -> None:
    starts_e, position_R = s.own("starts_e"), s.own("position_R")
    s.launch(
        "w2_dgrad",
        dy=s.local_rows("received_RD"),
        rank_R=None,
        row_R=position_R,
        divisor=1,
        starts_e=starts_e,
        w2_EDF=s.weights.w2_EDF,
        decision=s.decision,
        dy_RD=s.own("rows_RD"),
        g_RF=s.own("g_RF"),
    )
    s.launch(
        "swiglu_backward",
        h1=s.kept("h1_R2F"),
        decision=s.decision,
        rank_R=s.own("rank_R"),
        row_R=s.own("slot_R"),
        scores=s.local("scores_PN1"),
        g_RF=s.own("g_RF"),
        dscores=s.local_rows("received_R1"),
        back_rank_R=None,
        back_row_R=position_R,
        act_RF=s.own("act_RF"),
    )
    w2_wgrad(s)
    s.launch(
        "w13_dgrad_combine",
        dh1=s.kept("h1_R2F"),
        w13_E2FD=s.weights.w13_E2FD,
        starts_e=starts_e,
        decision=s.decision,
        rank_R=None,
        row_R=position_R,
        out=s.local_rows("received_RD"),
    )
    w13_wgrad(s)


def unpack_grad(s: "Step") -> None:
    for sent, out in (("send_ND", "rows_TKD"), ("send_N1", "dscores_N1")):
        s.launch(
            "unpack",
            received_ND=s.own(sent),
            order_N=s.own("order_N"),
            decision=s.decision,
            out_ND=s.own(out),
        )
    sum_up_backward(s)


_HEADS = Gather((("head", "heads_PH"), ("text", "texts_PB")))

_FORWARD = (
    Phase("publish", publish),
    _HEADS,
    Gather((("ids_TK", "ids_PTK"), ("scores_N1", "scores_PN1"))),
    Phase("pack", pack),
    AllToAll("send_ND", "received_RD"),
    Phase("experts", experts),
    AllToAll("received_RD", "send_ND", back=True),
    Phase("sum", unpack),
)
_BACKWARD = (
    Phase("publish_grad", publish_grad),
    _HEADS,
    Phase("pack_grad", pack_grad),
    AllToAll("send_ND", "received_RD"),
    Phase("experts_backward", experts_backward),
    AllToAll("received_RD", "send_ND", back=True),
    AllToAll("received_R1", "send_N1", back=True),
    Phase("sum_backward", unpack_grad),
)
PIPELINE = Pipeline(
    forward=_FORWARD,
    backward=_BACKWARD,
    operands=standard.operands,
    regions=regions,
)
