"""How many routed rows each rank and each expert receives, and top-k ids and scores that do so.

Rank 0 is the hot rank: at factor i it receives round(i*T*K) of the ep*T*K routed rows and the
other ranks share the rest evenly, so a factor below 1 makes rank 0 the cold rank. Inside a rank
the rows are spread evenly over its experts. "Evenly" means: the first ones take the remainder.

Legend: T tokens per GPU, K experts per token, E experts, ep ranks, L layers, N cases.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from workbench.case import Case, check_factor
from workbench.errors import InputError, check_number, check_whole

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class RankRows(NamedTuple):
    """Routed rows received per rank; arrays that broadcast together, rows of one layer each."""

    rank0: Ints
    others_max: Ints
    """Most rows that one of the other ranks receives (0 at ep = 1)."""
    active_ranks: Ints
    """Ranks that receive at least one row."""

    @property
    def busiest(self) -> Ints:
        return np.maximum(self.rank0, self.others_max)


def rank_rows(
    *, T: npt.ArrayLike, K: npt.ArrayLike, ep: npt.ArrayLike, factor: npt.ArrayLike
) -> RankRows:
    """Rows of rank 0 and of the others at an imbalance factor; arguments broadcast."""
    balanced = np.asarray(T, np.int64) * np.asarray(K, np.int64)
    ranks = np.asarray(ep, np.int64)
    rank0 = np.rint(np.asarray(factor, np.float64) * balanced).astype(np.int64)
    rest = ranks * balanced - rank0
    others = np.maximum(ranks - 1, 1)
    others_max = -(-rest // others)
    active = (rank0 > 0) + np.minimum(rest, others) * (ranks > 1)
    return RankRows(rank0, others_max, active)


def rows_by_rank(*, T: int, K: int, ep: int, factor: float) -> Ints:
    """Rows that each rank receives, int64 [ep]. Raises InputError."""
    T, K, ep = _counts(T=T, K=K, ep=ep)
    factor = check_number("imbalance", factor)
    if not 0 <= factor <= ep:
        raise InputError(f"imbalance={factor:g} must lie between 0 and ep={ep}")
    rank0 = int(rank_rows(T=T, K=K, ep=ep, factor=factor).rank0)
    return np.concatenate([[rank0], spread(ep * T * K - rank0, ep - 1)])


def rows_by_expert(*, T: int, K: int, E: int, ep: int, factor: float) -> Ints:
    """Rows that each expert receives, int64 [E]; rank r holds experts r*E/ep to (r+1)*E/ep - 1.

    Raises InputError if no routing with distinct experts per token has that factor.
    """
    T, K, E, ep = _counts(T=T, K=K, E=E, ep=ep)
    check_factor(factor, ep=ep, E=E, K=K)
    by_rank = rows_by_rank(T=T, K=K, ep=ep, factor=factor)
    return np.concatenate([spread(int(rows), E // ep) for rows in by_rank])


def _counts(**given: int) -> list[int]:
    """The values as plain integers of at least 1 with rows that 53 bits hold; E and K fit ep."""
    found = {name: check_whole(name, value) for name, value in given.items()}
    T, K, ep, E = (found.get(name, 0) for name in ("T", "K", "ep", "E"))
    if E and E % ep:
        raise InputError(f"E={E} must be divisible by ep={ep}")
    if E and K > E:
        raise InputError(f"K={K} must be at most E={E}")
    if ep * T * K >= 2**53:
        raise InputError(f"ep*T*K={ep * T * K} must be below 2**53")
    return list(found.values())


def spread(rows: int, parts: int) -> Ints:
    """`rows` over `parts` as evenly as integers allow, the first parts taking the remainder."""
    return np.full(parts, rows // max(parts, 1), np.int64) + (
        np.arange(parts) < rows % max(parts, 1)
    )


class Routes(NamedTuple):
    """Routing of one layer for all ranks."""

    ids: npt.NDArray[np.int32]
    """[ep, T, K], distinct in a token."""
    scores: npt.NDArray[np.float32]
    """[ep, T, K]."""


def route(*, T: int, K: int, E: int, ep: int, factor: float, seed: int = 0) -> Routes:
    """Routing at an imbalance factor, with exactly the rows of `rows_by_expert`.

    Every source rank sends each expert, and each rank, the same number of rows to within one.
    The same on every machine for a seed: only raw bits of PCG64, integers and divisions are used.
    Raises InputError if no routing with distinct experts per token has that factor.
    """
    seed = check_whole("seed", seed, 0, 2**63 - 1)
    T, K, E, ep = _counts(T=T, K=K, E=E, ep=ep)
    if ep * T * K >= 2**31:
        raise InputError(f"ep*T*K={ep * T * K} must be below 2**31, or no array of ids fits")
    rows = rows_by_expert(T=T, K=K, E=E, ep=ep, factor=factor)
    if rows.max() > ep * T:
        raise InputError(
            f"imbalance={factor} must leave each expert at most ep*T={ep * T} rows, as a token's"
            f" experts are distinct; one would get {rows.max()}"
        )
    random = np.random.PCG64(seed)
    # Dealt out in turn, the rows of an expert, and of a rank, spread evenly over the sources.
    dealt = np.repeat(np.arange(E, dtype=np.int32), rows).reshape(T * K, ep).T
    ids = np.empty((ep, T, K), np.int32)
    for own, out in zip(dealt, ids, strict=True):
        # An expert's rows stay together, at most T of them, so in turn they reach distinct tokens.
        by_expert = own[np.argsort(_bits(random, E)[own], kind="stable")]
        out[:] = by_expert.reshape(K, T).T[_order(random, T)]
        out[:] = np.take_along_axis(out, np.argsort(_bits(random, T, K), axis=1, kind="stable"), 1)
    return Routes(ids, _scores(random, ep, T, K))


def case_routes(case: Case, layer: int = 0, seed: int = 0) -> Routes:
    """Routing of a layer of a case: its factor, which a profile gives for each layer."""
    layer = check_whole("layer", layer, 0, case.layers - 1)
    seed = check_whole("seed", seed, 0, 2**40)
    return route(
        T=case.T,
        K=case.K,
        E=case.E,
        ep=case.ep,
        factor=case.factors[layer],
        seed=seed * 1_000_003 + layer,
    )


def _bits(random: np.random.PCG64, *shape: int) -> npt.NDArray[np.uint64]:
    return random.random_raw(int(np.prod(shape))).reshape(shape)


def _order(random: np.random.PCG64, n: int) -> Ints:
    return np.argsort(_bits(random, n), kind="stable")


def _scores(random: np.random.PCG64, ep: int, T: int, K: int) -> npt.NDArray[np.float32]:
    """Positive scores that sum to 1 in a token: integers of 23 bits over their sum."""
    parts = (_bits(random, ep, T, K) >> np.uint64(41)).astype(np.int64) + 1
    return (parts / parts.sum(axis=2, keepdims=True)).astype(np.float32)


def factor_matrix(table: pd.DataFrame) -> Floats:
    """The `factors` column of a case table as float64 [N, L], L the most layers of any case;
    NaN beyond a case's own layers."""
    codes, tuples = pd.factorize(table["factors"])
    matrix = np.full((len(tuples), max(map(len, tuples), default=0)), np.nan)
    for row, factors in zip(matrix, tuples, strict=True):
        row[: len(factors)] = factors
    return matrix[codes]


