"""The tables behind the report: pure functions from a table of cases to a table of findings.

They take any table of `workbench.records.results.load_table`, the user's own records too, and leave
it as it is. Where a selection has no such cases the result is empty and has the same columns.
Times in ms, rates in TFLOP/s and GB/s per GPU, memory in bytes unless a name says GiB.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from workbench.case import CATEGORIES, PACKING_SLOT_FACTOR
from workbench.errors import InputError
from workbench.hardware import Hardware, match_device
from workbench.model.cost import cost_table
from workbench.model.roofline import roofline_table
from workbench.planning import arithmetic as pa
from workbench.planning.case_plan import PLAN_COLUMNS, CasePlans, plan_table
from workbench.records.protocols import HIGH, LOW
from workbench.records.results import match_pairs
from workbench.report.theme import PRECISIONS, STYLES, system_name

GIB = 2**30
_RATES = ("usefulTFPerGPU", "meanTXGBps", "meanRXGBps", "modeledHBMGBps")
GROUP = ["mode", "precision", "category"]
_VARIANTS = (
    "origin",
    "device",
    "T",
    "D",
    "E",
    "K",
    "sharedExperts",
    "F",
    "slotFactor",
    "scratchFactor",
)


def with_series(
    table: pd.DataFrame, axes: Sequence[str] = (), by: Sequence[str] = ()
) -> pd.DataFrame:
    """The cases that have a time, with `system`, `series` and `variant`, in the legend's order and
    then by the columns `by`.

    A series is a system and, where the table holds more than one, its origin, device, shape or
    own implementation (`variantName`); `axes` names columns that a figure shows otherwise.
    """
    frame = _rate_spread(table[table["iterationMS"].notna()].copy())
    # A single layer's slot follows its scratch unless somebody chose otherwise: no difference.
    follows = frame["profile"].isna() & (frame["slotFactor"] == frame["scratchFactor"])
    shown = frame.assign(slotFactor=frame["slotFactor"].mask(follows, PACKING_SLOT_FACTOR))
    names = [n for n in _VARIANTS if n not in axes and shown[n].nunique() > 1]
    own = np.where(frame["implementation"] == frame["backend"], "", frame["implementation"])
    variants = [
        ", ".join(filter(None, [str(name), *map(_variant, names, row)]))
        for name, row in zip(own, shown[names].to_numpy(object), strict=True)
    ]
    systems = list(zip(frame["backend"], frame["pipeline"], frame["precision"], strict=True))
    numbers = {v: n for n, v in enumerate(dict.fromkeys(variants))}
    frame["system"] = pd.Series(systems, frame.index, dtype=object)
    frame["variant"] = pd.Series([numbers[v] for v in variants], frame.index, dtype=int)
    frame["variantName"] = pd.Series(variants, frame.index, dtype=str)
    told = [
        f"{system_name(s)} ({v})" if v else system_name(s)
        for s, v in zip(systems, variants, strict=True)
    ]
    frame["series"] = pd.Series(told, frame.index, dtype=str)
    rank = [list(STYLES).index(system) for system in systems]
    ordered = frame.assign(_rank=rank).sort_values(["_rank", "variant", *by], kind="stable")
    return ordered.drop(columns="_rank")


def _rate_spread(frame: pd.DataFrame) -> pd.DataFrame:
    """With p20 and p80 of the rates: amounts do not vary, so they follow from those of the time."""
    for name in _RATES:
        for end, of in ((LOW, HIGH), (HIGH, LOW)):
            if name in frame and f"iterationMS{of}" in frame:
                over = frame["iterationMS"] / frame[f"iterationMS{of}"]
                frame[f"{name}{end}"] = frame[name] * over.astype(float)
    return frame


def ratio_spread(
    frame: pd.DataFrame, name: str, over: pd.DataFrame, under: pd.DataFrame
) -> pd.DataFrame:
    """`frame` with the spread of its ratio `name`, from columns `p20` and `p80` of the times that
    are divided: the one's p20 over the other's p80, and its p80 over the other's p20."""
    low, high = over["p20"] / under["p80"], over["p80"] / under["p20"]
    return frame.assign(**{f"{name}{LOW}": low.to_numpy(), f"{name}{HIGH}": high.to_numpy()})


