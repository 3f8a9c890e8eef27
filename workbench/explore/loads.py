"""What the ranks of the imbalance explorer's state receive, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from workbench.case import PROFILES, Case, check_factor
from workbench.errors import InputError
from workbench.explore.sources import System, WorkloadState
from workbench.explore.trace import Trace, placed_rows, scaled_counts
from workbench.routing import rows_by_expert

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
DEFAULT_FACTORS = list(PROFILES["A"])
Load = Literal["factor", "A", "B", "table", "trace"]
SWEEP = 25


class ImbalanceState(WorkloadState):
    """`load` says which of `factor` (one layer), a profile, `factors` (a table, one per layer) or
    the trace counts. `layer` is the one whose ranks are shown, from 1; 0 is the busiest layer."""

    load: Load = "factor"
    factor: float = 4.0
    factors: list[float] = DEFAULT_FACTORS
    layer: int = 0
    slotFactor: float = 2.5
    scratchFactor: float = 8.0


def largest_factor(state: WorkloadState) -> float:
    """The most that one rank can receive over the mean, ep*min(K, E/ep)/K."""
    return state.ep * min(state.K, state.E // state.ep) / state.K


@dataclass(frozen=True, kw_only=True, eq=False)
class Loads:
    """Rows per layer and rank, and the factors that follow.

    counts              int64 [L, ep], as the experts lie
    placed              the same with the experts placed anew; None without a trace, because a
                        factor says nothing of the rows of each expert
    factors             of each layer: as given, or the busiest rank's of a trace
    """

    counts: Ints
    placed: Ints | None
    factors: tuple[float, ...]

    @property
    def mean(self) -> int:
        return int(self.counts[0].sum()) // self.counts.shape[1]

    def largest(self, rows: Ints) -> tuple[float, ...]:
        """The busiest rank's rows over the mean, for each layer of `rows` [L, ep]."""
        return tuple((rows.max(axis=1) / self.mean).tolist())


def layer_loads(state: ImbalanceState, trace: Trace | None) -> Loads:
    """The load of a state. Raises InputError for an impossible one, naming the layer."""
    state.case(state.system)  # the shape is possible
    shape = (state.T, state.K, state.E, state.ep)
    if state.load == "trace":
        if trace is None:
            raise InputError("trace= must name a .csv or .npz file of counts, layers x experts")
        if trace.experts != state.E:
            raise InputError(f"{trace.name}: experts={trace.experts} must be E={state.E}")
        counts, placed = _of_trace(trace, *shape)
        mean = state.T * state.K
        factors = tuple((counts.max(axis=1) / mean).tolist())
        _check_factors(state, factors, f"{trace.name}: ")
        return Loads(counts=counts, placed=placed, factors=factors)
    given = {"factor": [state.factor], "table": state.factors}.get(state.load)
    factors = tuple(given if given is not None else PROFILES[state.load])
    if not factors:
        raise InputError("factors=[] must hold a factor for at least one layer")
    _check_factors(state, factors, "")
    return Loads(counts=_of_factors(factors, *shape), placed=None, factors=factors)


def _check_factors(state: ImbalanceState, factors: Sequence[float], place: str) -> None:
    for layer, factor in enumerate(factors):
        try:
            check_factor(factor, ep=state.ep, E=state.E, K=state.K)
        except InputError as error:
            told = f"layer {layer + 1}: " if len(factors) > 1 else ""
            raise InputError(f"{place}{told}{error}") from None


@lru_cache(maxsize=16)
def _of_trace(trace: Trace, T: int, K: int, E: int, ep: int) -> tuple[Ints, Ints]:
    counts = scaled_counts(trace, ep * T * K)
    placed = np.array([placed_rows(tuple(row), ep) for row in counts.tolist()])
    return _by_rank(counts, ep), placed


@lru_cache(maxsize=64)
def _of_factors(factors: tuple[float, ...], T: int, K: int, E: int, ep: int) -> Ints:
    by_expert = [rows_by_expert(T=T, K=K, E=E, ep=ep, factor=f) for f in factors]
    return _by_rank(np.stack(by_expert), ep)


def _by_rank(counts: Ints, ep: int) -> Ints:
    by_rank: Ints = counts.reshape(len(counts), ep, -1).sum(axis=2)
    return by_rank


def load_case(state: ImbalanceState, system: System, factors: Sequence[float]) -> Case:
    """The state's case on a system at these layer factors.

    A single layer keeps whatever its scratch admits, as the study's do, so its slot is that large.
    """
    if len(factors) == 1:
        factors = (1.0,) if state.ep == 1 else factors
        return state.case(
            system,
            imbalance=float(factors[0]),
            scratchFactor=state.scratchFactor,
            slotFactor=state.scratchFactor,
        )
    profile = state.load if state.load in PROFILES else "own"
    return state.case(
        system,
        category="packing",
        profile=profile,
        factors=tuple(factors),
        slotFactor=state.slotFactor,
        scratchFactor=state.scratchFactor,
    )


def blend(factors: Sequence[float], peaks: Floats) -> list[tuple[float, ...]]:
    """Loads between even and beyond `factors`, scaled so that their largest factor is each of
    `peaks`; a single factor is replaced by the peak itself."""
    f = np.asarray(factors)
    if len(f) == 1 or f.max() == 1:
        return [tuple([float(peak)] * len(f)) for peak in peaks]
    scale = (peaks - 1) / (f.max() - 1)
    return [tuple(np.maximum(1 + s * (f - 1), 0).tolist()) for s in scale]


def sweep_peaks(state: ImbalanceState, factors: Sequence[float]) -> Floats:
    """Where the curves over imbalance are computed: up to 10, to the load shown, or the limit."""
    limit = largest_factor(state)
    top = min(limit, max(10.0, 1.25 * max(factors)))
    start = 0.0 if len(factors) == 1 and state.ep > 1 else 1.0
    return np.linspace(start, max(top, 1.0), SWEEP)
