"""The gate before the clock: outputs and gradients against the float64 oracle, on the context that
is then timed.

Where the oracle is affordable every output and gradient of the rank is checked; else the outputs
and gradients of sampled tokens, and the weight gradients of one sampled expert, from the same dense
float64 arithmetic. Each rank draws what it needs of the others' inputs again from the seed.

Legend: T tokens per rank, D hidden, F expert width, K experts per token, n rows of one expert.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from workbench.bench.case_layers import CaseLayers, SeededInputs
from workbench.case import Case
from workbench.moe.oracle import Floats, oracle, relative_error
from workbench.runtime import to_host
from workbench.systems import SYSTEMS

FULL_FLOP = 2e10
"""Float64 FLOP per rank up to which everything is checked; some seconds of one core."""
SAMPLED_TOKENS = 4


class GateError(RuntimeError):
    """Outputs or gradients are wrong, so nothing is timed."""


def check(layers: CaseLayers, inputs: SeededInputs) -> dict[str, Any]:
    """`errors` (largest relative error over layers and ranks, by name) and `checked` ("all", or
    what was sampled) of the forward and backward that the layers have just run. Local to the
    process."""
    case = layers.case
    everything = case.layers * _flop(case) <= FULL_FLOP
    worst: dict[str, float] = {}

    def note(name: str, error: float) -> None:
        worst[name] = max(worst.get(name, 0.0), error) if error == error else error

    for number in range(case.layers):
        shared: dict[str, Floats] = {}
        for rank in layers.ranks:
            tokens = np.arange(case.T)
            if not everything:
                random = np.random.default_rng([inputs.seed, rank])
                tokens = np.sort(random.choice(case.T, min(SAMPLED_TOKENS, case.T), replace=False))
            exact, found = _layer(layers, inputs, number, rank, tokens, everything)
            for name, value in exact.items():
                if name in found:
                    note(name, relative_error(found[name], value))
                else:  # of the shared expert: summed over the ranks of the process
                    shared[name] = shared.get(name, 0.0) + value
        for name, value in shared.items():
            note(name, relative_error(_exact(layers.gradients[number][name]), value))
    limit = SYSTEMS[case.pipeline].tolerance[case.precision]
    sampled = f"{len(tokens)} tokens and 1 expert per layer and rank, drawn by the seed"
    return {"errors": worst, "checked": "all" if everything else sampled, "limit": limit}


def faults(found: Mapping[str, Any]) -> list[str]:
    """What in a result of `check` is beyond the limit."""
    return [
        f"{name}: relative error {error:.3g} must be below {found['limit']:g}"
        for name, error in found["errors"].items()
        if not error < found["limit"]
    ]


def _flop(case: Case) -> float:
    passes = 3 if case.mode == "training" else 1
    rows = max(case.factors) * case.T * case.K + case.T * (case.K + case.sharedExperts)
    return 6.0 * case.D * case.F * passes * rows


def _layer(
    layers: CaseLayers,
    inputs: SeededInputs,
    number: int,
    rank: int,
    tokens: npt.NDArray[Any],
    everything: bool,
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Each quantity of one layer of a rank by name, exact and as found; of the shared expert's
    gradients the rank's part, exact alone."""
    case, local = layers.case, layers.local
    own = range(rank * local, (rank + 1) * local)
    routes = inputs.routes(number)
    weighed = list(own) if everything else [_lightest(routes.ids, own)]
    weighed = weighed if layers.training else []
    x_nD, dy_nD, row_PT = _tokens(inputs, case.ep, rank, weighed, routes.ids)
    y, dx = np.zeros((case.T, case.D)), np.zeros((case.T, case.D))
    dscores = np.zeros((case.T, case.K))
    dw13 = {e: np.zeros((2 * case.F, case.D)) for e in weighed}
    dw2 = {e: np.zeros((case.D, case.F)) for e in weighed}
    chosen = np.zeros(case.T, bool)
    chosen[tokens] = True
    for e in sorted({*np.unique(routes.ids[rank][tokens]).tolist(), *weighed}):
        p, t, k = np.nonzero(routes.ids == e)
        needed = (p == rank) & chosen[t] if e not in weighed else np.ones(len(p), bool)
        p, t, k = p[needed], t[needed], k[needed]
        if not len(p):
            continue
        rows = row_PT[p, t]
        drawn = layers.expert(number, e) if e in own else inputs.expert(number, e)
        w13, w2 = (_exact(w) for w in drawn)
        out_nD, gradients = oracle(
            x_nD[rows],
            np.zeros((len(p), 1), np.int64),
            routes.scores[p, t, k][:, None],
            w13[None],
            w2[None],
            dy_nD[rows] if layers.training else None,
        )
        mine = p == rank
        np.add.at(y, t[mine], out_nD[mine])
        if gradients is None:
            continue
        np.add.at(dx, t[mine], gradients.x_ND[mine])
        dscores[t[mine], k[mine]] = gradients.scores_NK[mine, 0]
        if e in dw13:
            dw13[e], dw2[e] = gradients.w13_E2FD[0], gradients.w2_EDF[0]
    exact: dict[str, Floats] = {}
    if case.sharedExperts:
        w13, w2 = (_exact(w) for w in inputs.shared(number))
        rows, ones = row_PT[rank, tokens], np.ones((len(tokens), 1))
        out_nD, gradients = oracle(
            x_nD[rows],
            np.zeros_like(ones, np.int64),
            ones,
            w13[None],
            w2[None],
            dy_nD[rows] if layers.training else None,
        )
        y[tokens] += out_nD
        if gradients is not None:
            dx[tokens] += gradients.x_ND
            if everything:
                exact |= {"shared_w13": gradients.w13_E2FD[0], "shared_w2": gradients.w2_EDF[0]}
    held = layers.found(number, rank)
    found: dict[str, Floats] = {"y": _exact(held["y"])[tokens]}
    exact["y"] = y[tokens]
    if layers.training:
        exact |= {
            "dx": dx[tokens],
            "dscores": dscores[tokens],
            "dw13": np.stack([dw13[e] for e in weighed]),
            "dw2": np.stack([dw2[e] for e in weighed]),
        }
        index = [e - own[0] for e in weighed]
        found |= {
            "dx": _exact(held["dx"])[tokens],
            "dscores": _exact(held["dscores"])[tokens],
            "dw13": np.stack([_exact(held["dw13"][at]) for at in index]),
            "dw2": np.stack([_exact(held["dw2"][at]) for at in index]),
        }
    return exact, found