def extent(frame: pd.DataFrame, name: str) -> tuple[float, float]:
    """The smallest and largest value of a column, with the ends of its spread."""
    held = frame[[c for c in (name, name + LOW, name + HIGH) if c in frame]].astype(float)
    return float(held.min().min()), float(held.max().max())


def time_spread(frame: pd.DataFrame) -> pd.DataFrame:
    """`p20` and `p80` of iterationMS, NaN where they are not known."""
    names = {f"iterationMS{end}": end[1:] for end in (LOW, HIGH)}
    return frame.reindex(columns=list(names)).rename(columns=names).astype(float)


def _variant(name: str, value: Any) -> str:
    return str(value) if name in ("origin", "device") else f"{name}={value:g}"


def pairs(table: pd.DataFrame) -> pd.DataFrame:
    """Every dist_moe pipeline against mok on the same workload: `ratio` = mok time / its time;
    `fastest` marks the pipeline that stands for the pair. One row per pipeline pair."""
    best, pipelines = match_pairs(table)
    links = pd.DataFrame(pipelines, columns=["dist", "mok"])
    fastest = {(pair["dist"], pair["mok"]) for pair in best}
    frame = with_series(table, axes=["F"], by=["mode", "ep"])
    mok = frame[["id", "origin", "device", "iterationMS"]].join(time_spread(frame))
    mok = mok.rename(columns={"id": "mok", "iterationMS": "mokMS"})
    found = frame.merge(links.drop_duplicates(), left_on="id", right_on="dist")
    found = found.merge(mok, on=["mok", "origin", "device"])
    found = found.drop_duplicates(["id", "origin", "device", "mok"], ignore_index=True)
    found["ratio"] = found["mokMS"] / found["iterationMS"]
    found = ratio_spread(found, "ratio", found[["p20", "p80"]], time_spread(found))
    ids = zip(found["dist"], found["mok"], strict=True)
    found["fastest"] = pd.Series([pair in fastest for pair in ids], found.index, dtype=bool)
    several = found.loc[found["category"] == "single_layer", "F"].nunique() > 1
    labels = [workload_label(row, with_F=several) for row in found.to_dict("records")]
    found["workload"] = pd.Series(labels, found.index, dtype=str)
    return found


def workload_label(row: Mapping[Any, Any], with_F: bool = False) -> str:
    """A workload without its mode: `EP 16 BF16 i4`, `EP 16 BF16 F1536` or `EP 32 BF16 A`."""
    what = {
        "single_layer": lambda: f"i{row['imbalance']:g}" + f" F{row['F']}" * with_F,
        "width": lambda: f"F{row['F']}",
        "packing": lambda: str(row["profile"]),
    }[row["category"]]()
    return f"EP {row['ep']} {PRECISIONS.get(row['precision'], row['precision'])} {what}"


def headline(table: pd.DataFrame) -> pd.DataFrame:
    """mok time over the time of dist_moe's fastest pipeline: number of pairs, geometric mean,
    lowest and highest ratio; by mode, precision and category, and over all pairs (last rows).
    Pairs of different origin, device or shape (`variantName`) are never averaged."""
    found = pairs(table)
    found = found[found["fastest"]]
    statistics = {
        "pairs": ("ratio", "size"),
        "geometricMean": ("ratio", geometric_mean),
        "lowest": ("ratio", "min"),
        "highest": ("ratio", "max"),
    }
    keys = ["variantName", *GROUP]
    if found.empty:
        return pd.DataFrame(columns=["group", *keys, *statistics])
    found["category"] = pd.Categorical(found["category"], [*CATEGORIES, "all"])
    both = pd.concat([found, found.assign(mode="all", precision="all", category="all")])
    both["category"] = pd.Categorical(both["category"], [*CATEGORIES, "all"])
    groups = both.assign(total=both["mode"] == "all")
    groups = groups.groupby(["total", *keys], observed=True).agg(**statistics).reset_index()
    groups["category"] = groups["category"].astype(str)
    names = [
        "all pairs"
        if row.total
        else f"{row.mode} {PRECISIONS.get(row.precision, row.precision)} "
        + row.category.replace("_", " ")
        for row in groups.itertuples()
    ]
    variants = [f" ({name})" if name else "" for name in groups["variantName"]]
    groups.insert(0, "group", [n + v for n, v in zip(names, variants, strict=True)])
    return groups.drop(columns="total")


