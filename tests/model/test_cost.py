"""The cost model against the published records and against sums written out per rank."""

import numpy as np
import pandas as pd
import pytest

from workbench.case import Case, case_table
from workbench.model.cost import Work, cost_table
from workbench.records.results import load_table, match_pairs
from workbench.routing import rows_by_rank


@pytest.fixture(scope="module")
def table():
    return load_table()


def test_flop_and_hbm_bytes_equal_the_published_ones(table):
    cost = cost_table(table)
    seconds = table["iterationMS"] / 1e3
    np.testing.assert_allclose(cost["usefulFLOP"] / seconds / 1e12, table["usefulTFPerGPU"], 1e-12)
    np.testing.assert_allclose(
        cost["modeledHBMBytes"] / seconds / 1e9, table["modeledHBMGBps"], 1e-12
    )


def test_measured_link_bytes_lie_within_four_percent_of_the_wire_model(table):
    wire = cost_table(table)["wireBytes"]
    for column, mean in (("meanTXGBps", 0.0162), ("meanRXGBps", 0.0169)):
        error = table[column] * 1e6 * table["iterationMS"] / wire - 1
        assert error.abs().max() < 0.04
        assert error.abs().mean() == pytest.approx(mean, abs=1e-4)


SYSTEMS = [
    ("dist_moe", "mega", "mxfp8"),
    ("dist_moe", "standard", "bf16"),
    ("mok", "native", "mxfp8"),
    ("baseline", "alltoall", "bf16"),
]


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(("backend", "pipeline", "precision"), SYSTEMS)
@pytest.mark.parametrize("factor", [0.25, 1, 3, 4])
def test_busiest_rank_by_counting_every_rank(mode, backend, pipeline, precision, factor):
    """Divisible by ep, so that every source sends exactly 1/ep of a rank's rows."""
    T, K, D, F, E, ep, S = 64, 2, 96, 160, 16, 4, 2
    case = Case(
        backend=backend,
        mode=mode,
        ep=ep,
        precision=precision,
        pipeline=pipeline,
        F=F,
        imbalance=factor,
        T=T,
        D=D,
        E=E,
        K=K,
        sharedExperts=S,
    )
    work = Work(table=case_table([case]))
    rows = rows_by_rank(T=T, K=K, ep=ep, factor=factor)
    traffic = np.outer(np.ones(ep), rows) / ep  # [source, destination]
    passes = 3 if mode == "training" else 1
    b_w = 33 / 32 if precision == "mxfp8" else 2

    assert work.busiest_flop[0] == passes * rows.max() * 6 * D * F
    fixed = S * 3 * D * F * 2 + S * T * F * 4 + 3 * T * D * 2 + T * K * 4
    hbm = [passes * (fixed + E // ep * 3 * D * F * b_w + R * (F * 4 + D * 2)) for R in rows]
    assert work.busiest_hbm[0] == max(hbm)

    there = 33 / 32 if (backend, precision, mode) == ("dist_moe", "mxfp8", "inference") else 2
    times = 2 if mode == "training" else 1
    sent, received = np.zeros(ep), np.zeros(ep)
    for source in range(ep):
        for destination in range(ep):
            if source != destination:
                n = traffic[source, destination]
                sent[source] += n * times * there * D
                received[destination] += n * times * there * D
                sent[destination] += n * times * 2 * D
                received[source] += n * times * 2 * D
    assert work.wire[0] == pytest.approx(sent.mean(), rel=1e-14)
    busiest = rows.argmax()
    assert sent[busiest] >= received[busiest] - 1e-9
    assert work.busiest_wire[0] == pytest.approx(sent[busiest], rel=1e-14)


def test_packing_is_the_sum_of_its_layers(table):
    packing = table[table["category"] == "packing"].iloc[:4]
    whole = cost_table(packing)
    for (_, row), (_, cost) in zip(packing.iterrows(), whole.iterrows(), strict=True):
        layers = pd.DataFrame([row] * 10).assign(factors=[(f,) for f in row["factors"]], layers=1)
        parts = cost_table(layers)
        for name in (
            "usefulFLOP",
            "modeledHBMBytes",
            "wireBytes",
            "busiestRoutedFLOP",
            "busiestHBMBytes",
            "busiestWireBytes",
        ):
            assert parts[name].sum() == pytest.approx(cost[name], rel=1e-13)
        assert parts["busiestRows"].max() == cost["busiestRows"]


def test_geometric_mean_of_the_pairs_is_the_published_headline(table):
    times = table.set_index("id")["iterationMS"]
    pairs, pipelines = match_pairs(table)
    ratio = np.array([times[p["mok"]] / times[p["dist"]] for p in pairs])
    assert (len(pairs), len(pipelines)) == (44, 66)
    assert np.exp(np.log(ratio).mean()) == pytest.approx(1.173, abs=5e-4)
    assert (ratio.min(), ratio.max()) == pytest.approx((1.048, 1.401), abs=5e-4)
