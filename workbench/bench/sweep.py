"""A sweep: the cases of a matrix measured one after the other, into a folder that can be resumed.

`sweep.json` says what is measured and how, `records/` has one file per finished case, `logs/` what
each rank said, `events.jsonl` when cases started and ended. Whatever ends a sweep, a finished case
keeps its record and `resume` goes on with the others, and tries those again that failed.
"""

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import workbench
from workbench.bench.doctor import cuda_problem
from workbench.bench.job import Folder, Job, Settings, as_dataclass
from workbench.bench.launch import Ended, Hosts, JobRun, run_jobs
from workbench.bench.machine import available_bytes
from workbench.bench.matrix import check_memory, check_pipelines, check_ranks
from workbench.bench.resume import flat, refuse_other
from workbench.case import Case
from workbench.errors import InputError
from workbench.files import read_json, write_atomic
from workbench.records.record import make_record, read_record, write_record
from workbench.records.schema import OwnRecord
from workbench.runtime import find_runtime
from workbench.systems import SYSTEMS

LIMIT_S = 600.0
NEXT = "next.json"
"""Where the first host's driver tells the others what to start."""
FOLLOW_S = 0.5
"""Before another host's driver reads it, so that one which just began has removed an old one."""


class SweepError(RuntimeError):
    """The ranks of a sweep cannot be started. What was measured before is kept."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a sweep stands: `done` of `total` cases, `failed` among them; `record` is the one that
    just ended, or None; `running` the id of the one in the works; `left_s` seconds to go, None
    before the first case has ended."""

    done: int
    total: int
    failed: int
    running: str = ""
    record: OwnRecord | None = None
    left_s: float | None = None

    def line(self) -> str:
        """The case that ended, as a line: count, id, time or reason, time left."""
        assert self.record is not None
        ms = self.record.iterationMS
        found = f"{ms:.4g} ms" if ms else f"failed: {self.record.reason}"
        found += ", noisy" if self.record.noisy else ""
        left = f", {self.left_s:.0f} s left" if self.left_s else ""
        return f"{self.done}/{self.total} {self.record.id}: {found}{left}"


@dataclass
class Sweep:
    """An open sweep; made by `open_sweep`."""

    folder: Folder
    cases: list[Case]
    settings: Settings
    hosts: Hosts
    limit_s: float
    notes: list[str] = field(default_factory=list)

    def left(self) -> list[Case]:
        """Cases without a good record. A record that cannot be read is put aside and noted."""
        return [case for case in self.cases if self._state(case) != "ok"]

    def failed(self) -> int:
        return sum(self._state(case) == "failed" for case in self.cases)

    def _state(self, case: Case) -> str:
        path = self.folder.record(case)
        if not path.exists():
            return "missing"
        try:
            record = read_record(path)
        except InputError as error:
            path.replace(path.with_suffix(".corrupt"))
            self.notes.append(f"{error}; measured again")
            return "missing"
        return record.status or "ok"


def open_sweep(
    path: str | Path,
    cases: Sequence[Case] = (),
    *,
    settings: Settings | None = None,
    hosts: Hosts | None = None,
    ranks: int | None = None,
    limit_s: float | None = None,
    resume: bool = False,
    elsewhere: bool = False,
) -> Sweep:
    """A new sweep of `cases` in a folder, or with `resume` the one that is there (or a new one).

    What is given must be as in a sweep that is resumed; what is not is taken from it, the ranks'
    added environment too. Raises InputError, before anything is written, where it is not, the cases
    cannot run on the ranks, the folder has a sweep and is not to be resumed, or its sweep is of
    another version. With `elsewhere` the ranks are those of other hosts, and what these have for
    them is looked at there.
    """
    folder, hosts = Folder(Path(path)), hosts or Hosts()
    if folder.state.exists():
        if not resume:
            raise InputError(f"out={path} holds a sweep already; resume it or name another folder")
        found = _read_state(folder)
        known, added = list(found.cases), tuple(found.environment.items())
        hosts_there = replace(hosts, environment=added)
        sweep = Sweep(folder, known, found.settings, hosts_there, found.limit_s)
        given = {} if settings is None else flat(settings)
        given |= {} if limit_s is None else {"limit_s": limit_s}
        given |= {"environment": dict(hosts.environment)} if hosts.environment else {}
        refuse_other(sweep, given, cases)
        _check_runs(sweep, ranks, elsewhere)
        return sweep
    if folder.path.exists() and any(folder.path.rglob("*.record.json")):
        raise InputError(f"out={path} holds records of something else; name another folder")
    if not cases:
        raise InputError(f"out={path} holds no sweep to resume")
    limit_s = LIMIT_S if limit_s is None else limit_s
    if not 0 < limit_s < math.inf:
        raise InputError(f"limit_s={limit_s} must be positive and finite")
    sweep = Sweep(folder, list(cases), settings or Settings(), hosts, limit_s)
    _check_runs(sweep, ranks, elsewhere)
    state = {
        "version": workbench.__version__,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "limit_s": limit_s,
        "settings": asdict(sweep.settings),
        "environment": dict(hosts.environment),
        "cases": [asdict(case) for case in cases],
    }
    write_atomic(folder.state, json.dumps(state, indent=1) + "\n")
    return sweep


