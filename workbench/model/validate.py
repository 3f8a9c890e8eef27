"""How wrong the time model is on cases that its fit has not seen, protocol by protocol.

The structure of the model was chosen with all cases in view; only its parameters are held out.
Errors are |predicted / measured - 1|. A gate must be met, a goal is wanted.
"""

import json
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from workbench.hardware import Hardware
from workbench.model.calibrate import (
    COVERAGE,
    WIDER,
    beyond,
    check_enough,
    device_of,
    hold_out,
    measured_cases,
    quantile,
    workloads,
)
from workbench.model.coefficients import CONSTANTS
from workbench.model.fit import WEIGHTS, Problem
from workbench.model.memory import fit_memory, memory_terms

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]


class Bound(NamedTuple):
    """Mean and worst absolute error as fractions; None where nothing is asked."""

    mean: float | None = None
    worst: float | None = None


class Protocol(NamedTuple):
    """What is held out and asked: `time` is the column whose error counts."""

    name: str
    time: str
    gate: Bound = Bound()
    goal: Bound = Bound()


IN_SAMPLE = Protocol("in sample", "iterationMS")
WORKLOAD = Protocol("leave one workload out", "iterationMS", Bound(0.02, 0.14), Bound(0.012, 0.08))
PROTOCOLS = (
    IN_SAMPLE,
    WORKLOAD,
    Protocol("the same without the smallest F", "iterationMS", Bound(0.015, 0.06)),
    Protocol("packing of one group left out", "iterationMS", Bound(0.015, 0.03), Bound(0.01, 0.02)),
    Protocol("largest EP from the smaller", "iterationMS", Bound(0.03, 0.20), Bound(0.02, 0.08)),
    Protocol("largest F from the rest", "iterationMS", Bound(0.03, 0.06), Bound(0.02, 0.04)),
    Protocol(
        "largest load from the smaller", "iterationMS", Bound(0.01, 0.035), Bound(0.007, 0.03)
    ),
    Protocol("forward, leave one workload out", "forwardMS", Bound(0.016), Bound(0.012)),
    Protocol("backward, leave one workload out", "backwardMS", Bound(0.022), Bound(0.015)),
    Protocol("peak memory, in sample", "peakAllocatedGiB", Bound(0.02), Bound(0.005)),
    Protocol("peak memory, leave one workload out", "peakAllocatedGiB", Bound(0.05), Bound(0.02)),
)
"""For the study, the largest EP, F and load are EP 64, F 6144 and imbalance 8."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Errors of every protocol.

    protocols   one row each: cases, mean, worst, gates and goals (fractions), gateMet, goalMet
    by_group    mean and worst of each protocol in each (backend, precision, pipeline)
    cases       the measured cases, and their signed error per protocol (NaN where not held out)
    coverage    fraction of cases inside the 90 % interval that the other workloads give
    median_width      of that interval, high over low minus 1
    coverage_beyond   fraction of the largest EP, F and load inside an extrapolation's interval
    fits, seconds     how many fits were made, and how long all took
    """

    protocols: pd.DataFrame
    by_group: pd.DataFrame
    cases: pd.DataFrame
    coverage: float
    median_width: float
    coverage_beyond: float
    fits: int
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every gate that applies is met, and the interval covers 85 to 97 %."""
        return bool(self.protocols["gateMet"].all()) and 0.85 <= self.coverage <= 0.97

    def to_json(self) -> str:
        """Protocols, groups and coverage as a JSON object."""
        tables = {
            name: json.loads(frame.to_json(orient="records"))
            for name, frame in (("protocols", self.protocols), ("groups", self.by_group))
        }
        scalars = {
            "coverage": self.coverage,
            "medianWidth": self.median_width,
            "coverageBeyond": self.coverage_beyond,
            "fits": self.fits,
            "seconds": self.seconds,
            "passed": self.passed,
        }
        return json.dumps(tables | scalars, indent=1)


def validate(table: pd.DataFrame, hardware: Hardware | None = None) -> Validation:
    """Refit without each protocol's cases and compare. Raises InputError as `calibrate` does."""
    began = time.perf_counter()
    table = measured_cases(table)
    check_enough(table)
    problem = Problem.of(table, hardware or device_of(table), CONSTANTS)
    folds = workloads(table)
    packing = [np.isin(np.arange(len(table)), rows) for rows in problem.rows]
    packed = (table["category"] == "packing").to_numpy()
    far = {
        away.feature: hold_out(problem, away.folds)
        for away in beyond(table)
        if away.end == "largest" and away.feature != "layers"
    }
    fitted = problem.log_ratios(problem.fit(np.ones(len(table), bool))[None])
    by_workload = hold_out(problem, folds)
    blank = {name: np.full(len(table), np.nan) for name in WEIGHTS}
    wide = (table["F"] > table["F"].min()).to_numpy()
    held = {
        "in sample": {name: ratio[0] for name, ratio in fitted.items()},
        "leave one workload out": by_workload,
        "the same without the smallest F": {
            name: np.where(wide, ratio, np.nan) for name, ratio in by_workload.items()
        },
        "packing of one group left out": hold_out(
            problem, [group & packed for group in packing if (group & packed).any()]
        ),
        "largest EP from the smaller": far.get("EP", blank),
        "largest F from the rest": far.get("F", blank),
        "largest load from the smaller": far.get("imbalance", blank),
        "forward, leave one workload out": by_workload,
        "backward, leave one workload out": by_workload,
    }
    errors = {p.name: np.expm1(held[p.name][p.time]) for p in PROTOCOLS if p.name in held}
    errors["peak memory, in sample"] = _memory_errors(table, [np.ones(len(table), bool)], False)
    errors["peak memory, leave one workload out"] = _memory_errors(table, folds, True)

    ratios = by_workload["iterationMS"]
    widths = np.array([quantile(np.where(fold, np.nan, ratios)) for fold in folds])
    of_case = np.select(folds, list(widths))
    outside = np.concatenate([ratio["iterationMS"] for ratio in far.values()] or [np.zeros(0)])
    outside = outside[np.isfinite(outside)]
    within = np.abs(outside) <= WIDER * quantile(ratios)
    groups = np.full(len(table), "", object)
    for terms, rows in zip(problem.terms, problem.rows, strict=True):
        groups[rows] = str(terms.group)
    return Validation(
        protocols=pd.DataFrame([_summary(p, errors[p.name]) for p in PROTOCOLS]),
        by_group=pd.DataFrame(
            [
                {"group": group, "protocol": p.name, **_mean_worst(errors[p.name][groups == group])}
                for p in PROTOCOLS
                for group in dict.fromkeys(groups)
            ]
        ),
        cases=table.assign(group=groups, **errors),
        coverage=float((np.abs(ratios) <= of_case)[np.isfinite(ratios)].mean()),
        median_width=float(np.median(np.expm1(2 * widths))),
        coverage_beyond=float(within.mean()) if len(within) else float("nan"),
        fits=1 + len(folds) + len(far) + len(packing),
        seconds=time.perf_counter() - began,
    )


