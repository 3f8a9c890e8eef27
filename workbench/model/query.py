"""Cases to predict from what a command line says: ids, and fields with one or several values."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import TypeAdapter, ValidationError
from rich import box
from rich.console import Console
from rich.table import Table

from workbench.case import CATEGORIES, STUDY_SHAPE, Case, parse_id
from workbench.errors import InputError
from workbench.hardware import Hardware, known_devices, load_hardware
from workbench.model.calibration import Calibration
from workbench.systems import MODES, PIPELINES, SYSTEMS, TRIPLES

_KINDS: Mapping[str, Any] = {
    field.name: field.type for field in fields(Case) if field.name not in ("layers", "factors")
}
_KNOWN: Mapping[str, Sequence[str]] = {
    "backend": list(PIPELINES),
    "mode": MODES,
    "precision": list(dict.fromkeys(precision for _, _, precision in TRIPLES)),
    "pipeline": list(SYSTEMS),
    "category": CATEGORIES,
}
"""Fields that take one of a few words; another word is no point of a grid but a slip."""
SHOWN = (
    "id",
    "T",
    "D",
    "E",
    "K",
    "iterationMS",
    "runs",
    "iterationLowMS",
    "iterationHighMS",
    "busiestBinds",
    "peakAllocatedGiB",
    "forwardMS",
    "backwardMS",
    "extrapolation",
)
"""Columns that `workbench predict` prints for people, those first that are never left out."""
ALWAYS = 7
WORDS = 14
"""Width of a column of words, at the least."""


def points_of(ids: Iterable[str], given: Iterable[str]) -> list[dict[str, Any]]:
    """The fields that are stated of each id, or without ids of one case, with those of `given`:
    NAME=VALUE[,VALUE...]. Several values of fields give their product. Raises InputError.
    """
    values: dict[str, list[Any]] = {}
    for text in given:
        name, sign, listed = text.partition("=")
        if not sign or name not in _KINDS:
            raise InputError(f"{text!r} must be NAME=VALUE with one of {', '.join(_KINDS)}")
        values.setdefault(name, []).extend(_value(name, part) for part in listed.split(","))
    bases = [parse_id(text) for text in ids] or [{}]
    return [
        base | dict(zip(values, point, strict=True))
        for base in bases
        for point in product(*values.values())
    ]


def cases_of(ids: Iterable[str], given: Iterable[str]) -> list[Case]:
    """The cases of `points_of`. Without a backend or precision the pipeline's is taken if it has
    only one; a profile makes a packing case. Raises InputError where one is impossible."""
    return [_case(point) for point in points_of(ids, given)]


def predict_points(
    calibration: Calibration, points: Sequence[dict[str, Any]], device: Hardware | None
) -> pd.DataFrame:
    """`Calibration.predict` of stated points, in their order. One that is no case keeps its fields
    and says why in `runs`, after the word `case`. Raises InputError where none is a case."""
    cases, refused = {}, {}
    for n, point in enumerate(points):
        try:
            cases[n] = _case(point)
        except InputError as error:
            said = " ".join(f"{name}={value}" for name, value in point.items())
            refused[n] = {**STUDY_SHAPE, "id": said, **point, "runs": f"case: {error}"}
            if len(points) == 1:
                raise
    if not cases:
        raise InputError(f"none of {len(points)} combinations is a case: {refused[0]['runs'][6:]}")
    found = calibration.predict(list(cases.values()), device).set_axis(list(cases))
    if not refused:
        return found
    plain = found.astype(dict.fromkeys(found.select_dtypes("category"), object))
    return pd.concat([plain, pd.DataFrame.from_dict(refused, "index")]).sort_index()


def query_device(name: str, file: Path | None) -> Hardware | None:
    """The device to predict for: `name`, in `file` if one is given, where a single device needs no
    name; None for the calibrated one."""
    if not name and file is not None:
        known = known_devices(file)
        if len(known) > 1:
            raise InputError(f"device= must be given, one of {', '.join(known)} ({file})")
        name = known[0]
    return load_hardware(name, file) if name else None


def _value(name: str, text: str) -> Any:
    kind = str if name == "profile" else _KINDS[name]
    try:
        found = TypeAdapter(kind).validate_python(text.strip())
    except ValidationError:
        raise InputError(f"{name}={text!r} must be {kind.__name__}") from None
    if name in _KNOWN and found not in _KNOWN[name]:
        raise InputError(f"{name}={text.strip()!r} must be one of {', '.join(_KNOWN[name])}")
    return found


def _case(point: dict[str, Any]) -> Case:
    stated = dict(point)
    pipeline = stated.get("pipeline")
    system = SYSTEMS.get(str(pipeline))
    if system is not None:
        own = stated.setdefault("backend", system.backend) == system.backend
        if own and len(system.precisions) == 1:
            stated.setdefault("precision", *system.precisions)
    if stated.get("profile") is not None:
        stated["category"] = "packing"
    missing = [
        name for name in ("backend", "mode", "ep", "precision", "pipeline") if name not in stated
    ]
    if missing:
        raise InputError(f"{', '.join(missing)} must be given, by an id or as NAME=VALUE")
    return Case(**stated)


def print_predictions(frame: pd.DataFrame) -> None:
    """Prints predictions as a table that fits the terminal, and names the columns left out."""
    console = Console()
    width = console.width if console.is_terminal or "COLUMNS" in os.environ else 200
    table, left_out = fitting(frame, width)
    Console(width=width).print(table)
    if left_out:
        print(f"not shown: {', '.join(left_out)} (a wider terminal, or --json)")


def fitting(frame: pd.DataFrame, width: int) -> tuple[Table, list[str]]:
    """SHOWN as a table of at most `width` characters, ids whole, and the columns left out: those
    that fit, after the first ALWAYS. Where these do not, ids are folded."""
    rows = [[_shown(v) for v in row] for row in frame[list(SHOWN)].itertuples(index=False)]
    widths = {
        name: WORDS if name in ("runs", "extrapolation") else max(map(len, (name, *cells)))
        for name, cells in zip(SHOWN, zip(*rows, strict=True), strict=True)
    }
    names = list(SHOWN[:ALWAYS])
    for name in SHOWN[ALWAYS:]:
        if sum(widths[n] + 1 for n in (*names, name)) <= width + 1:
            names.append(name)
    spare = width + 1 - sum(widths[n] + 1 for n in names)
    if spare < 0:
        widths["id"] = max(widths["id"] + spare, WORDS)
    wordy = [name for name in ("runs", "extrapolation") if name in names]
    for name in wordy:
        widths[name] += max(spare, 0) // len(wordy)
    # without padding, as rich takes it off a width that is given
    table = Table(box=box.SIMPLE, show_edge=False, padding=0)
    for name in names:
        table.add_column(name, overflow="fold", width=widths[name])
    for row in rows:
        table.add_row(*(cell for name, cell in zip(SHOWN, row, strict=True) if name in names))
    return table, [name for name in SHOWN if name not in names]


def _shown(value: Any) -> str:
    if value is None or value != value:
        return ""
    number = isinstance(value, float) and not value.is_integer()
    return f"{value:,.4g}" if number else str(int(value) if isinstance(value, float) else value)


def records(predicted: pd.DataFrame) -> str:
    """A prediction as JSON: a list of objects, null where there is no value."""
    return str(predicted.to_json(orient="records", double_precision=6))
