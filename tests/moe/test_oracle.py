"""The oracle itself, against torch's autograd token by token and against finite differences."""

import numpy as np
import pytest
import torch

from workbench.moe.oracle import oracle, relative_error


def _inputs(N=5, D=7, F=4, E=6, K=3, seed=0):
    random = np.random.default_rng(seed)
    ids = np.argsort(random.random((N, E)), axis=1)[:, :K]
    shapes = ((N, D), (N, K), (E, 2 * F, D), (E, D, F), (N, D))
    x, scores, w13, w2, dy = (random.standard_normal(s) for s in shapes)
    scores[0] = 0
    return x, ids, scores, w13, w2, dy


def test_equals_autograd_token_by_token():
    x, ids, scores, w13, w2, dy = _inputs()
    leaves = [torch.tensor(a, requires_grad=True) for a in (x, scores, w13, w2)]
    tx, ts, t13, t2 = leaves
    F = w2.shape[2]
    rows = []
    for n in range(len(x)):
        total = torch.zeros(x.shape[1], dtype=torch.float64)
        for k in range(ids.shape[1]):
            h = t13[ids[n, k]] @ tx[n]
            total = total + ts[n, k] * (t2[ids[n, k]] @ (torch.nn.functional.silu(h[:F]) * h[F:]))
        rows.append(total)
    y = torch.stack(rows)
    y.backward(torch.tensor(dy))
    found, grads = oracle(x, ids, scores, w13, w2, dy)
    assert grads is not None
    np.testing.assert_allclose(found, y.detach().numpy(), rtol=1e-12, atol=1e-12)
    for mine, leaf in zip(grads, leaves, strict=True):
        np.testing.assert_allclose(mine, leaf.grad.numpy(), rtol=1e-10, atol=1e-12)


def test_gradients_are_slopes():
    x, ids, scores, w13, w2, dy = _inputs(seed=3)
    _, grads = oracle(x, ids, scores, w13, w2, dy)
    assert grads is not None
    given = {"x": x, "scores": scores, "w13": w13, "w2": w2}
    random = np.random.default_rng(1)
    for (name, value), gradient in zip(given.items(), grads, strict=True):
        step = random.standard_normal(value.shape)
        values = []
        for sign in (1, -1):
            moved = given | {name: value + sign * 1e-6 * step}
            y, _ = oracle(moved["x"], ids, moved["scores"], moved["w13"], moved["w2"])
            values.append((y * dy).sum())
        slope = (values[0] - values[1]) / 2e-6
        assert slope == pytest.approx((gradient * step).sum(), rel=1e-6)


def test_experts_without_rows_have_zero_gradients():
    x, _, scores, w13, w2, dy = _inputs()
    ids = np.tile([0, 2, 4], (len(x), 1))
    _, grads = oracle(x, ids, scores, w13, w2, dy)
    assert grads is not None
    assert not grads.w13_E2FD[[1, 3, 5]].any()
    assert not grads.w2_EDF[[1, 3, 5]].any()


def test_relative_error_of_nothing_and_of_nan():
    assert relative_error([0.5], np.zeros(1)) == 0.5
    assert np.isnan(relative_error([np.nan], np.ones(1)))