def shown_protocols(validation: Validation) -> pd.DataFrame:
    """The protocols for people: errors, gates and goals in percent, mean / worst."""
    p = validation.protocols

    def pair(mean: str, worst: str) -> list[str]:
        texts = [
            ["" if pd.isna(v) else f"{100 * v:.2f}" for v in values]
            for values in p[[mean, worst]].itertuples(index=False)
        ]
        return [" / ".join(filter(None, text)) for text in texts]

    goal = p["goalMet"] & p["goalMean"].notna()
    verdict = np.where(goal, "goal met", np.where(p["gateMet"], "gate met", "gate MISSED"))
    asked = p["gateMean"].notna()
    return pd.DataFrame(
        {
            "protocol": p["protocol"],
            "cases": p["cases"],
            "error [%]": pair("mean", "worst"),
            "gate [%]": pair("gateMean", "gateWorst"),
            "goal [%]": pair("goalMean", "goalWorst"),
            "verdict": np.where(asked & (p["cases"] > 0), verdict, ""),
        }
    )


def _memory_errors(table: pd.DataFrame, folds: list[Mask], leave_out: bool) -> Array:
    errors = np.full(len(table), np.nan)
    for fold in folds:
        constants = fit_memory(table, ~fold if leave_out else fold)
        if constants:
            predicted = memory_terms(table[fold], constants).sum(axis=1).to_numpy()
            errors[fold] = predicted / table["peakAllocatedGiB"].to_numpy()[fold] - 1
    return errors


def _mean_worst(errors: Array) -> dict[str, float]:
    known = np.abs(errors[np.isfinite(errors)])
    if not len(known):
        return {"cases": 0, "mean": float("nan"), "worst": float("nan")}
    return {"cases": len(known), "mean": float(known.mean()), "worst": float(known.max())}


def _summary(protocol: Protocol, errors: Array) -> dict[str, Any]:
    found = _mean_worst(errors)

    def met(bound: Bound) -> bool:
        """Not missed: a protocol without cases misses nothing."""
        return not any(
            limit is not None and found[name] > limit for name, limit in bound._asdict().items()
        )

    return {
        "protocol": protocol.name,
        "time": protocol.time,
        **found,
        "gateMean": protocol.gate.mean,
        "gateWorst": protocol.gate.worst,
        "goalMean": protocol.goal.mean,
        "goalWorst": protocol.goal.worst,
        "gateMet": met(protocol.gate),
        "goalMet": met(protocol.goal),
    }


__all__ = ["COVERAGE", "PROTOCOLS", "Bound", "Protocol", "Validation", "validate"]
