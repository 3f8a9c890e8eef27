"""The four grouped products: kernel, against the twin and float64."""

import pytest
import torch
from group import ROWS, TARGET, Group, close, decided, expert_of, keeps, normal, routed
from workbench.kernels.combine import (
    w2_combine,
    w2_combine_torch,
    w13_dgrad_combine,
    w13_dgrad_combine_torch,
)
from workbench.kernels.device import run
from workbench.kernels.dispatch import dispatch_w13, dispatch_w13_torch, w2_dgrad, w2_dgrad_torch
from workbench.kernels.peers import rows_at

pytestmark = pytest.mark.values

SHAPES = {
    "tma": (80, 72, torch.bfloat16),
    "pointers": (33, 19, torch.bfloat16),
    "float32": (36, 20, torch.float32),
}
"""D, F, dtype: with tensor descriptors, without (odd pitches), and the test dtype."""
cases = pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
shapes = pytest.mark.parametrize(("D", "F", "dtype"), SHAPES.values(), ids=SHAPES)


def setup(rows, D, F, dtype, places, ranks=2):
    unit = 128 * D * 2 * F * 4
    group = Group(ranks, nbytes=-(-(1 << 20) // unit) * unit)
    total = sum(rows)
    route = routed(rows, ranks, places, seed=total)
    w13 = normal(len(rows), 2 * F, D, dtype=dtype, seed=1, scale=D**-0.5)
    w2 = normal(len(rows), D, F, dtype=dtype, seed=2, scale=F**-0.5)
    return group, total, route, w13, w2


@cases
@shapes
def test_dispatch_w13(rows, D, F, dtype):
    K, T = 3, 60
    group, total, route, w13, _ = setup(rows, D, F, dtype, T * K)
    x = group.place(T, D, dtype=dtype)
    x.all_P.copy_(normal(2, T, D, dtype=dtype))
    for name in ("x", "h1"):
        group.place(total + 9, D if name == "x" else 2 * F, dtype=dtype)
    x_at = -(-T * D * dtype.itemsize // 128) * 128
    h1_at = x_at + -(-total * D * dtype.itemsize // 128) * 128
    decision = decided(total, BASE=x_at)
    x_kept, h1 = keeps(group.arenas_PB[1], decision, dtype, D, 2 * F)
    # Nothing was kept, so rows are made again; for no rows there is nothing to make.
    given = {
        "x": x,
        **route,
        "divisor": K,
        "w13_E2FD": w13,
        "decision": decision,
        "x_kept": x_kept,
        "h1": h1,
        "again": True,
    }
    before = group.arenas_PB.clone()
    run(dispatch_w13(TARGET, **given))
    found_x = rows_at(group.arenas_PB[1], x_at, total, D, dtype).clone()
    found_h1 = rows_at(group.arenas_PB[1], h1_at, total, 2 * F, dtype).clone()
    assert torch.equal(group.arenas_PB[0], before[0])
    tail = rows_at(group.arenas_PB[1], h1_at, total + 9, 2 * F, dtype)[total:]
    assert torch.isnan(tail).all(), "rows beyond those received were written"
    gap = group.arenas_PB[1, x_at + total * D * dtype.itemsize : h1_at]
    assert (gap == 0xFF).all(), "rows beyond those received were written"
    source = x.all_P[route["rank_R"][:total].long(), route["row_R"][:total].long() // K]
    assert torch.equal(found_x, source)
    exact = torch.einsum("rd,rfd->rf", source.double(), w13.double()[expert_of(rows)])
    close(found_h1, exact, dtype)
    dispatch_w13_torch(**given)
    close(found_h1, rows_at(group.arenas_PB[1], h1_at, total, 2 * F, dtype), dtype)


@cases
@shapes
def test_w2_dgrad(rows, D, F, dtype):
    group, total, route, _, w2 = setup(rows, D, F, dtype, 100)
    dy = group.place(100, D, dtype=dtype)
    dy.all_P.copy_(normal(2, 100, D, dtype=dtype))
    nan = float("nan")
    outs = [
        (torch.full((total + 9, D), nan, dtype=dtype), torch.full((total + 9, F), nan, dtype=dtype))
        for _ in range(2)
    ]
    for (dy_RD, g_RF), how in zip(outs, ("kernel", "twin"), strict=True):
        given = {
            "dy": dy,
            **route,
            "divisor": 1,
            "w2_EDF": w2,
            "decision": decided(total),
            "dy_RD": dy_RD,
            "g_RF": g_RF,
        }
        w2_dgrad_torch(**given) if how == "twin" else run(w2_dgrad(TARGET, **given))
    (dy_RD, g_RF), (twin_dy, twin_g) = outs
    assert torch.equal(dy_RD[:total], twin_dy[:total])
    assert torch.isnan(g_RF[total:]).all()
    source = dy.all_P[route["rank_R"][:total].long(), route["row_R"][:total].long()]
    exact = torch.einsum("rd,rdf->rf", source.double(), w2.double()[expert_of(rows)])
    close(g_RF[:total], exact, dtype)
    close(g_RF[:total], twin_g[:total], dtype)


@cases
@shapes
@pytest.mark.parametrize("ranked", [True, False])
def test_combine(rows, D, F, dtype, ranked):
    ranks = 2 if ranked else 1
    group, total, route, w13, w2 = setup(rows, D, F, dtype, 160, ranks)
    if not ranked:
        route["rank_R"] = None
        route["row_R"] = route["row_R"].long()
    act = normal(total + 9, F, dtype=dtype, seed=3)
    act[total:] = float("nan")
    h1 = normal(total, 2 * F, dtype=dtype, seed=4)
    out = group.place(160, D, dtype=dtype)
    group.place(total + 9, 2 * F, dtype=dtype)
    h1_at = -(-160 * D * dtype.itemsize // 128) * 128
    rows_at(group.arenas_PB[0], h1_at, total, 2 * F, dtype).copy_(h1)
    place = (route["rank_R"][:total].long() if ranked else 0, route["row_R"][:total].long())
    decision = decided(total, BASE=h1_at)
    (dh1,) = keeps(group.arenas_PB[0], decision, dtype, 2 * F)
    common = {**route, "decision": decision, "out": out}
    for kernel, twin, given, exact in (
        (
            w2_combine,
            w2_combine_torch,
            {"act_RF": act, "w2_EDF": w2},
            torch.einsum("rf,rdf->rd", act[:total].double(), w2.double()[expert_of(rows)]),
        ),
        (
            w13_dgrad_combine,
            w13_dgrad_combine_torch,
            {"dh1": dh1, "w13_E2FD": w13},
            torch.einsum("rf,rfd->rd", h1.double(), w13.double()[expert_of(rows)]),
        ),
    ):
        out.all_P.fill_(float("nan"))
        run(kernel(TARGET, **common, **given))
        found = out.all_P.clone()
        written = torch.zeros(ranks, 160, dtype=torch.bool)
        written[place] = True
        assert torch.isnan(found[~written]).all(), "a row that is nobody's was written"
        close(found[place], exact, dtype)
        twin(**common, **given)
        close(found[place], out.all_P[place], dtype)


@pytest.mark.parametrize("why", ["not OK", "kept"])
def test_nothing_is_written_where_the_call_does_not_run(why):
    rows, D, F, dtype = ROWS["tails"], *SHAPES["tma"]
    group, total, route, w13, _ = setup(rows, D, F, dtype, 60)
    x = group.place(60, D, dtype=dtype)
    decision = decided(total, KEPT=total) if why == "kept" else decided(total, OK=0)
    x_kept, h1 = keeps(group.arenas_PB[0], decision, dtype, D, 2 * F)
    before = group.arenas_PB.clone()
    run(
        dispatch_w13(
            TARGET,
            x=x,
            **route,
            divisor=1,
            w13_E2FD=w13,
            decision=decision,
            x_kept=x_kept,
            h1=h1,
            again=True,
        )
    )
    assert torch.equal(group.arenas_PB, before)
