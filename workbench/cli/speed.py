"""How fast the workbench itself is: what `workbench bench plan`, `predict`, `explore` print."""

import json
import statistics
import tempfile
import time

import numpy as np
import pandas as pd

from workbench.case import PROFILES, case_table, reference_matrix
from workbench.model.calibration import load_calibration
from workbench.model.cost import cost_table
from workbench.planning.case_plan import plan_table


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


def bench_sweep() -> dict[str, float | int]:
    """Seconds that the harness adds to a case of the local matrix: from its start to its record,
    less what its warm-ups and windows took."""
    from workbench.bench.job import Settings, TimingProtocol
    from workbench.bench.matrix import load_matrix
    from workbench.bench.sweep import open_sweep, run_sweep
    from workbench.records.record import read_record

    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(protocol=TimingProtocol(warmups=1, windows=2, iterations=2))
        sweep = open_sweep(folder, load_matrix("local"), settings=settings)
        began = time.perf_counter()
        run_sweep(sweep)
        wall = time.perf_counter() - began
        events = [json.loads(line) for line in sweep.folder.events.read_text().splitlines()]
        records = {case.id: read_record(sweep.folder.record(case)) for case in sweep.cases}
    starts = {e["case"]: e["time"] for e in events if e["event"] == "start"}
    spent = []
    for event in events:
        provenance = records[event["case"]].provenance or {}
        if event["event"] == "end" and "timedSeconds" in provenance:
            spent.append(event["time"] - starts[event["case"]] - provenance["timedSeconds"])
    in_cases = sum(e["time"] * (1 if e["event"] == "end" else -1) for e in events)
    return {
        "cases": len(spent),
        "overhead_s_per_case": sum(spent) / len(spent),
        "overhead_median_s": sorted(spent)[len(spent) // 2],
        "overhead_worst_s": max(spent),
        "start_s": (wall - in_cases) / len({case.ep for case in sweep.cases}),
    }
