"""The layer in float64, expert by expert in numpy: what every implementation is held against.

One process, all ranks' tokens and all experts; nothing is shared with the pipelines. Gradients
are written out from the chain rule.

Legend: N tokens of all ranks, D hidden, F expert width, E experts in all, K experts per token.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Gradients(NamedTuple):
    """Gradients of sum(y * dy), float64."""

    x_ND: Floats
    scores_NK: Floats
    w13_E2FD: Floats
    w2_EDF: Floats


def oracle(
    x_ND: npt.ArrayLike,
    ids_NK: npt.ArrayLike,
    scores_NK: npt.ArrayLike,
    w13_E2FD: npt.ArrayLike,
    w2_EDF: npt.ArrayLike,
    dy_ND: npt.ArrayLike | None = None,
) -> tuple[Floats, Gradients | None]:
    """y_ND and, given dy_ND, the gradients.

    y[n] = sum_k scores[n, k] * w2[e] @ (silu(g) * u) with e = ids[n, k], g = w13[e, :F] @ x[n],
    u = w13[e, F:] @ x[n].
    """
    x, scores, w13, w2 = (np.asarray(a, np.float64) for a in (x_ND, scores_NK, w13_E2FD, w2_EDF))
    ids = np.asarray(ids_NK, np.int64)
    F = w2.shape[2]
    y = np.zeros_like(x)
    dy = None if dy_ND is None else np.asarray(dy_ND, np.float64)
    grads = Gradients(*(np.zeros_like(a) for a in (x, scores, w13, w2)))
    for e in np.unique(ids):
        n, k = np.nonzero(ids == e)
        s = scores[n, k][:, None]
        g, u = x[n] @ w13[e, :F].T, x[n] @ w13[e, F:].T
        sigma = 1 / (1 + np.exp(-g))
        act = g * sigma * u
        out = act @ w2[e].T
        np.add.at(y, n, s * out)
        if dy is None:
            continue
        grads.scores_NK[n, k] = (dy[n] * out).sum(1)
        dout = s * dy[n]
        grads.w2_EDF[e] = dout.T @ act
        dact = dout @ w2[e]
        dg = dact * u * sigma * (1 + g * (1 - sigma))
        du = dact * g * sigma
        grads.w13_E2FD[e] = np.concatenate([dg.T @ x[n], du.T @ x[n]])
        np.add.at(grads.x_ND, n, dg @ w13[e, :F] + du @ w13[e, F:])
    return y, None if dy is None else grads


def relative_error(found: npt.ArrayLike, exact: Floats) -> float:
    """Frobenius norm of the difference over that of the exact value; the difference itself where
    the exact value is 0. NaN where `found` has one."""
    difference = float(np.linalg.norm(np.asarray(found, np.float64) - exact))
    size = float(np.linalg.norm(exact))
    return difference / size if size else difference
