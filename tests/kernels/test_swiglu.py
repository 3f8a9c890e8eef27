"""SwiGLU and its backward: kernel, against the twin and float64."""

import numpy as np
import pytest
import torch
from group import LIMIT, ROWS, TARGET, Group, close, decided, keeps, normal, routed
from workbench.kernels.device import run
from workbench.kernels.swiglu import swiglu, swiglu_torch
from workbench.kernels.swiglu_backward import swiglu_backward, swiglu_backward_torch

pytestmark = pytest.mark.values

TOTALS = {name: sum(rows) for name, rows in ROWS.items()} | {"seven": 7, "odd": 97}
totals = pytest.mark.parametrize("total", TOTALS.values(), ids=TOTALS)
limits = pytest.mark.parametrize("limit", [None, 0.7], ids=["plain", "clamped"])
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def exactly(h1, g, s, limit):
    """float64 act, dscore, act * score and dh1, by central differences of nothing: the formulas."""
    F = h1.shape[1] // 2
    h1 = h1.detach().double().requires_grad_()
    gate, up = h1[:, :F], h1[:, F:]
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    act = gate * torch.sigmoid(gate) * up
    (act * g.double() * s.double()[:, None]).sum().backward()
    return act.detach(), (act * g.double()).sum(1).detach(), h1.grad


@totals
@limits
@dtypes
def test_forward(total, limit, dtype):
    F = 72 if dtype == torch.bfloat16 else 19
    h1 = normal(total, 2 * F, dtype=dtype)
    acts = [torch.full((total + 5, F), float("nan"), dtype=dtype) for _ in range(2)]
    decision = decided(total)
    (h1_kept,) = keeps(h1.flatten().view(torch.uint8), decision, dtype, 2 * F)
    given = {"h1": h1_kept, "decision": decision, "limit": limit}
    run(swiglu(TARGET, act_RF=acts[0], **given))
    swiglu_torch(act_RF=acts[1], **given)
    close(acts[0][:total], exactly(h1, acts[0][:total], torch.ones(total), limit)[0], dtype)
    close(acts[0][:total], acts[1][:total], dtype)
    assert torch.isnan(acts[0][total:]).all()


@totals
@limits
@dtypes
@pytest.mark.parametrize("back", ["to owners", "to own rows"])
def test_backward(total, limit, dtype, back):
    F = 72 if dtype == torch.bfloat16 else 19
    h1, g = normal(total, 2 * F, dtype=dtype, seed=1), normal(total, F, dtype=dtype, seed=2)
    group = Group(2)
    scores, dscores = group.place(160, 1), group.place(160, 1)
    scores.all_P.copy_(normal(2, 160, 1, dtype=torch.float32))
    scores.all_P[:, ::7] = 0
    route = routed([total], 2, 160, seed=3)
    s = scores.all_P[route["rank_R"][:total].long(), route["row_R"][:total].long(), 0]
    if back == "to owners":
        home = {"back_rank_R": route["rank_R"], "back_row_R": route["row_R"]}
        place = (route["rank_R"][:total].long(), route["row_R"][:total].long())
    else:
        dscores = type(dscores)(
            all_P=dscores.all_P[1:], bases_P=dscores.bases_P[1:], offset=dscores.offset
        )
        rows = torch.randperm(160)
        home = {"back_rank_R": None, "back_row_R": rows}
        place = (0, rows[:total])
    act, ds, dh1 = exactly(h1, g, s, limit)
    results = []
    for how in ("kernel", "twin"):
        arena_B = h1.clone().flatten().view(torch.uint8)
        act_RF = torch.full((total, F), float("nan"), dtype=dtype)
        dscores.all_P.fill_(float("nan"))
        decision = decided(total)
        (h1_kept,) = keeps(arena_B, decision, dtype, 2 * F)
        given = {
            "h1": h1_kept,
            "decision": decision,
            "rank_R": route["rank_R"],
            "row_R": route["row_R"],
            "scores": scores,
            "g_RF": g,
            "dscores": dscores,
            **home,
            "act_RF": act_RF,
            "limit": limit,
        }
        if how == "kernel":
            run(swiglu_backward(TARGET, **given))
        else:
            swiglu_backward_torch(**given)
        found = dscores.all_P[..., 0]
        written = torch.zeros(found.shape, dtype=torch.bool)
        written[place] = True
        assert torch.isnan(found[~written]).all()
        results.append((act_RF, found[place].clone(), arena_B.view(dtype).view(total, 2 * F)))
    for found, twin, exact in zip(*results, (act * s.double()[:, None], ds, dh1), strict=True):
        loose = torch.float32 if found.dtype == torch.float32 else dtype
        if total:
            # A sum over F of products cancels: its error is a fraction of its terms.
            scale = np.sqrt(F) if exact is ds else 1
            error = torch.linalg.norm(found.double() - exact) / torch.linalg.norm(exact)
            assert error < scale * LIMIT[loose]
            difference = torch.linalg.norm((found - twin).double())
            assert difference < scale * LIMIT[loose] * torch.linalg.norm(exact)


def test_nothing_is_written_where_the_call_does_not_run():
    act = torch.full((5, 8), float("nan"))
    decision = decided(5, OK=0)
    (h1,) = keeps(torch.zeros(640, dtype=torch.uint8), decision, torch.float32, 16)
    run(swiglu(TARGET, h1=h1, decision=decision, act_RF=act))
    assert torch.isnan(act).all()


def test_nan_is_not_clamped_away():
    h1, act = torch.full((3, 16), float("nan")), torch.zeros(3, 8)
    decision = decided(3)
    (kept,) = keeps(h1.flatten().view(torch.uint8), decision, torch.float32, 16)
    run(swiglu(TARGET, h1=kept, decision=decision, act_RF=act, limit=7.0))
    assert torch.isnan(act).all()
