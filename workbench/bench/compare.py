"""Two runs case by case: faster, slower, same or undecided, from the intervals of their samples."""

import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from workbench.case import Case
from workbench.errors import InputError
from workbench.records.protocols import HIGH, LOW
from workbench.records.record import read_record
from workbench.records.schema import OwnRecord

MARGIN = 0.02
"""Two times within this ratio of one another are the same: runs of the study itself differ by up
to 0.9 %, and the same case twice on a shared machine by more."""
CONFIDENCE = 0.95
METRICS = ("iteration", "forward", "backward")


def load_run(path: str | Path) -> dict[str, OwnRecord]:
    """The records below a folder, by id. Raises InputError for none, or one that is wrong."""
    if not Path(path).is_dir():
        raise InputError(f"{path}: must be a folder with records of a sweep")
    found = {}
    for file in sorted(Path(path).rglob("*.record.json")):
        record = read_record(file)
        if record.id in found:
            raise InputError(f"{file}: id={record.id!r} must not occur twice in {path}")
        found[record.id] = record
    if not found:
        raise InputError(f"{path}: holds no *.record.json")
    return found


def ratio_interval(a: list[float], b: list[float]) -> tuple[float, float, float]:
    """(B / A, low, high) from the slowest rank's mean of each window: Welch's interval of the
    difference of mean logs at CONFIDENCE. Infinitely wide where one has less than two windows."""
    x, y = np.log(a), np.log(b)
    ratio = float(np.exp(y.mean() - x.mean()))
    if min(len(x), len(y)) < 2:
        return ratio, 0.0, math.inf
    var_x, var_y = x.var(ddof=1) / len(x), y.var(ddof=1) / len(y)
    total = var_x + var_y
    if total == 0:
        return ratio, ratio, ratio
    degrees = total**2 / (var_x**2 / (len(x) - 1) + var_y**2 / (len(y) - 1))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees) * math.sqrt(total))
    return ratio, ratio * math.exp(-half), ratio * math.exp(half)


def verdict(low: float, high: float, margin: float = MARGIN) -> str:
    """What an interval of B / A says of B: `same` if all of it is within the margin, `faster` or
    `slower` if none of it is on the other side of 1, else `undecided`."""
    if 1 / (1 + margin) <= low and high <= 1 + margin:
        return "same"
    if high < 1:
        return "faster"
    return "slower" if low > 1 else "undecided"


def compare(
    a: str | Path, b: str | Path, metric: str = "iteration", margin: float = MARGIN
) -> pd.DataFrame:
    """One row per case of either run: id, median, p20 and p80 over windows of A and B in ms, ratio
    (B / A), low, high, verdict (of B against A), and why it is undecided or to be doubted.

    Raises InputError where the runs have no case in common."""
    if metric not in METRICS:
        raise InputError(f"metric={metric!r} must be one of {', '.join(METRICS)}")
    if not margin >= 0:
        raise InputError(f"margin={margin} must not be negative")
    runs = load_run(a), load_run(b)
    if not runs[0].keys() & runs[1].keys():
        raise InputError(f"{a} and {b} have no case in common")
    rows = [
        _row(name, runs[0].get(name), runs[1].get(name), metric, margin)
        for name in dict.fromkeys([*runs[0], *runs[1]])
    ]
    ends = ("", LOW, HIGH)
    columns = ["id", *(f"aMS{end}" for end in ends), *(f"bMS{end}" for end in ends)]
    columns += ["ratio", "low", "high", "verdict", "why"]
    return pd.DataFrame(rows, columns=columns)


def _row(
    name: str, a: OwnRecord | None, b: OwnRecord | None, metric: str, margin: float
) -> dict[str, object]:
    windows = [_windows(record, metric) for record in (a, b)]
    found: dict[str, object] = {"id": name, "verdict": "undecided"}
    for column, values in zip(("aMS", "bMS"), windows, strict=True):
        for end, percentile in (("", 50), (LOW, 20), (HIGH, 80)):
            times = [] if isinstance(values, str) else values
            found[column + end] = float(np.percentile(times, percentile)) if times else None
    problems = [
        f"{which}: {values}"
        for which, values in zip("AB", windows, strict=True)
        if isinstance(values, str)
    ]
    devices = {record.device for record in (a, b) if record is not None}
    if len(devices) > 1:
        problems.append(f"devices differ: {' / '.join(sorted(devices))}")
    if a is not None and b is not None and (differs := _other_work(a.case(), b.case())):
        problems.append(differs)
    if problems:
        return found | {"why": "; ".join(problems)}
    ratio, low, high = ratio_interval(*windows)  # type: ignore[arg-type]
    said = verdict(low, high, margin)
    why = f"the interval spans 1 and more than {margin:.0%}" if said == "undecided" else ""
    if math.isinf(high):
        why = "fewer than two windows"
    noisy = [which for which, record in zip("AB", (a, b), strict=True) if record and record.noisy]
    why = "; ".join(filter(None, [why, " and ".join(noisy) + " noisy" if noisy else ""]))
    return found | {"ratio": ratio, "low": low, "high": high, "verdict": said, "why": why}


def _other_work(a: Case, b: Case) -> str:
    """What differs in two cases of one id."""
    pairs = ((f.name, getattr(a, f.name), getattr(b, f.name)) for f in fields(Case))
    return ", ".join(f"{name} differs: {x} / {y}" for name, x, y in pairs if x != y)


def _windows(record: OwnRecord | None, metric: str) -> list[float] | str:
    """The slowest rank's mean of each window in ms, or why there is none."""
    if record is None:
        return "no such case"
    if record.status == "failed":
        return f"failed: {record.reason}"
    found = (record.samples or {}).get("slowestRank", {}).get(metric)
    return [float(value) for value in found] if found else f"no samples of {metric}"
