"""How many routed rows each rank and each expert receives.

Rank 0 is the hot rank: at factor i it receives round(i*T*K) of the ep*T*K routed rows and the
other ranks share the rest evenly, so a factor below 1 makes rank 0 the cold rank. Inside a rank
the rows are spread evenly over its experts. "Evenly" means: the first ones take the remainder.

Legend: T tokens per GPU, K experts per token, E experts, ep ranks, L layers, N cases.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from workbench.case import check_factor

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


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
