"""`standard`: fused dispatch and combine over peers' memory.

Forward: publish; barrier; route table, decision, dispatch + W13, SwiGLU, W2 + combine; barrier;
sum over k. Backward: publish dy; barrier; the forward producers again if need be, W2 dgrad with
gather, SwiGLU backward with the score gradient, W2 wgrad, W13 dgrad with scatter, W13 wgrad;
barrier; sum over k.

The rows of dy are gathered as they are. Their scores are applied in SwiGLU's backward, where the
score gradient is act . (dy @ w2) of a row: no route outputs are kept for it, none are made again,
and it is right at a score of zero too.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from workbench.moe.config import MoEConfig
from workbench.moe.pipelines.parts import Barrier, Buffer, Operand, Phase, Pipeline

if TYPE_CHECKING:
    from workbench.moe.step import Step


def operands(c: MoEConfig) -> tuple[Operand, ...]:
    """The gathered rows, and the gate and up output."""
    return Operand("x_RD", c.D, c.dtype), Operand("h1_R2F", 2 * c.F, c.dtype)


def regions(c: MoEConfig, R: int) -> Iterator[Buffer]:
    N, e = c.T * c.K, c.local_experts
    yield Buffer("call", "ids_TK", (c.T, c.K), "int32")
    yield Buffer("call", "rows_TKD", (N, c.D), c.dtype)
    if c.training:
        yield Buffer("call", "dy_TD", (c.T, c.D), c.dtype)
        yield Buffer("call", "dscores_N1", (N, 1), "float32")
    yield Buffer("layer", "x_TD", (c.T, c.D), c.dtype, "dy_TD" if c.training else None)
    yield Buffer("layer", "scores_N1", (N, 1), "float32")
    yield Buffer("layer", "rank_R", (R,), "int32")
    yield Buffer("layer", "slot_R", (R,), "int32")
    yield Buffer("layer", "starts_e", (e + 1,), "int64")
    yield Buffer("layer", "counts_PE", (c.ep, c.E), "int64")
    yield Buffer("scratch", "act_RF", (R, c.F), c.dtype)
    if c.training:
        yield Buffer("scratch", "g_RF", (R, c.F), c.dtype)
        yield Buffer("scratch", "rows_RD", (R, c.D), c.dtype)


def publish(s: "Step") -> None:
    s.launch(
        "publish",
        x_TD=s.x_TD,
        ids_TK=s.ids_TK,
        scores_TK=s.scores_TK,
        x_out_TD=s.own("x_TD"),
        ids_out_TK=s.own("ids_TK"),
        scores_out_TK=s.own("scores_N1").view(s.config.T, s.config.K),
        head=s.own("head"),
        num_experts=s.config.E,
    )


def dispatch(s: "Step", again: bool = False) -> None:
    s.launch(
        "dispatch_w13",
        x=s.peers("x_TD"),
        rank_R=s.own("rank_R"),
        row_R=s.own("slot_R"),
        divisor=s.config.K,
        starts_e=s.own("starts_e"),
        w13_E2FD=s.weights.w13_E2FD,
        x_kept=s.kept("x_RD"),
        h1=s.kept("h1_R2F"),
        decision=s.decision,
        again=again,
    )


def w2_dgrad(s: "Step") -> None:
    s.launch(
        "w2_dgrad",
        dy=s.peers("dy_TD"),
        rank_R=s.own("rank_R"),
        row_R=s.own("slot_R"),
        divisor=s.config.K,
        starts_e=s.own("starts_e"),
        w2_EDF=s.weights.w2_EDF,
        decision=s.decision,
        dy_RD=s.own("rows_RD"),
        g_RF=s.own("g_RF"),
    )


def experts(s: "Step", dispatch: "Callable[[Step], None]" = dispatch) -> None:
    """Route table, decision, and the experts' products; `dispatch` fetches rows and multiplies them
    with W13."""
    s.launch(
        "route_table",
        ids=s.peers("ids_TK"),
        rank=s.rank,
        rank_R=s.own("rank_R"),
        slot_R=s.own("slot_R"),
        starts_e=s.own("starts_e"),
        counts_PE=s.own("counts_PE"),
    )
    s.launch(
        "decide",
        heads=s.peers("head"),
        counts_PE=s.own("counts_PE"),
        decisions_L=s.own("decisions"),
        entry=s.entry,
        rank=s.rank,
        rows_available=s.plan.rows_available,
        slot_at=s.offset("slot"),
        slot_bytes=s.plan.slot_bytes,
        row_bytes_O=s.memory.row_bytes_O,
        scratch_at=s.offset("operands"),
        saves=s.saves,
        texts=s.peers("text"),
        first_error=s.own("first_error"),
        error_text=s.own("error_text"),
        peaks=s.own("peaks"),
    )
    dispatch(s)
    s.launch("swiglu", h1=s.kept("h1_R2F"), decision=s.decision, act_RF=s.own("act_RF"))
    s.launch(
        "w2_combine",
        act_RF=s.own("act_RF"),
        w2_EDF=s.weights.w2_EDF,
        starts_e=s.own("starts_e"),
        decision=s.decision,
        rank_R=s.own("rank_R"),
        row_R=s.own("slot_R"),
        out=s.peers("rows_TKD"),
    )


def sum_up(s: "Step") -> None:
    s.launch(
        "sum_k",
        rows_TKD=s.own("rows_TKD").view(s.config.T, s.config.K, s.config.D),
        scores_TK=s.own("scores_N1").view(s.config.T, s.config.K),
        decision=s.decision,
        out_TD=s.y_TD,
    )


def publish_grad(s: "Step") -> None:
    s.launch("publish_grad", dy_TD=s.dy_TD, dy_out_TD=s.own("dy_TD"), head=s.own("head"))


def experts_backward(
    s: "Step",
    dispatch: "Callable[[Step, bool], None]" = dispatch,
    w2_dgrad: "Callable[[Step], None]" = w2_dgrad,
) -> None:
    s.launch(
        "decide_backward",
        heads=s.peers("head"),
        decision=s.decision,
        texts=s.peers("text"),
        first_error=s.own("first_error"),
        error_text=s.own("error_text"),
    )
    dispatch(s, True)
    w2_dgrad(s)
    rank_R, slot_R, starts_e = s.own("rank_R"), s.own("slot_R"), s.own("starts_e")
    s.launch(
        "swiglu_backward",
        h1=s.kept("h1_R2F"),
        decision=s.decision,
        rank_R=rank_R,
        row_R=slot_R,
        scores=s.peers("scores_N1"),
        g_RF=s.own("g_RF"),
        dscores=s.peers("dscores_N1"),
        back_rank_R=rank_R,
        back_row_R=slot_R,
        act_RF=s.own("act_RF"),
    )
    w2_wgrad(s)
    s.launch(
        "w13_dgrad_combine",
        dh1=s.kept("h1_R2F"),
        w13_E2FD=s.weights.w13_E2FD,
        starts_e=starts_e,
        decision=s.decision,
        rank_R=rank_R,
        row_R=slot_R,
        out=s.peers("rows_TKD"),
    )
    w13_wgrad(s)


def w2_wgrad(s: "Step") -> None:
    if s.gradients.w2_EDF is not None:
        s.launch(
            "w2_wgrad",
            dy_RD=s.own("rows_RD"),
            act_RF=s.own("act_RF"),
            starts_e=s.own("starts_e"),
            decision=s.decision,
            dw2_EDF=s.gradients.w2_EDF,
        )


def w13_wgrad(s: "Step") -> None:
    if s.gradients.w13_E2FD is not None:
        s.launch(
            "w13_wgrad",
            x=s.kept("x_RD"),
            dh1=s.kept("h1_R2F"),
            starts_e=s.own("starts_e"),
            decision=s.decision,
            dw13_E2FD=s.gradients.w13_E2FD,
        )


def sum_up_backward(s: "Step") -> None:
    s.launch(
        "sum_k",
        rows_TKD=s.own("rows_TKD").view(s.config.T, s.config.K, s.config.D),
        scores_TK=None,
        decision=s.decision,
        out_TD=s.dx_TD,
    )
    s.launch(
        "take_dscores",
        dscores_TK=s.own("dscores_N1").view(s.config.T, s.config.K),
        decision=s.decision,
        out_TK=s.dscores_TK,
    )
    s.launch("release", decision=s.decision)


_FORWARD = (
    Phase("publish", publish),
    Barrier("published"),
    Phase("experts", experts),
    Barrier("combined"),
    Phase("sum", sum_up),
)
_BACKWARD = (
    Phase("publish_grad", publish_grad),
    Barrier("published"),
    Phase("experts_backward", experts_backward),
    Barrier("combined"),
    Phase("sum_backward", sum_up_backward),
)
PIPELINE = Pipeline(forward=_FORWARD, backward=_BACKWARD, operands=operands, regions=regions)
