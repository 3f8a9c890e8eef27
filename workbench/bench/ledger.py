"""What kernels took on a GPU: one small file per run of the bench, kept in git.

A file in `outputs/gpu` is an `Entry`. Those of a simulated device are there to rehearse: they hold
no measurement, have a name of their own, are not kept in git, and no table shows them as measured.
"""

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from workbench.errors import InputError
from workbench.files import read_json, write_atomic
from workbench.hardware import match_device
from workbench.records.schema import fault

SIMULATED = "simulated"
NOT_RUN = "not run on a GPU"
Positive = Annotated[FiniteFloat, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class KernelTime(_Line):
    """One op. `values_passed`: its results are those of its torch twin, `error` the largest
    relative norm of a difference. Without a time, `reason` says why. `fraction_of_floor` is floor
    over time, at most 1 unless the caches held what the floor counts as read from memory."""

    op: str
    values_passed: bool
    error: FiniteFloat | None = None
    reason: str = ""
    method: str = ""
    time_us: Positive | None = None
    floor_us: Positive | None = None
    bound_by: str = ""
    fraction_of_floor: Positive | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.time_us is None and not self.reason:
            raise ValueError(f"{self.op}: must have a time or a reason")
        if self.time_us is not None and not self.values_passed:
            raise ValueError(f"{self.op}: must have no time, as its values are wrong")
        if (self.fraction_of_floor is None) != (self.time_us is None or self.floor_us is None):
            raise ValueError(f"{self.op}: fraction_of_floor must be there with a time and a floor")
        if self.fraction_of_floor and self.time_us and self.floor_us:
            wanted = self.floor_us / self.time_us
            if abs(self.fraction_of_floor / wanted - 1) > 1e-3:
                raise ValueError(f"{self.op}: fraction_of_floor must be {wanted:.4g}")
        return self


class PeerTime(_Line):
    """What else does the work of an op: torch's grouped product, cuBLAS."""

    name: str
    op: str
    time_us: Positive | None = None
    reason: str = ""


class LedgerSizes(_Line):
    """The sizes that were asked for; the bench runs one rank of them alone."""

    T: Count
    D: Count
    F: Count
    E: Count
    K: Count
    ep: Count
    dtype: str = "bfloat16"


class Entry(_Line):
    """One run. `device` is what the driver calls it; `git` the commit, and whether files differ
    from it; `when` the time in UTC."""

    origin: Literal["measured", "simulated"]
    device: str
    driver: str
    versions: dict[str, str]
    git: dict[str, str | bool] | None
    when: str
    sizes: LedgerSizes
    kernels: list[KernelTime]
    peers: list[PeerTime]

    @model_validator(mode="after")
    def _is_one_run(self) -> Self:
        if (self.device == SIMULATED) != (self.origin == "simulated"):
            raise ValueError(f"origin={self.origin} must be simulated for device simulated alone")
        names = [kernel.op for kernel in self.kernels]
        if len(set(names)) < len(names):
            raise ValueError("kernels: an op must not be there twice")
        if datetime.fromisoformat(self.when).tzinfo is None:
            raise ValueError(f"when={self.when} must say its time zone")
        return self

    @property
    def hardware(self) -> str:
        """Its name in hardware.toml; "" where it has none."""
        try:
            return match_device(self.device)
        except InputError:
            return ""

    def kernel(self, op: str) -> KernelTime | None:
        return next((kernel for kernel in self.kernels if kernel.op == op), None)

    def peer(self, name: str) -> PeerTime | None:
        return next((peer for peer in self.peers if peer.name == name), None)


def ledger_dir() -> Path:
    """`outputs/gpu` of the checkout that the working directory lies in, else of that directory."""
    here = Path.cwd()
    checkouts = (f for f in (here, *here.parents) if {"notebooks", "outputs"} <= _names(f))
    return next(checkouts, here) / "outputs" / "gpu"


def write_entry(entry: Entry, folder: Path | None = None) -> Path:
    """A file of its own, named by time and device. Raises InputError where it cannot be written."""
    folder = folder or ledger_dir()
    device = re.sub(r"[^a-z0-9]+", "-", entry.device.lower()).strip("-")
    when = datetime.fromisoformat(entry.when).astimezone(UTC)
    path = folder / f"{when:%Y%m%d-%H%M%S}-{device}.json"
    write_atomic(path, entry.model_dump_json(indent=1) + "\n")
    return path


def read_entry(path: Path) -> Entry:
    """Raises InputError with file, place and rule."""
    content = read_json(path)
    try:
        return Entry.model_validate(content)
    except ValidationError as error:
        raise fault(error, path) from None


def read_entries(folder: Path | None = None) -> list[Entry]:
    """All of a folder, the newest first; none where there is no folder."""
    folder = folder or ledger_dir()
    found = [read_entry(path) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda entry: datetime.fromisoformat(entry.when), reverse=True)


def newest(entries: Iterable[Entry], hardware: str, origin: str = "measured") -> Entry | None:
    """The latest of a device of hardware.toml; with origin simulated, of no device at all."""
    for entry in entries:
        if entry.origin == origin and (origin == "simulated" or entry.hardware == hardware):
            return entry
    return None


def run_text(entries: Sequence[Entry], hardware: str, op: str, sizes: Any) -> str:
    """What the kernel tables say of an op on a device: its measured time, or that there is none."""
    entry = newest(entries, hardware)
    if entry is None:
        return NOT_RUN
    dtype = str(sizes.dtype).removeprefix("torch.")
    asked = LedgerSizes(**{n: getattr(sizes, n) for n in "TDFEK"}, ep=sizes.ep, dtype=dtype)
    if entry.sizes != asked:
        return "not run at these sizes"
    kernel = entry.kernel(op)
    if kernel is None:
        return NOT_RUN
    if kernel.time_us is None:
        return f"not timed: {kernel.reason}"
    share = kernel.fraction_of_floor
    told = f"{kernel.time_us:,.1f} us" + (f", {share:.0%} of its floor" if share else "")
    return f"{told} ({entry.when[:10]})"


COLUMNS = ("op", "values", "time us", "floor us", "of floor", "bound by", "method", "note")


def kernel_lines(entry: Entry) -> list[tuple[str, ...]]:
    """COLUMNS of each op and each peer, as text."""
    lines: list[tuple[str, ...]] = []
    for k in entry.kernels:
        right = "as its twin" if k.values_passed else "WRONG" if k.error is not None else "-"
        share = "-" if k.fraction_of_floor is None else f"{k.fraction_of_floor:.0%}"
        numbers = (_us(k.time_us), _us(k.floor_us), share)
        lines.append((k.op, right, *numbers, k.bound_by, k.method, k.reason))
    for p in entry.peers:
        ours = entry.kernel(p.op)
        note = p.reason
        if p.time_us and ours and ours.time_us:
            note = f"{p.op} runs at {p.time_us / ours.time_us:.2f} of its rate"
        lines.append((p.name, "-", _us(p.time_us), "-", "-", "", "", note))
    return lines


def title(entry: Entry) -> str:
    """What the lines of an entry stand under: no simulated one can be taken for a measurement."""
    s = entry.sizes
    shape = f"T={s.T} D={s.D} F={s.F} E={s.E} K={s.K} ep={s.ep} {s.dtype}, one rank"
    if entry.origin == "simulated":
        return f"SIMULATED, no measurement ({entry.when}); {shape}"
    commit = str((entry.git or {}).get("commit", "unknown"))[:9]
    return f"measured on {entry.device}, driver {entry.driver}, {entry.when}, {commit}; {shape}"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _names(folder: Path) -> set[str]:
    return {name for name in ("notebooks", "outputs") if (folder / name).is_dir()}
