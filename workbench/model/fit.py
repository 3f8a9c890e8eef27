"""Robust least squares of the time model's parameters against measured times.

Residuals are logarithms of predicted over measured iterationMS, forwardMS and backwardMS, the last
two at half weight because iterationMS is what is asked for. Huber's loss keeps a few odd cases
from bending the rest. A prior adds noise * (value - mean) / deviation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from workbench.hardware import Hardware
from workbench.model.coefficients import GROUPS, PARAMETERS, Group, slots
from workbench.model.timemodel import CaseArrays, Terms, Times, layer_terms, predict_times

Array = npt.NDArray[Any]
Slot = tuple[str, str]
WEIGHTS = {"iterationMS": 1.0, "forwardMS": 0.5, "backwardMS": 0.5}
NOISE = 0.01
"""Relative residual of a good measurement, the first guess: it scales priors and Huber's loss."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Measured cases, their terms by group, and the parameters that they need.

    `rows[i]` are the indices in the table of the cases of `terms[i]`. `measured` holds the three
    times as float64 [N], NaN where there is none.
    """

    terms: tuple[Terms, ...]
    rows: tuple[Array, ...]
    measured: dict[str, Array]
    slots: tuple[Slot, ...]
    constants: Mapping[str, float]

    @classmethod
    def of(
        cls, table: pd.DataFrame, hardware: Hardware, constants: Mapping[str, float]
    ) -> "Problem":
        found = {group: rows for group, rows in group_rows(table).items() if len(rows)}
        cases = CaseArrays.of(table)
        return cls(
            terms=tuple(
                layer_terms(cases.take(rows), group, hardware, constants)
                for group, rows in found.items()
            ),
            rows=tuple(found.values()),
            measured={name: table[name].to_numpy(np.float64) for name in WEIGHTS},
            slots=tuple(slots(found)),
            constants=constants,
        )

    def predict(self, values: Array) -> Times:
        """Times [B, N] for values [B, P] of the slots, in their order."""
        count = len(self.measured["iterationMS"])
        out = np.full((len(Times._fields), len(values), count), np.nan)
        for terms, rows in zip(self.terms, self.rows, strict=True):
            p = group_values(values, self.slots, terms.group)
            for of_time, found in zip(out, predict_times(p, terms, self.constants), strict=True):
                of_time[:, rows] = found
        return Times(*out)

    def log_ratios(self, values: Array) -> dict[str, Array]:
        """log(predicted / measured) of each time, [B, N]."""
        times = self.predict(values)
        named = zip(WEIGHTS, (times.iteration, times.forward, times.backward), strict=True)
        return {name: np.log(time / self.measured[name]) for name, time in named}

    def fit(self, use: npt.NDArray[np.bool_]) -> Array:
        """Values [P] of the slots that fit the cases of `use` [N].

        Two rounds: the second takes the noise from the residuals of the first, so that priors
        count for little where the data are clean.
        """
        values, noise = self.start(), NOISE
        for _ in range(2):
            values = self._solve(values, use, noise)
            ratio = self.log_ratios(values[None])["iterationMS"][0, use]
            noise = float(np.clip(1.4826 * np.median(np.abs(ratio)), 1e-7, 2 * NOISE))
        return values

    def start(self) -> Array:
        """Where a fit begins: every parameter at the mean of its prior, [P]."""
        return np.array([PARAMETERS[name].mean for name, _ in self.slots])

    def _solve(self, start: Array, use: npt.NDArray[np.bool_], noise: float) -> Array:
        mean = self.start()
        deviation = np.array([PARAMETERS[name].deviation for name, _ in self.slots])
        upper = np.array([PARAMETERS[name].upper for name, _ in self.slots])
        step = 1e-6 * np.maximum(mean, 1e-3)

        def residuals(values: Array) -> Array:
            ratios = self.log_ratios(values)
            parts = []
            for name, weight in WEIGHTS.items():
                known = use & np.isfinite(self.measured[name])
                parts.append(weight * ratios[name][:, known])
            return np.concatenate([*parts, noise * (values - mean) / deviation], axis=1)

        def jacobian(values: Array) -> Array:
            both = residuals(np.concatenate([values[None], values + np.diag(step)]))
            return ((both[1:] - both[0]) / step[:, None]).T

        return _levenberg_marquardt(residuals, jacobian, start, upper, deviation, noise)


def _levenberg_marquardt(
    residuals: Callable[[Array], Array],
    jacobian: Callable[[Array], Array],
    start: Array,
    upper: Array,
    scale: Array,
    delta: float,
) -> Array:
    """Minimum of the sum of Huber's loss (quadratic up to `delta`) with 0 <= values <= upper.

    Solves the small normal equations rather than calling scipy's least_squares: its SVD of every
    Jacobian is handed to threads, which takes ten times as long on a machine that is busy.
    """
    values, damping = start.copy(), 1e-3
    r = residuals(values[None])[0]
    loss = _huber(r, delta)
    for _ in range(200):
        J = jacobian(values) * scale
        weighted = J * np.minimum(1, delta / np.maximum(np.abs(r), 1e-300))[:, None]
        normal, gradient = weighted.T @ J, weighted.T @ r
        free = ~(((values <= 0) & (gradient > 0)) | ((values >= upper) & (gradient < 0)))
        before = loss
        for _ in range(20):
            damped = normal + damping * np.diag(np.maximum(np.diag(normal), 1e-300))
            step = np.zeros_like(values)
            step[free] = np.linalg.solve(damped[np.ix_(free, free)], -gradient[free])
            trial = np.clip(values + step * scale, 0.0, upper)
            r_trial = residuals(trial[None])[0]
            loss_trial = _huber(r_trial, delta)
            if loss_trial < loss:
                values, r, loss, damping = trial, r_trial, loss_trial, damping / 8
                break
            damping *= 4
        if before - loss <= 1e-9 * before:
            break
    return values


def _huber(r: Array, delta: float) -> float:
    size = np.abs(r)
    return float(np.where(size <= delta, r**2, 2 * delta * size - delta**2).sum())


def group_rows(table: pd.DataFrame) -> dict[Group, Array]:
    """Row numbers of each group's cases, in the order of GROUPS; unknown groups are left out."""
    found = np.full(len(table), -1)
    number = np.zeros(len(table), np.int64)
    labels: list[tuple[str, ...]] = [()]
    for name in Group._fields:
        codes, names = pd.factorize(table[name])
        number = number * len(names) + codes
        labels = [(*label, str(part)) for label in labels for part in names]
    for i, group in enumerate(GROUPS):
        if tuple(group) in labels:
            found[number == labels.index(tuple(group))] = i
    return {group: np.flatnonzero(found == i) for i, group in enumerate(GROUPS)}


def group_values(values: Array, known: tuple[Slot, ...], group: Group) -> dict[str, Any]:
    """Every parameter for one group, as [B, 1] columns of values [B, P]."""
    index = {slot: i for i, slot in enumerate(known)}
    found: dict[str, Any] = {}
    for name, parameter in PARAMETERS.items():
        slot = parameter.scope.get(group)
        found[name] = parameter.otherwise if slot is None else values[:, index[name, slot], None]
    return found
