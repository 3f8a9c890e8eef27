"""Result files and records as one pandas table, and back.

A table has one row per case: the published file's field names as columns, then the shape (T, D,
E, K, sharedExperts), `factors` (a tuple, one imbalance factor per layer), slotFactor and
scratchFactor, `origin`, `implementation`, `device`, then `protocol` (how it was measured, in words)
and p20 and p80 over windows of each time (`iterationMS_p20` ...), where a record has them. A field
the schema does not know is kept in the row's `extra`. `table.attrs["source"]` is the file it came
from.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.case import Case
from workbench.errors import InputError
from workbench.files import parse_json, read_file, write_atomic
from workbench.records.protocols import TIME_SPREAD, file_protocol, own_protocol, time_spread
from workbench.records.schema import (
    METRICS,
    SHAPE,
    OwnRecord,
    Record,
    ResultFile,
    parse_results,
    validate,
)

REFERENCE = Path(str(resources.files("workbench") / "data" / "gb300-2026-10-16.json"))
"""The published GB300 study of 2026-10-16, unchanged."""

WORKLOAD = ("mode", "ep", "precision", "category", "F", "factors", *SHAPE)
"""Columns that make two systems' cases the same workload."""

_FIELDS = Record.model_fields
_TEXT = ("profile", "sharedSchedule", "status", "reason")
_DTYPES = {
    **dict.fromkeys(METRICS, "float64"),
    **dict.fromkeys(_TEXT, "str"),
    "peakReservedBytes": "Int64",
    "fastMath": "boolean",
    "noisy": "boolean",
    **dict.fromkeys(TIME_SPREAD, "float64"),
}
_DERIVED = ("factors", "slotFactor", "scratchFactor", "extra")


@dataclass(frozen=True, eq=False)
class Source:
    """A result file as written; what it says beyond its cases goes into an export."""

    path: Path
    document: dict[str, Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Source":
        return self  # pandas deep-copies attrs whenever a column is taken


def load_table(path: str | Path = REFERENCE) -> pd.DataFrame:
    """The table of a result file, of one record file, or of a folder with records below it.

    Raises InputError naming file, place and rule.
    """
    path = Path(path)
    if os.path.isdir(path):  # False for a name that no file system takes
        tables = [load_table(file) for file in sorted(path.rglob("*.record.json"))]
        if not tables:
            raise InputError(f"{path}: holds no *.record.json")
        return concat(tables)
    text = read_file(path)
    if path.name.endswith(".record.json"):
        record = validate(OwnRecord, parse_json(text, path), path)
        try:
            return _table([record], [record.case()], {"hardware": record.device})
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
    document, file, cases = parse_results(text, path)
    table = _table(file.cases, cases, document["meta"])
    table.attrs["source"] = Source(path, document)
    return table


def concat(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """Tables below one another; what their files said beyond the cases is not carried over."""
    joined = pd.concat(tables, ignore_index=True)
    joined.attrs = {}
    return joined


def match_pairs(table: pd.DataFrame) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(`pairs`, `allPipelinePairs`) of a table: per mok case the dist_moe cases with the same
    workload, origin and device; `dist` is the one with the smallest iterationMS."""
    keys = [*WORKLOAD, "origin", "device"]
    timed = table[table["iterationMS"].notna()]
    groups = dict(iter(timed[timed.backend == "dist_moe"].groupby(keys, sort=False)))
    pairs, pipelines = [], []
    for mok, *key in timed.loc[timed.backend == "mok", ["id", *keys]].itertuples(index=False):
        group = groups.get(tuple(key))
        if group is None:
            continue
        ids = group["id"].tolist()
        best = group["id"][group["iterationMS"].idxmin()]
        pairs.append({"dist": best, "mok": mok, "allDistPipelines": ids})
        pipelines += [{"dist": name, "mok": mok} for name in ids]
    return pairs, pipelines


def to_document(table: pd.DataFrame) -> dict[str, Any]:
    """A table, or any selection of its rows, as the content of a result file.

    Counts in `meta` and the pairs are those of the selection. Raises InputError on duplicate ids.
    """
    held = table.attrs.get("source")
    source = held.document if held else {}
    meta = source.get("meta") or _meta(table)
    cases = [_case(row, meta) for row in _rows(table)]
    twice = [name for name, n in Counter(case["id"] for case in cases).items() if n > 1]
    if twice:
        raise InputError(f"id={twice[0]!r} must not occur twice in one result file")
    pairs, pipelines = match_pairs(table)
    counts = {
        "acceptedExecutions": len(cases),
        "rankTraces": int(table["ep"].sum()),
        "matchedWorkloads": len(pairs),
        "distPipelinePairs": len(pipelines),
    }
    return {
        **source,
        "meta": {**meta, **counts},
        "cases": cases,
        "pairs": _with_extras(pairs, source.get("pairs", [])),
        "allPipelinePairs": _with_extras(pipelines, source.get("allPipelinePairs", [])),
    }


def export_results(table: pd.DataFrame, path: str | Path) -> None:
    """Write a table as a result file with the reference set's four keys, whole or not at all."""
    path = Path(path)
    document = to_document(table)
    validate(ResultFile, document, path)
    write_atomic(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def _table(records: Sequence[Record], cases: list[Case], meta: dict[str, Any]) -> pd.DataFrame:
    rows = []
    for record, case in zip(records, cases, strict=True):
        row = {name: getattr(record, name) for name in _FIELDS}
        row |= {name: getattr(case, name) for name in (*SHAPE, *_DERIVED[:-1])}
        row["extra"] = record.model_extra or {}
        row |= time_spread(record.samples)
        row["protocol"] = own_protocol(record.provenance)
        if record.origin in (None, "published"):
            row["protocol"] = row["protocol"] or file_protocol(meta)
        row["origin"] = record.origin or "published"
        row["implementation"] = record.implementation or record.backend
        row["device"] = record.device or meta["hardware"]
        rows.append(row)
    table = pd.DataFrame(rows, columns=[*_FIELDS, *_DERIVED, "protocol", *TIME_SPREAD])
    return table.astype(_DTYPES)


def _rows(table: pd.DataFrame) -> Iterator[dict[str, Any]]:
    for values in table.itertuples(index=False, name=None):
        row = dict(zip(table.columns, values, strict=True))
        yield {
            k: None if _missing(v) else getattr(v, "item", lambda v=v: v)() for k, v in row.items()
        }


def _missing(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and value != value)


def _case(row: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
    implied = {name: meta[name] for name in SHAPE} | {
        "origin": "published",
        "implementation": row["backend"],
        "device": meta["hardware"],
    }
    case = {
        name: row[name]
        for name, field in _FIELDS.items()
        if field.is_required() or (row[name] is not None and row[name] != implied.get(name))
    }
    return case | (row["extra"] or {})


def _meta(table: pd.DataFrame) -> dict[str, Any]:
    if table.empty:
        raise InputError("a result file needs at least one case")
    first = table.iloc[0]
    packing = table[table["profile"].notna()]
    return {
        "hardware": first["device"],
        **{name: int(first[name]) for name in SHAPE},
        "F": int(table["F"].mode()[0]),
        "profiles": {
            p: list(f) for p, f in zip(packing["profile"], packing["factors"], strict=True)
        },
    }


def _with_extras(pairs: list[dict[str, Any]], known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Carry over what a file said of a pair beyond the ids."""
    said = {(pair["dist"], pair["mok"]): pair for pair in known}
    return [{**said.get((pair["dist"], pair["mok"]), {}), **pair} for pair in pairs]
