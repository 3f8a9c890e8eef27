from fractions import Fraction

import numpy as np
import pytest

from workbench.case import PROFILES, case_table, reference_matrix
from workbench.errors import InputError
from workbench.routing import factor_matrix, rank_rows, rows_by_expert, rows_by_rank

FACTORS = sorted({1.0, 4.0, 8.0, *PROFILES["A"], *PROFILES["B"], 0.0})


@pytest.mark.parametrize("ep", [8, 16, 32, 64])
@pytest.mark.parametrize("factor", FACTORS)
def test_rows_of_the_study_by_rank_and_expert(ep, factor):
    T, K, E = 2048, 6, 384
    by_expert = rows_by_expert(T=T, K=K, E=E, ep=ep, factor=factor)
    by_rank = by_expert.reshape(ep, -1).sum(axis=1)
    hot = round(Fraction(str(factor)) * T * K)
    assert by_rank[0] == hot
    assert by_expert.sum() == ep * T * K
    assert np.ptp(by_rank[1:]) <= 1
    assert all(np.ptp(rank) <= 1 for rank in by_expert.reshape(ep, -1))
    assert (np.diff(by_expert.reshape(ep, -1)) <= 0).all()  # the first experts take the remainder


@pytest.mark.parametrize("T", [1, 7, 97, 2048])
@pytest.mark.parametrize("ep", [1, 2, 3, 64])
def test_vectorised_rows_equal_the_list_of_ranks(T, ep):
    for factor in [1.0] if ep == 1 else [0, 0.3, 1, 1.7, 2]:
        listed = rows_by_rank(T=T, K=2, ep=ep, factor=factor)
        found = rank_rows(T=T, K=2, ep=ep, factor=factor)
        assert found.rank0 == listed[0]
        assert found.others_max == listed[1:].max(initial=0)
        assert found.busiest == listed.max()
        assert found.active_ranks == np.count_nonzero(listed)


def test_all_rows_on_one_rank():
    rows = rank_rows(T=2048, K=6, ep=8, factor=8)
    assert (rows.rank0, rows.others_max, rows.active_ranks) == (8 * 2048 * 6, 0, 1)
    with pytest.raises(InputError, match=r"imbalance=65 must lie between 0 and 64, .* at ep=64"):
        rows_by_expert(T=2048, K=6, E=384, ep=64, factor=65)


def test_factor_matrix_pads_with_nan():
    table = case_table(reference_matrix())
    matrix = factor_matrix(table)
    assert matrix.shape == (110, 10)
    for row, factors in zip(matrix, table["factors"], strict=True):
        assert row[: len(factors)].tolist() == list(factors)
        assert np.isnan(row[len(factors) :]).all()
