"""Starts the ranks of a job through torchrun, watches them, and says how they ended.

One torchrun per EP degree: its ranks live for all cases of the job. Only the process group that
was started here is ever ended.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.bench.job import HUNG, UNWRITABLE, Folder, Job
from workbench.errors import InputError

GRACE_S = 10.0
"""Beyond a case's time limit, until ranks that did not end themselves are ended."""
START_S = 180.0
"""For the ranks of one host to start and begin their first case; hosts of several wait for one
another as long as a case may take."""
END_S = 5.0
"""From the request to end to the end by force."""

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Where ranks run. `nnodes` hosts with the same number of ranks each; beyond one, `rdzv` is
    the host:port where torchrun's agents meet. `prefix` is put before torchrun (srun ...), which
    then starts it on every host; without one, each host's own driver does. `local_addr` is the
    address by which this host is reached, where its name does not resolve. `environment` is added
    to ours. Raises InputError."""

    nnodes: int = 1
    rdzv: str = ""
    prefix: tuple[str, ...] = ()
    local_addr: str = ""
    environment: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.nnodes < 1:
            raise InputError(f"nnodes={self.nnodes} must be at least 1")
        if self.nnodes > 1 and not re.fullmatch(r"\S+:\d+", self.rdzv):
            raise InputError(f"rdzv={self.rdzv!r} must be HOST:PORT with nnodes={self.nnodes}")
        given = {**os.environ, **dict(self.environment)}.get("OMP_NUM_THREADS", "1")
        if not re.fullmatch(r"0*[1-9]\d{0,5}", given):
            raise InputError(
                f"OMP_NUM_THREADS={given!r} in the environment must be an integer of at least 1"
            )

    @property
    def address(self) -> str:
        """By which torchrun's agents reach this host; empty where it is to find out by itself."""
        return self.local_addr or (LOOPBACK if self.nnodes == 1 else "")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a job ended: `reason` is empty if every case has its record; `case` is the id of the one
    that was measured when it did not; `unwritable`: the folder takes no more files."""

    reason: str = ""
    case: str = ""
    unwritable: bool = False


class JobRun:
    """The ranks of a job, started; `step` until it says False, then `ended`; `end` at any time."""

    def __init__(
        self,
        job: Job,
        folder: Folder,
        hosts: Hosts,
        on_event: Callable[[Mapping[str, Any]], None] = lambda event: None,
    ) -> None:
        self.job, self.folder, self.on_event = job, folder, on_event
        self._hosts = hosts
        self._hung = False
        self._began = time.monotonic()
        self._start_s = START_S if hosts.nnodes == 1 else max(START_S, job.limit_s)
        if job.turn:  # its first case begins when those before it have measured theirs
            self._start_s += job.turn * job.limit_s
        self._never_started = False
        self._reader = Events(folder.events, job.name)
        host = f".{os.uname().nodename}" if hosts.nnodes > 1 else ""
        self._log = folder.logs / f"{job.name}{host}.torchrun.log"
        self._failures = self._log.with_suffix(".failures")
        try:
            path = job.write(folder.path)
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._failures.unlink(missing_ok=True)
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    command(job, path, folder, hosts, self._failures),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=_environment(job, hosts),
                    start_new_session=True,  # a Ctrl-C reaches the ranks from us, in order
                )
        except OSError as error:
            raise InputError(f"{error.filename}: {error.strerror}") from None

    def step(self) -> bool:
        """Passes on new events; ends ranks whose case takes far too long. Whether they run."""
        running = self._process.poll() is None
        for event in self._reader.new():
            self.on_event(event)
        late = time.monotonic() - self._reader.since - self.job.limit_s - GRACE_S
        if running and self._reader.running and late > 0:
            self._hung = True
            self.end()
        if running and not self._reader.since and self._began + self._start_s < time.monotonic():
            self._never_started = True
            self.end()
        return running

    def end(self) -> None:
        """Ends torchrun, which ends its ranks; by force if it does not, then the kernel does."""
        if self._process.poll() is not None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait(timeout=END_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def ended(self) -> Ended:
        code = self._process.returncode
        if code == 0:
            return Ended()
        if self._never_started:
            return Ended(reason=self._start_reason())
        reason, root_code = self._reason(code)
        return Ended(reason=reason, case=self._reader.running, unwritable=root_code == UNWRITABLE)

    def _reason(self, code: int) -> tuple[str, int]:
        """Why it ended early, in one line, and the exit code of the rank at fault."""
        job, folder = self.job, self.folder
        took = f"no end within limit_s={job.limit_s:g}"
        if self._hung:
            return f"{took}; ranks did not answer (logs: {folder.logs})", HUNG
        failed = list(filter(None, map(_parsed, _lines(self._failures))))
        if not failed:
            last = _last_line(self._log) or "no word"
            return f"torchrun ended with code {code}: {last}", code
        first = min(failed, key=lambda failure: failure["time"])
        rank, root_code = first["rank"], first["exitcode"]
        if root_code == HUNG:
            return f"{took}; stacks of every rank in {folder.logs}", HUNG
        if root_code < 0:
            return f"rank {rank} was ended by {signal.Signals(-root_code).name}", root_code
        log = folder.log(job.name, rank)
        return f"rank {rank}: {_last_line(log) or f'exit code {root_code}'} ({log})", root_code

    def _start_reason(self) -> str:
        if self._hosts.nnodes == 1:
            meet = f"at {self._hosts.address}, which must be an address of this host"
        else:
            meet = (
                f"at rdzv={self._hosts.rdzv}, which every host must reach, by names that all"
                f" resolve; where a host's own does not, give its address with --local-addr"
            )
        return f"no rank began within {self._start_s:g} s; they meet {meet} (log: {self._log})"


def run_jobs(*runs: JobRun) -> list[Ended]:
    """Until all have ended; where one ends early, all are ended. Any exception here, Ctrl-C among
    them, ends the ranks and is passed on."""
    try:
        while any(running := [run.step() for run in runs]):
            if any(
                not runs_on and run.ended().reason
                for run, runs_on in zip(runs, running, strict=True)
            ):
                break
            time.sleep(0.05)
    finally:
        for run in runs:
            run.end()
    for run in runs:
        run.step()
    return [run.ended() for run in runs]


def command(job: Job, path: Path, folder: Folder, hosts: Hosts, failures: Path) -> list[str]:
    """The command line that starts torchrun on this host (or, by `prefix`, on all)."""
    if hosts.nnodes == 1:
        meeting = [
            "--nnodes=1",
            "--rdzv-backend=c10d",
            f"--rdzv-id={job.name}",
            f"--rdzv-endpoint={hosts.address}:0",
        ]
    else:
        meeting = [
            f"--nnodes={hosts.nnodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-id={job.name}",
            f"--rdzv-endpoint={hosts.rdzv}",
            f"--rdzv-conf=join_timeout={int(job.limit_s)}",
        ]
    if hosts.address:
        meeting.append(f"--local-addr={hosts.address}")
    return [
        *hosts.prefix,
        sys.executable,
        "-m",
        "workbench.bench.torchrun",
        str(failures),
        *meeting,
        f"--nproc-per-node={job.ep // hosts.nnodes}",
        "--max-restarts=0",
        "-m",
        "workbench.bench.worker",
        str(folder.path),
        str(path),
    ]


def _environment(job: Job, hosts: Hosts) -> dict[str, str]:
    per_host = max(job.ep // hosts.nnodes, 1)
    threads = max(len(os.sched_getaffinity(0)) // per_host, 1)
    # PET_... are torchrun's options as variables: what a start depends on is on its command line.
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    near = {"GLOO_SOCKET_IFNAME": "lo"} if hosts.address == LOOPBACK else {}
    return {
        "OMP_NUM_THREADS": str(threads),
        **near,
        **ours,
        "PYTHONUNBUFFERED": "1",
        **dict(hosts.environment),
    }


class Events:
    """New lines of the events file, of one job or of all; `running` is the case in the works."""

    def __init__(self, path: Path, job: str = "") -> None:
        self.path, self.job, self.running, self.since = path, job, "", 0.0
        self._at = path.stat().st_size if path.exists() else 0

    def new(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._at)
            *lines, rest = file.read().split(b"\n")
            self._at = file.tell() - len(rest)
        said = [event for event in map(_parsed, lines) if "case" in event]
        found = [event for event in said if not self.job or event["job"] == self.job]
        for event in found:
            started = event["event"] == "start"
            self.running, self.since = event["case"] if started else "", time.monotonic()
        return found


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(line))
    except ValueError:  # a driver or rank was killed in the middle of a line
        return {}


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


def _last_line(path: Path) -> str:
    said = [line for line in _lines(path) if line.strip()]
    return said[-1].decode(errors="replace").strip() if said else ""