def run_sweep(sweep: Sweep, on_progress: Callable[[Progress], None] = lambda _: None) -> Progress:
    """Measures what is left. Returns the final state; a case that failed is a record with its
    reason, and the sweep goes on. Raises InputError where the folder takes no more files or another
    driver is at work in it; Ctrl-C ends the ranks and is passed on."""
    folder = sweep.folder
    with alone(folder) as lock:
        if lock is None:
            if sweep.hosts.nnodes == 1 or sweep.hosts.prefix:
                raise InputError(f"out={folder.path} is being measured by another process")
            return _follow(sweep, on_progress)
        (folder.path / NEXT).unlink(missing_ok=True)  # an earlier driver's
        sweep_up(folder)
        start = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
        left = sweep.left()
        counter = CaseCounter(sweep, left, on_progress)
        number = 0
        for _, group in groupby(sorted(left, key=lambda case: case.ep), lambda case: case.ep):
            waiting = list(group)
            while waiting:
                number += 1
                job = Job(
                    name=f"{start}-{number}-ep{waiting[0].ep}",
                    cases=tuple(waiting),
                    settings=sweep.settings,
                    limit_s=sweep.limit_s,
                )
                _announce(sweep, job)
                (ended,) = run_jobs(JobRun(job, folder, sweep.hosts, counter.event))
                waiting = after(sweep, waiting, ended, counter)
        _announce(sweep, None)
        return counter.told()


def _check_runs(sweep: Sweep, ranks: int | None, elsewhere: bool) -> None:
    """Raises InputError where a case cannot run: for want of a pipeline, ranks or memory."""
    device, nnodes = sweep.settings.device, sweep.hosts.nnodes
    if device == "cuda" and not elsewhere:
        each = max(case.ep for case in sweep.cases) // nnodes
        peers = any(SYSTEMS[case.pipeline].peer_memory for case in sweep.cases)
        if problem := cuda_problem(each, peers=peers):
            raise InputError(problem)
    if ranks is None and not elsewhere:
        ranks = default_ranks(device) * nnodes
    if ranks is not None:
        check_ranks(sweep.cases, ranks, nnodes)
    check_pipelines(sweep.cases)
    if device == "cpu" and not elsewhere:
        check_memory(sweep.cases, available_bytes(), nnodes)


def default_ranks(device: str) -> int:
    """Ranks that this host can take on a device: its GPUs, or its cores, but two at least."""
    return find_runtime(device).count()


def after(sweep: Sweep, waiting: list[Case], ended: Ended, counter: "CaseCounter") -> list[Case]:
    """The cases still to be measured after a start of the ranks; the case that was at work when
    they were lost fails with the reason. Raises SweepError where they are lost before any case
    twice in a row."""
    rest = [case for case in waiting if not counter.ended(case)]
    if not ended.reason:
        return []
    if ended.unwritable:
        raise InputError(f"{ended.reason}; a resumed sweep goes on from here")
    at = next((case for case in rest if case.id == ended.case), None)
    if at is None:
        counter.false_starts = counter.false_starts + 1 if len(rest) == len(waiting) else 0
        if rest and counter.false_starts > 1:
            raise SweepError(f"ranks could not be started: {ended.reason}")
        return rest
    found = {"status": "failed", "reason": ended.reason}
    record = make_record(
        at,
        find_runtime("cpu").label() if sweep.settings.device == "cpu" else "unknown",
        found,
        {"lost": True},
    )
    write_record(record, sweep.folder.record(at))
    counter.end(at, record)
    return [case for case in rest if case is not at]