def geometric_mean(values: "pd.Series[float]") -> float:
    """exp of the mean log; values are positive."""
    return float(np.exp(np.log(values).mean()))


def single_layer(table: pd.DataFrame) -> pd.DataFrame:
    """One-layer cases over imbalance. `slowdown` = time over the same system's and workload's time
    at imbalance 1 (NaN where that was not measured)."""
    frame = with_series(table[table["category"] == "single_layer"], by=["mode", "ep", "imbalance"])
    keys = ["series", "mode", "ep", "F"]
    balanced = frame[frame["imbalance"] == 1].drop_duplicates(keys).set_index(keys)
    base = balanced.reindex(pd.MultiIndex.from_frame(frame[keys]))
    frame["slowdown"] = frame["iterationMS"].to_numpy(float) / base["iterationMS"].to_numpy(float)
    mine, even = (time_spread(f).reset_index(drop=True) for f in (frame, base))
    found = ratio_spread(frame, "slowdown", mine, even)
    itself = (frame["imbalance"] == 1).to_numpy()  # 1 by definition, not measured
    found.loc[itself, [f"slowdown{LOW}", f"slowdown{HIGH}"]] = np.nan
    return found


def balanced(table: pd.DataFrame) -> pd.DataFrame:
    """One-layer cases at imbalance 1."""
    found = table[(table["category"] == "single_layer") & (table["imbalance"] == 1)]
    return with_series(found, by=["mode", "ep"])


def width(table: pd.DataFrame) -> pd.DataFrame:
    """Cases over the expert width F."""
    found = table[table["category"] == "width"]
    return with_series(found, axes=["F"], by=["mode", "ep", "F"])


def packing(table: pd.DataFrame) -> pd.DataFrame:
    """Cases over several layers."""
    return with_series(table[table["category"] == "packing"], by=["mode", "ep", "profile"])


def packing_plan(table: pd.DataFrame) -> pd.DataFrame:
    """`packing` with the columns of `plan_table`, and `scratchUsedBytes`: what the largest layer
    takes of dist_moe's scratch on the busiest rank. NaN where no plan applies or the published
    system would refuse the shape."""
    frame = packing(table)
    try:
        plan = plan_table(frame)
    except ValueError:  # one refused shape refuses the table
        plans = [_plan_or_nan(frame.iloc[[n]]) for n in range(len(frame))]
        plan = pd.concat(plans)
    known = plan["scratchBytes"].notna()
    cases = frame[known]
    used = pa.scratch_bytes(
        cases["D"],
        cases["F"],
        plan.loc[known, "busiestPaddedRows"].astype(int),
        cases["precision"] == "mxfp8",
        cases["pipeline"] == "mega",
        cases["mode"] == "inference",
    )
    plan["scratchUsedBytes"] = pd.Series(used, cases.index, dtype=float)
    return pd.concat([frame, plan], axis=1)


def _plan_or_nan(case: pd.DataFrame) -> pd.DataFrame:
    try:
        return plan_table(case)
    except ValueError:
        return pd.DataFrame(np.nan, index=case.index, columns=list(PLAN_COLUMNS))


def packing_layers(table: pd.DataFrame) -> pd.DataFrame:
    """Load of rank 0 by layer, for each distinct workload of several layers.

    `rows` routed to it; `scheduledRows` of mok (each expert padded to 256), of which it keeps at
    most `retainedRows` and replays `replayedRows`; `scratchRows` balanced rows that dist_moe's
    scratch takes. NaN where the table has no case of that system.
    """
    found = table[(table["category"] == "packing") & table["iterationMS"].notna()]
    keys = ["mode", "ep", "profile", "factors", "T", "K", "E"]
    told = [name for name in ("mode", "T", "K", "E") if found[name].nunique() > 1]
    names = [
        "workload",
        *keys[:3],
        "layer",
        "factor",
        "rows",
        "scheduledRows",
        "retainedRows",
        "replayedRows",
        "scratchRows",
    ]
    layers = [pd.DataFrame(columns=names)]
    for _, cases in found.groupby(keys, sort=True, dropna=False):
        mok, dist = (cases[cases["backend"] == name] for name in ("mok", "dist_moe"))
        row = cases.iloc[0]
        plans = CasePlans(table=(mok if len(mok) else cases).iloc[[0]])
        frame = pd.DataFrame({"layer": np.arange(1, row["layers"] + 1), "factor": row["factors"]})
        frame[keys[:3]] = row["mode"], row["ep"], row["profile"]
        label = [f"EP {row['ep']}, profile {row['profile']}", *(f"{n} {row[n]}" for n in told)]
        frame["workload"] = ", ".join(label)
        frame["rows"] = plans.rows.rank0[0]
        if len(mok):
            frame["scheduledRows"] = plans.padded(plans.rows.rank0)[0]
            frame["retainedRows"] = plans.retained_rows[0]
            frame["replayedRows"] = plans.replay_rows[0]
        if len(dist):
            frame["scratchRows"] = row["T"] * row["K"] * dist["scratchFactor"].min()
        layers.append(frame.reindex(columns=names))
    return pd.concat(layers[1:] or layers, ignore_index=True)


