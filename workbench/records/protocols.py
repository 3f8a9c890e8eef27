"""What stands beside a measured number: how it was measured, and how far its windows lie apart."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

STEPS = ("iteration", "forward", "backward")
LOW, HIGH = "_p20", "_p80"
"""Endings of the columns with the 20th and 80th percentile over windows of the column before."""
NOISY_ABOVE = 1.25
"""A case is noisy where its slowest window takes more than this many times its median window."""
NOISE = f"slowest window above {NOISY_ABOVE:g} x the median one"
TIME_SPREAD = tuple(f"{step}MS{end}" for step in STEPS for end in (LOW, HIGH))


def time_spread(samples: Mapping[str, Any] | None) -> dict[str, float | None]:
    """The columns of TIME_SPREAD in ms from a record's `samples`; None where it has none."""
    found: dict[str, float | None] = {}
    statistics = (samples or {}).get("statistics")
    for step in STEPS:
        ends = statistics.get(step) if isinstance(statistics, dict) else None
        for end in (LOW, HIGH):
            value = ends.get(end[1:]) if isinstance(ends, dict) else None
            number = isinstance(value, int | float) and not isinstance(value, bool)
            found[f"{step}MS{end}"] = float(value) if number else None  # type: ignore[arg-type]
    return found


def own_protocol(provenance: Mapping[str, Any] | None) -> str:
    """The protocol that a record of ours says it ran: `2 warm-ups, 5 windows of 4 iterations, no
    graphs, no flush`. Empty where it says nothing."""
    ran = (provenance or {}).get("protocol")
    if provenance is None or not isinstance(ran, dict):
        return ""
    found = _counts(*(ran.get(name) for name in ("warmups", "windows", "iterations")))
    if found and "graphs" in provenance:
        found += ", CUDA graphs" if provenance["graphs"] else ", no graphs"
    if found and "flushedBytes" in provenance:
        found += ", L2 flushed" if provenance["flushedBytes"] else ", no flush"
    return found


def file_protocol(meta: Mapping[str, Any]) -> str:
    """The protocol that the head of a result file states, as `own_protocol`."""
    return _counts(*(meta.get(name) for name in ("warmups", "windows", "iterationsPerWindow")))


def _counts(*counts: Any) -> str:
    if not all(isinstance(count, int) for count in counts):
        return ""
    return "{} warm-ups, {} windows of {} iterations".format(*counts)


def protocols(table: pd.DataFrame) -> list[str]:
    """Each protocol of the cases with a time, after the origin: `measured: 2 warm-ups, ...`."""
    timed = table[table["iterationMS"].notna()] if "protocol" in table else table[:0]
    named = timed.reindex(columns=["origin", "protocol"])
    named = named[named["protocol"].fillna("").ne("")].drop_duplicates()
    return [f"{origin}: {text}" for origin, text in named.to_numpy()]


def measured_how(table: pd.DataFrame) -> list[str]:
    """`protocols`, and how many cases are noisy where there are any."""
    noisy = int(table["noisy"].eq(True).sum()) if "noisy" in table else 0
    return protocols(table) + [f"{noisy} noisy: {NOISE}"] * (noisy > 0)
