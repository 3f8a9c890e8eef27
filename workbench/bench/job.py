"""What a sweep's processes are told: the protocol, the settings, the cases, and where things lie.

Imports no torch: the driver that starts the ranks needs none.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from workbench.case import Case
from workbench.errors import InputError
from workbench.files import read_json, write_atomic
from workbench.records.schema import fault

LOST, HUNG, UNWRITABLE = 3, 124, 74
"""Exit codes of a worker: a peer is lost; a case took too long; a record cannot be written."""


@dataclass(frozen=True, kw_only=True)
class TimingProtocol:
    """How a case is timed; the defaults are those of the published GB300 study (2026-10-16).

    `graphs` and `flush_l2` apply on a GPU only; a record says what was done. Raises InputError.
    """

    warmups: int = 10
    windows: int = 5
    iterations: int = 30
    graphs: bool = True
    flush_l2: bool = True

    def __post_init__(self) -> None:
        for name, least in (("warmups", 0), ("windows", 1), ("iterations", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name}={value} must be an integer of at least {least}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the cases of a sweep are measured. `device` is a kind (`workbench.runtime`); `domain` how
    ranks that reach each other's memory are found (`workbench.domain.OVERRIDES`); `trace_dir` is
    where each rank's trace of one iteration goes, empty for none; `timeout_s` how long a rank
    waits."""

    protocol: TimingProtocol = TimingProtocol()
    seed: int = 0
    device: str = "cpu"
    dtype: str = "bfloat16"
    domain: str = "auto"
    timeout_s: float = 120.0
    trace_dir: str = ""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Cases of one EP degree for one start of the ranks. `limit_s` is the time a case may take.

    `turn` is the place of these ranks among those that take turns case by case, of `turns`.
    """

    name: str
    cases: tuple[Case, ...]
    settings: Settings
    limit_s: float
    turn: int = 0
    turns: int = 1
    turn_file: str = ""

    @property
    def ep(self) -> int:
        return self.cases[0].ep

    def write(self, folder: Path) -> Path:
        path = folder / "jobs" / f"{self.name}.json"
        write_atomic(path, json.dumps(asdict(self), indent=1) + "\n")
        return path


def read_job(path: Path) -> Job:
    """The job that `Job.write` wrote. Raises InputError."""
    return as_dataclass(Job, read_json(path), path)


T = TypeVar("T")


def as_dataclass(kind: type[T], content: Any, path: Path) -> T:
    """What `asdict` and JSON made of a `kind`, checked. Raises InputError with file and place."""
    try:
        return TypeAdapter(kind).validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        raise fault(error, path) from None


class Folder:
    """Where a sweep's files lie, below `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records, self.logs = path / "records", path / "logs"
        self.state, self.events = path / "sweep.json", path / "events.jsonl"
        self.lock, self.ranks_lock = path / ".driver.lock", path / ".ranks.lock"

    def record(self, case: Case) -> Path:
        return self.records / f"{case.id}.record.json"

    def log(self, job: str, rank: int) -> Path:
        return self.logs / f"{job}.rank{rank}.log"