def on_device(table: pd.DataFrame, name: str, path: str | None = None) -> pd.DataFrame:
    """The cases whose `device` is the one called `name` in the hardware file."""
    matched = {device: _matched(device, path) for device in table["device"].unique()}
    return table[table["device"].map(matched) == name]


def _matched(device: str, path: str | None) -> str:
    try:
        return match_device(device, path)
    except InputError:  # no peaks are known for it
        return ""


def roofline(table: pd.DataFrame, hardware: Hardware) -> pd.DataFrame:
    """Where each case stands against the peaks of `hardware`: `intensity` [FLOP/B], `TFLOPs`
    reached, and the floors of `roofline_table`. Raises InputError for a precision without peak."""
    frame = with_series(table, axes=["F"])
    cost, floors = cost_table(frame), roofline_table(frame, hardware)
    found = {
        "intensity": cost["usefulFLOP"] / cost["modeledHBMBytes"],
        "TFLOPs": cost["usefulFLOP"] / (frame["iterationMS"] * 1e9),
    }
    for end, of in ((LOW, HIGH), (HIGH, LOW)):
        if f"iterationMS{of}" in frame:
            found[f"TFLOPs{end}"] = cost["usefulFLOP"] / (frame[f"iterationMS{of}"] * 1e9)
    return pd.concat([frame, pd.DataFrame(found, index=frame.index), floors], axis=1)


def rates(table: pd.DataFrame) -> pd.DataFrame:
    """Link and HBM rates in GB/s. `modeledTXGBps` is the wire model's bytes over the time, and
    `wireRatio` the measured mean TX over that."""
    frame = with_series(table, axes=["F"], by=["mode", "ep", "imbalance"])
    modelled = cost_table(frame)["wireBytes"] / (frame["iterationMS"] * 1e6)
    ratio = frame["meanTXGBps"] / modelled.where(modelled > 0)
    return frame.assign(modeledTXGBps=modelled, wireRatio=ratio)


def key_numbers(table: pd.DataFrame) -> list[tuple[str, str]]:
    """(number, what it is) for the head of a report, as far as the selection has them."""
    found = []
    groups = headline(table)
    for row in groups[groups["mode"] == "all"].itertuples():
        words = f"mok time over dist_moe time, geometric mean of {row.pairs} pairs"
        words += f", {row.variantName}" if row.variantName else ""
        span = f"{row.lowest:.3f} to {row.highest:.3f}"
        found.append((f"{row.geometricMean:.3f}", f"{words} ({span})"))
    even = table[(table["category"] != "packing") & (table["imbalance"] == 1)]
    for precision, rows in with_series(even, axes=["F"]).groupby("precision"):
        rates_known = rows["usefulTFPerGPU"].dropna()
        if len(rates_known):
            best = rows.loc[rates_known.idxmax()]
            where = f"{best['backend']} {best['pipeline']}, {best['mode']}, EP {best['ep']}"
            what = f"useful TFLOP/s per GPU, best {PRECISIONS.get(str(precision), precision)} case"
            found.append((f"{rates_known.max():,.0f}", f"{what} ({where}, F {best['F']})"))
    slow = single_layer(table)
    worst = slow[(slow["imbalance"] == slow["imbalance"].max()) & slow["slowdown"].notna()]
    if len(worst) and worst["imbalance"].iloc[0] > 1:
        span = f"{worst['slowdown'].min():.1f} to {worst['slowdown'].max():.1f}"
        found.append((span, f"times the balanced time at imbalance {worst['imbalance'].iloc[0]:g}"))
    return found
