"""How fast the workbench itself is: what `workbench bench plan`, `predict`, `explore` print."""

import statistics
import time

import numpy as np
import pandas as pd

from workbench.case import PROFILES, case_table, reference_matrix
from workbench.model.calibration import load_calibration
from workbench.model.cost import cost_table
from workbench.moe.case_plan import plan_table


def random_cases(count: int, seed: int = 0) -> pd.DataFrame:
    """`count` cases like the study's, with EP, F and imbalance drawn at random; the systems,
    modes and packing profiles are those of the reference matrix in turn."""
    rng = np.random.default_rng(seed)
    study = case_table(reference_matrix())
    table = study.loc[study.index.repeat(-(-count // len(study)))][:count].reset_index(drop=True)
    table["ep"] = rng.choice([8, 16, 24, 32, 48, 64], count)
    table["F"] = 64 * rng.integers(8, 128, count)
    factors = np.round(rng.uniform(0, 8, count), 3)
    single = table["profile"].isna()
    table.loc[single, "imbalance"] = factors[single]
    table["factors"] = [
        PROFILES[profile] if isinstance(profile, str) else (factor,)
        for profile, factor in zip(table["profile"], factors, strict=True)
    ]
    return table


def bench_plan(cases: int = 100_000, repeats: int = 5) -> dict[str, float | int]:
    """Seconds (median and worst of `repeats`) to cost and plan a table of random cases."""
    table = random_cases(cases)
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        cost_table(table)
        middle = time.perf_counter()
        plan_table(table)
        taken.append((middle - start, time.perf_counter() - middle))
    both = [cost + plan for cost, plan in taken]
    return {
        "cases": cases,
        "cost_s": statistics.median(cost for cost, _ in taken),
        "plan_s": statistics.median(plan for _, plan in taken),
        "cost_and_plan_s": statistics.median(both),
        "cost_and_plan_worst_s": max(both),
    }


def bench_predict(cases: int = 1_000_000, repeats: int = 5) -> dict[str, float | int]:
    """Seconds (median and worst of `repeats`) to predict a table of random cases: times, floors,
    intervals, peak memory and what is extrapolated, with the packaged calibration. `cpu_s` is the
    median CPU time of both threads, which other work on the machine changes little."""
    calibration, table = load_calibration(), random_cases(cases)
    taken, used = [], []
    for _ in range(repeats):
        start, cpu = time.perf_counter(), time.process_time()
        calibration.predict(table)
        taken.append(time.perf_counter() - start)
        used.append(time.process_time() - cpu)
    return {
        "cases": cases,
        "predict_s": statistics.median(taken),
        "predict_worst_s": max(taken),
        "cpu_s": statistics.median(used),
    }


def bench_explore(changes: int = 200, seed: int = 0) -> dict[str, float | int]:
    """Milliseconds from a random control's change to the live figure's update: median, 95th
    percentile and worst, for each explorer.

    Only changes that led to a possible state count. What JupyterLab then takes to draw does not.
    """
    from workbench.explore.imbalance import ImbalanceExplorer
    from workbench.explore.precision import PrecisionExplorer
    from workbench.explore.width import WidthExplorer

    figures: dict[str, float | int] = {"changes": changes}
    for explorer in (ImbalanceExplorer(), WidthExplorer(), PrecisionExplorer()):
        explorer.widget()
        rng = np.random.default_rng(seed)
        wall: list[float] = []
        while len(wall) < changes:
            before = explorer.view
            start = time.perf_counter()
            explorer.step(rng)
            taken = 1e3 * (time.perf_counter() - start)
            if explorer.view is not before:
                wall.append(taken)
            elif explorer.problem:  # do not stay where nothing is possible
                explorer.set(E=384, D=7168, F=3072, K=6)
        name = explorer.name
        figures[f"{name}_p50_ms"], figures[f"{name}_p95_ms"] = np.percentile(
            wall, [50, 95]
        ).tolist()
        figures[f"{name}_max_ms"] = max(wall)
    return figures