def _tokens(
    inputs: SeededInputs, ranks: int, rank: int, weighed: list[int], ids: npt.NDArray[Any]
) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    """Of this rank's tokens and all that go to the weighed experts: x and dy, float64 [n, D], and
    the row of each (rank, token) in them, [P, T]."""
    needed_PT: npt.NDArray[np.bool_] = np.asarray(np.isin(ids, weighed).any(axis=2))
    needed_PT[rank] = True
    row_PT = np.full(needed_PT.shape, -1)
    row_PT[needed_PT] = np.arange(needed_PT.sum())
    parts = [
        [_exact(tensor)[needed_PT[p]] for tensor in inputs.tokens(p)]
        for p in range(ranks)
        if needed_PT[p].any()
    ]
    x, dy = (np.concatenate(part) for part in zip(*parts, strict=True))
    return x, dy, row_PT


def _lightest(ids: npt.NDArray[Any], own: range) -> int:
    """The expert of this rank with the fewest rows but at least one; its first if all have none."""
    rows = np.bincount(ids.ravel(), minlength=own.stop)[own.start : own.stop]
    return own[int(np.where(rows > 0, rows, rows.max() + 1).argmin())]


def _exact(tensor: Tensor) -> Floats:
    exact: Floats = to_host(tensor.detach()).double().numpy()
    return exact
