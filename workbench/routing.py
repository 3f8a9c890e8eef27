"""How many routed rows each rank and each expert receives.

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

from workbench.case import check_factor

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
    """Rows that each rank receives, int64 [ep]."""
    rank0 = int(rank_rows(T=T, K=K, ep=ep, factor=factor).rank0)
    return np.concatenate([[rank0], spread(ep * T * K - rank0, ep - 1)])


def rows_by_expert(*, T: int, K: int, E: int, ep: int, factor: float) -> Ints:
    """Rows that each expert receives, int64 [E]; rank r holds experts r*E/ep to (r+1)*E/ep - 1.

    Raises InputError if no routing with distinct experts per token has that factor.
    """
    check_factor(factor, ep=ep, E=E, K=K)
    by_rank = rows_by_rank(T=T, K=K, ep=ep, factor=factor)
    return np.concatenate([spread(int(rows), E // ep) for rows in by_rank])


def spread(rows: int, parts: int) -> Ints:
    """`rows` over `parts` as evenly as integers allow, the first parts taking the remainder."""
    return np.full(parts, rows // max(parts, 1), np.int64) + (
        np.arange(parts) < rows % max(parts, 1)
    )


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