class CaseCounter:
    """Turns events into progress. Time left: what the cases ended so far took, by layers and
    passes, times what is left."""

    def __init__(
        self, sweep: Sweep, left: Sequence[Case], on_progress: Callable[[Progress], None]
    ) -> None:
        self.folder, self.on_progress = sweep.folder, on_progress
        self.cases = {case.id: case for case in left}
        self.done, self.total = len(sweep.cases) - len(left), len(sweep.cases)
        self._weights = {c.id: c.layers * (3 if c.mode == "training" else 1) for c in left}
        self._ended: dict[str, bool] = {}
        self._began, self._spent = 0.0, 0.0
        self.false_starts = 0

    def event(self, event: Mapping[str, Any]) -> None:
        case = self.cases[event["case"]]
        if event["event"] == "start":
            self._began = event["time"]
            self.on_progress(self.told(running=case.id))
        else:
            self._spent += event["time"] - self._began
            self.end(case, read_record(self.folder.record(case)))

    def end(self, case: Case, record: OwnRecord) -> None:
        self._ended[case.id] = record.status == "ok"
        self.on_progress(self.told(record=record))

    def ended(self, case: Case) -> bool:
        return case.id in self._ended

    def told(self, running: str = "", record: OwnRecord | None = None) -> Progress:
        past = sum(self._weights[name] for name in self._ended)
        rest = sum(self._weights.values()) - past
        left_s = self._spent * rest / past if past else None
        failed = sum(not good for good in self._ended.values())
        return Progress(
            done=self.done + len(self._ended),
            total=self.total,
            failed=failed,
            running=running,
            record=record,
            left_s=left_s,
        )


@dataclass(frozen=True, kw_only=True)
class _State:
    """What `sweep.json` says."""

    version: str
    started: str
    limit_s: int | float
    settings: Settings
    environment: dict[str, str]
    cases: tuple[Case, ...]


def _read_state(folder: Folder) -> _State:
    found = read_json(folder.state)
    version = found.get("version") if isinstance(found, dict) else None
    if version != workbench.__version__:
        raise InputError(
            f"out={folder.path} holds a sweep of moe-workbench {version}, must be of"
            f" {workbench.__version__}; name another folder"
        )
    return as_dataclass(_State, found, folder.state)


@contextlib.contextmanager
def alone(folder: Folder) -> Iterator[IO[str] | None]:
    """The folder's lock, or None if another driver has it."""
    try:
        with folder.lock.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            yield lock
    except OSError as error:
        raise InputError(f"{folder.lock}: cannot be written: {error.strerror}") from None


def sweep_up(folder: Folder) -> None:
    """Removes what a killed process left half written; nothing else starts with a dot there."""
    for stale in (*folder.records.glob(".*"), *folder.path.glob(".*.json.*")):
        stale.unlink(missing_ok=True)


def _announce(sweep: Sweep, job: Job | None) -> None:
    """Tells the drivers of the other hosts what to start next; None that there is no more."""
    if sweep.hosts.nnodes > 1 and not sweep.hosts.prefix:
        if job is not None:
            job.write(sweep.folder.path)
        write_atomic(sweep.folder.path / NEXT, json.dumps({"job": job.name if job else ""}))


def _follow(sweep: Sweep, on_progress: Callable[[Progress], None]) -> Progress:
    """On a further host, whenever it comes: starts this host's ranks of each job that the first
    driver announces."""
    from workbench.bench.job import read_job

    folder, seen = sweep.folder, ""
    time.sleep(FOLLOW_S)
    while (said := _said(folder)) != "":
        if said is not None and said != seen:
            seen = said
            job = read_job(folder.path / "jobs" / f"{seen}.json")
            run_jobs(JobRun(job, folder, sweep.hosts))
            continue
        with alone(folder) as lock:
            if lock is not None:  # the first driver is gone
                break
        time.sleep(0.1)
    left = sweep.left()
    return Progress(done=len(sweep.cases) - len(left), total=len(sweep.cases), failed=len(left))


def _said(folder: Folder) -> str | None:
    """The job that is announced, "" that there is no more, None for nothing yet."""
    try:
        return str(json.loads((folder.path / NEXT).read_text())["job"])
    except (OSError, ValueError, KeyError):
        return None
