"""Records of this project's own measurements: made, written and read one file per case."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.case import PROFILES, Case
from workbench.errors import InputError
from workbench.files import parse_json, read_json, write_atomic
from workbench.records.schema import SHAPE, OwnRecord, validate


def make_record(
    case: Case, device: str, found: Mapping[str, Any], provenance: Mapping[str, Any]
) -> OwnRecord:
    """A case's own record: `found` supplies what was measured, the rest stays null."""
    missing = (
        "iterationMS",
        "forwardMS",
        "backwardMS",
        "usefulTFPerGPU",
        "meanTXGBps",
        "meanRXGBps",
        "modeledHBMGBps",
        "peakAllocatedGiB",
        "peakReservedBytes",
        "fastMath",
        "sharedSchedule",
    )
    names = (
        "id",
        "backend",
        "mode",
        "ep",
        "precision",
        "pipeline",
        "category",
        "F",
        "imbalance",
        "profile",
        "layers",
        *SHAPE,
    )
    own = case.profile is not None and PROFILES.get(case.profile) != case.factors
    return OwnRecord.model_validate(
        dict.fromkeys(missing)
        | {name: getattr(case, name) for name in names}
        | {"origin": "measured", "implementation": "workbench", "device": device, "status": "ok"}
        | ({"factors": list(case.factors)} if own else {})
        | dict(found)
        | {"provenance": dict(provenance)}
    )


def write_record(record: OwnRecord, path: Path) -> None:
    """Whole or not at all, and only what reads back. Raises InputError."""
    content = record.model_dump_json(exclude_unset=True) + "\n"
    validate(OwnRecord, parse_json(content, path), path).case()
    write_atomic(path, content)


def read_record(path: Path) -> OwnRecord:
    """A record of its own, checked, its case too. Raises InputError naming file, place and rule."""
    record = validate(OwnRecord, read_json(path), path)
    try:
        named = record.case().id
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if path.name != f"{named}.record.json":
        raise InputError(f"{path}: id={named!r} must be the name of the file")
    return record
