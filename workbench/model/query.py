"""Cases to predict from what a command line says: ids, and fields with one or several values."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import product
from typing import Any

import pandas as pd
from pydantic import TypeAdapter, ValidationError

from workbench.case import PIPELINES, Case, parse_id
from workbench.errors import InputError

_KINDS: Mapping[str, Any] = {
    field.name: field.type for field in fields(Case) if field.name not in ("layers", "factors")
}
SHOWN = ("id", "runs", "iterationMS", "iterationLowMS", "iterationHighMS", "forwardMS",
         "backwardMS", "busiestBinds", "peakAllocatedGiB", "extrapolation")  # fmt: skip
"""Columns that `workbench predict` prints for people."""


def cases_of(ids: Iterable[str], given: Iterable[str]) -> list[Case]:
    """Each id, or without ids one case, with the fields of `given`: NAME=VALUE[,VALUE...].

    Several values of fields give their product. Without a backend or precision the pipeline's is
    taken if it has only one; a profile makes a packing case. Raises InputError.
    """
    values: dict[str, list[Any]] = {}
    for text in given:
        name, sign, listed = text.partition("=")
        if not sign or name not in _KINDS:
            raise InputError(f"{text!r} must be NAME=VALUE with one of {', '.join(_KINDS)}")
        values.setdefault(name, []).extend(_value(name, part) for part in listed.split(","))
    bases = [parse_id(text) for text in ids] or [{}]
    return [
        _case(base | dict(zip(values, point, strict=True)))
        for base in bases
        for point in product(*values.values())
    ]


def _value(name: str, text: str) -> Any:
    kind = str if name == "profile" else _KINDS[name]
    try:
        return TypeAdapter(kind).validate_python(text.strip())
    except ValidationError:
        raise InputError(f"{name}={text!r} must be {kind.__name__}") from None


def _case(stated: dict[str, Any]) -> Case:
    pipeline = stated.get("pipeline")
    owners = [backend for backend, known in PIPELINES.items() if pipeline in known]
    if len(owners) == 1:
        backend = stated.setdefault("backend", owners[0])
        precisions = PIPELINES.get(backend, {}).get(str(pipeline), ())
        if len(precisions) == 1:
            stated.setdefault("precision", precisions[0])
    if stated.get("profile") is not None:
        stated["category"] = "packing"
    missing = [name for name in ("backend", "mode", "ep", "precision", "pipeline")
               if name not in stated]  # fmt: skip
    if missing:
        raise InputError(f"{', '.join(missing)} must be given, by an id or as NAME=VALUE")
    return Case(**stated)


def records(predicted: pd.DataFrame) -> str:
    """A prediction as JSON: a list of objects, null where there is no value."""
    return str(predicted.to_json(orient="records", double_precision=6))