@dataclass(frozen=True, kw_only=True)
class Workloads:
    """The cases of a table as arrays, each taken once, on first use.

    Arrays are [N], or [N, L] where said; those hold 0 beyond a case's own layers.
    """

    table: pd.DataFrame

    def ints(self, name: str) -> Ints:
        return self.table[name].to_numpy(np.int64)

    @cached_property
    def training(self) -> Bools:
        return (self.table["mode"] == "training").to_numpy()

    @cached_property
    def mxfp8(self) -> Bools:
        return (self.table["precision"] == "mxfp8").to_numpy()

    @cached_property
    def shape(self) -> dict[str, Ints]:
        """T, D, F, E_local, K and S as int64 [N]."""
        names = {"T": "T", "D": "D", "F": "F", "K": "K", "S": "sharedExperts"}
        shape = {short: self.ints(name) for short, name in names.items()}
        return shape | {"E_local": self.ints("E") // self.ep}

    @cached_property
    def ep(self) -> Ints:
        return self.ints("ep")

    @cached_property
    def balanced_rows(self) -> Ints:
        """Routed rows per rank and layer when balanced, T*K, [N]."""
        return self.shape["T"] * self.shape["K"]

    @cached_property
    def factors(self) -> Floats:
        """Imbalance factor, float64 [N, L], NaN beyond a case's own layers."""
        return factor_matrix(self.table)

    @cached_property
    def in_layers(self) -> Bools:
        """Whether the case has that layer, bool [N, L]."""
        return ~np.isnan(self.factors)

    @cached_property
    def rows(self) -> RankRows:
        """Rows of rank 0 and of the other ranks, int64 [N, L]."""
        T, K = self.shape["T"][:, None], self.shape["K"][:, None]
        factors = np.where(self.in_layers, self.factors, 0)
        found = rank_rows(T=T, K=K, ep=self.ep[:, None], factor=factors)
        return RankRows(*(np.where(self.in_layers, a, 0) for a in found))

    @cached_property
    def layers(self) -> Ints:
        return self.ints("layers")
