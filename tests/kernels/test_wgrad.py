"""Grouped weight gradients: kernel, against the twin and float64."""

import pytest
import torch
from group import ROWS, TARGET, close, decided, expert_of, keeps, normal
from workbench.kernels.device import run
from workbench.kernels.wgrad import w2_wgrad, w2_wgrad_torch, w13_wgrad, w13_wgrad_torch
from workbench.kernels.words import Decide, aligned

pytestmark = pytest.mark.values

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = {
    "tma": (80, 72, BF16, BF16),
    "pointers": (33, 19, BF16, BF16),
    "tma, float32 out": (40, 72, BF16, FP32),
    "float32": (36, 20, FP32, FP32),
}
"""D, F, dtype of the rows, dtype of the gradient."""
shapes = pytest.mark.parametrize(("D", "F", "dtype", "out"), SHAPES.values(), ids=SHAPES)
cases = pytest.mark.parametrize("rows", [*ROWS.values(), [64, 33]], ids=[*ROWS, "whole blocks"])


def poisoned(total, width, dtype, seed):
    """Rows, and behind them what no kernel may use."""
    rows = torch.full((total + 70, width), float("nan"), dtype=dtype)
    rows[:total] = normal(total, width, dtype=dtype, seed=seed)
    return rows


def exactly(a, b, rows):
    """float64 [E, M, N]: the sum over each expert's rows of the outer products."""
    out = torch.zeros(len(rows), a.shape[1], b.shape[1], dtype=torch.float64)
    outer = a[:, :, None].double() * b[:, None, :].double()
    return out.index_add_(0, expert_of(rows), outer[: sum(rows)])


@cases
@shapes
@pytest.mark.parametrize("accumulate", [False, True])
def test_wgrads(rows, D, F, dtype, out, accumulate):
    total = sum(rows)
    starts_e = torch.tensor([0, *rows]).cumsum(0)
    dy, act = poisoned(total, D, dtype, 1), poisoned(total, F, dtype, 2)
    x, dh1 = poisoned(total, D, dtype, 3), poisoned(total, 2 * F, dtype, 4)
    decision = decided(total, BASE=0)
    # x without the poison behind it, as dh1 lies there; it has its own.
    arena_B = torch.zeros(
        aligned(total * D * dtype.itemsize) + dh1.numel() * dtype.itemsize, dtype=torch.uint8
    )
    x_kept, dh1_kept = keeps(arena_B, decision, dtype, D, 2 * F)
    x_kept.rows().copy_(x[:total])
    arena_B[-dh1.numel() * dtype.itemsize :].view(dtype).view(dh1.shape).copy_(dh1)
    common = {"starts_e": starts_e, "decision": decision, "accumulate": accumulate}
    for kernel, twin, name, given, shape, exact in (
        (
            w2_wgrad,
            w2_wgrad_torch,
            "dw2_EDF",
            {"dy_RD": dy, "act_RF": act},
            (len(rows), D, F),
            exactly(dy[:total], act[:total], rows),
        ),
        (
            w13_wgrad,
            w13_wgrad_torch,
            "dw13_E2FD",
            {"x": x_kept, "dh1": dh1_kept},
            (len(rows), 2 * F, D),
            exactly(dh1[:total], x[:total], rows),
        ),
    ):
        before = (
            normal(*shape, dtype=out, seed=5)
            if accumulate
            else torch.full(shape, float("nan"), dtype=out)
        )
        found, twins = before.clone(), before.clone()
        run(kernel(TARGET, **common, **given, **{name: found}))
        if accumulate:
            exact = exact + before.double()
        close(found, exact, out)
        empty = [e for e, count in enumerate(rows) if count == 0]
        assert torch.equal(found[empty], before[empty] if accumulate else 0 * found[empty])
        twin(**common, **given, **{name: twins})
        close(found, twins, out)


@pytest.mark.parametrize("accumulate", [False, True])
def test_nan_where_the_call_does_not_run(accumulate):
    dw2 = torch.zeros(2, 40, 24)
    run(
        w2_wgrad(
            TARGET,
            dy_RD=normal(9, 40, dtype=FP32),
            act_RF=normal(9, 24, dtype=FP32),
            starts_e=torch.tensor([0, 4, 9]),
            decision=decided(9, OK=0),
            dw2_EDF=dw2,
            accumulate=accumulate,
        )
    )
    assert torch.isnan(dw2).all()
    dw13 = torch.zeros(2, 48, 40)
    decision = decided(9, OK=0)
    x, dh1 = keeps(torch.zeros(99, dtype=torch.uint8), decision, FP32, 40, 48)
    run(
        w13_wgrad(
            TARGET,
            x=x,
            dh1=dh1,
            starts_e=torch.tensor([0, 4, 9]),
            decision=decision,
            dw13_E2FD=dw13,
            accumulate=accumulate,
        )
    )
    assert torch.isnan(dw13).all()


def test_infinite_rows_of_an_expert_stay_its_own():
    rows, dtype = [40, 9], torch.bfloat16
    dy, act = normal(49, 16, dtype=dtype), normal(49, 16, dtype=dtype)
    dy[40:] = float("inf")
    dw2 = torch.empty(2, 16, 16, dtype=dtype)
    run(
        w2_wgrad(
            TARGET,
            dy_RD=dy,
            act_RF=act,
            starts_e=torch.tensor([0, *rows]).cumsum(0),
            decision=decided(49, **{Decide.OK.name: 1}),
            dw2_EDF=dw2,
        )
    )
    assert torch.isfinite(dw2[0]).all()
    assert not torch.isfinite(dw2[1]).any()
