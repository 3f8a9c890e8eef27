from fractions import Fraction

import numpy as np
import pytest

from workbench.case import PROFILES, Case, case_table, reference_matrix
from workbench.errors import InputError
from workbench.routing import (
    case_routes,
    factor_matrix,
    rank_rows,
    route,
    rows_by_expert,
    rows_by_rank,
)

IDS_OF_SEED_7 = [[[1, 0], [0, 5], [3, 2]], [[0, 4], [1, 6], [3, 2]]]
SCORES_OF_SEED_7 = [0.7752654552459717, 0.22473454475402832]
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


def _check_routes(ids, scores, *, T, K, E, ep, factor):
    assert ids.shape == scores.shape == (ep, T, K)
    assert ids.dtype == np.int32
    assert scores.dtype == np.float32
    assert (np.diff(np.sort(ids, axis=2), axis=2) > 0).all()  # distinct in a token
    by_source = np.stack([np.bincount(own.ravel(), minlength=E) for own in ids])
    assert (by_source.sum(0) == rows_by_expert(T=T, K=K, E=E, ep=ep, factor=factor)).all()
    assert np.ptp(by_source, axis=0).max() <= 1  # the same share from every source rank
    to_ranks = by_source.reshape(ep, ep, -1).sum(2)
    assert np.ptp(to_ranks, axis=0).max() <= 1
    assert (scores > 0).all()
    assert np.allclose(scores.sum(2, dtype=np.float64), 1, atol=1e-6)


@pytest.mark.parametrize("ep", [8, 64])
@pytest.mark.parametrize("factor", [1.0, 4.0, 8.0, *PROFILES["A"], 0.0])
def test_ids_have_the_rows_of_the_study(ep, factor):
    shape = {"T": 256, "K": 6, "E": 384, "ep": ep, "factor": factor}
    _check_routes(*route(**shape, seed=1), **shape)


@pytest.mark.parametrize(
    ("T", "K", "E", "ep", "factor"),
    [
        (1, 1, 1, 1, 1.0),
        (7, 4, 4, 1, 1.0),
        (7, 3, 9, 3, 0.0),
        (97, 2, 8, 4, 4.0),
        (97, 4, 8, 4, 2.0),
        (5, 6, 48, 2, 1.3),
    ],
)
def test_ids_at_edges(T, K, E, ep, factor):
    shape = {"T": T, "K": K, "E": E, "ep": ep, "factor": factor}
    for seed in range(20):
        _check_routes(*route(**shape, seed=seed), **shape)


def test_ids_are_those_of_the_seed_on_every_machine():
    ids, scores = route(T=3, K=2, E=8, ep=2, factor=1.5, seed=7)
    again = route(T=3, K=2, E=8, ep=2, factor=1.5, seed=7)
    assert (ids == again.ids).all()
    assert (scores == again.scores).all()
    assert (ids != route(T=3, K=2, E=8, ep=2, factor=1.5, seed=8).ids).any()
    assert ids.tolist() == IDS_OF_SEED_7
    assert scores[0, 0].tolist() == pytest.approx(SCORES_OF_SEED_7, rel=1e-7)


def test_pairs_of_experts_in_a_token_are_not_always_the_same():
    ids, _ = route(T=512, K=2, E=16, ep=4, factor=1.0, seed=0)
    pairs = {tuple(pair) for pair in np.sort(ids.reshape(-1, 2), axis=1).tolist()}
    assert len(pairs) > 24


def test_a_factor_that_would_repeat_an_expert_is_refused():
    with pytest.raises(InputError, match=r"imbalance=0\.0 must leave each expert at most ep\*T=14"):
        route(T=7, K=2, E=2, ep=2, factor=0.0)


def test_each_layer_of_a_profile_has_its_factor():
    case = Case(
        backend="dist_moe",
        mode="training",
        ep=8,
        precision="bf16",
        pipeline="standard",
        category="packing",
        profile="B",
        T=64,
        E=64,
        D=64,
        F=64,
    )
    for layer, factor in enumerate(PROFILES["B"]):
        ids, scores = case_routes(case, layer, seed=3)
        _check_routes(ids, scores, T=64, K=6, E=64, ep=8, factor=factor)
