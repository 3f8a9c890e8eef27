"""The owner's sum over k: kernel, against the twin and float64."""

import pytest
import torch
from group import TARGET, close, decided, normal
from workbench.kernels.device import run
from workbench.kernels.sum_k import sum_k, sum_k_torch, take_dscores, take_dscores_torch

pytestmark = pytest.mark.values

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("T", [0, 1, 7, 97])
@pytest.mark.parametrize(("K", "D", "dtype"), [(1, 72, BF16), (6, 33, BF16), (3, 20, FP32)])
@pytest.mark.parametrize("scored", [True, False])
def test_sum_k(T, K, D, dtype, scored):
    rows = normal(T, K, D, dtype=dtype)
    scores = normal(T, K, dtype=FP32, seed=1) if scored else None
    outs = [torch.full((T, D), float("nan"), dtype=dtype) for _ in range(2)]
    given = {"rows_TKD": rows, "scores_TK": scores, "decision": decided(9)}
    run(sum_k(TARGET, out_TD=outs[0], **given))
    if T:
        sum_k_torch(out_TD=outs[1], **given)
        close(outs[0], outs[1], dtype)
    weights = torch.ones(T, K) if scores is None else scores
    close(outs[0], torch.einsum("tkd,tk->td", rows.double(), weights.double()), dtype)


def test_order_of_k_is_kept():
    """1 + 2**30 - 2**30 is 0 or 1 in FP32, by order."""
    rows = torch.tensor([1.0, 2.0**30, -(2.0**30)]).view(1, 3, 1).expand(1, 3, 4).contiguous()
    for order, wanted in (((0, 1, 2), 0.0), ((1, 2, 0), 1.0)):
        out = torch.empty(1, 4)
        run(
            sum_k(
                TARGET,
                rows_TKD=rows[:, order].contiguous(),
                scores_TK=None,
                decision=decided(1),
                out_TD=out,
            )
        )
        assert (out == wanted).all()


def test_nan_where_the_call_does_not_run():
    out = torch.zeros(5, 8)
    run(
        sum_k(
            TARGET,
            rows_TKD=torch.zeros(5, 2, 8),
            scores_TK=None,
            decision=decided(1, OK=0),
            out_TD=out,
        )
    )
    assert torch.isnan(out).all()


@pytest.mark.parametrize("ok", [0, 1])
def test_take_dscores(ok):
    dscores, outs = normal(40, 33, dtype=FP32), torch.zeros(2, 40, 33)
    given = {"dscores_TK": dscores, "decision": decided(1, OK=ok)}
    run(take_dscores(TARGET, out_TK=outs[0], **given))
    take_dscores_torch(out_TK=outs[1], **given)
    assert torch.equal(outs[0], outs[1]) if ok else torch.isnan(outs[0]).all()
    assert torch.equal(outs[0], dscores) == bool(ok)
