"""One rank of a sweep: `worker.py FOLDER JOB` under torchrun measures a job's cases in order.

Rank 0 writes each case's record as soon as it is complete, and a line into the events file as a
case starts and ends. What ranks print, and their stacks if a case does not end in time, is in the
log of each. The process lives for all cases of the job.
"""

import contextlib
import datetime
import faulthandler
import fcntl
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from workbench.bench.doctor import ranks_problem, seen_here
from workbench.bench.job import HUNG, LOST, UNWRITABLE, Folder, Job, Settings, read_job
from workbench.bench.measure import measure_case
from workbench.bench.torchrun import die_with_parent
from workbench.case import Case
from workbench.domain import domains
from workbench.errors import InputError
from workbench.moe.failures import ClosedError, PeerError
from workbench.moe.groups.collective import CollectiveGroup
from workbench.moe.groups.nvlink import NvlinkGroup
from workbench.moe.groups.shared import SharedGroup
from workbench.records.record import write_record
from workbench.runtime import find_runtime

GRACE_S = 2.0
"""From the stacks in the logs to the end of a rank, so that every rank gets to write its own."""


def main(folder_name: str, job_name: str) -> int:
    die_with_parent(signal.SIGKILL)
    folder, job = Folder(Path(folder_name)), read_job(Path(job_name))
    rank = int(os.environ["RANK"])
    _log_to(folder.log(job.name, rank))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with contextlib.ExitStack() as stack:
        if rank == 0:
            stack.enter_context(_only_ranks(folder, job.limit_s))
        wait = datetime.timedelta(seconds=job.limit_s + 30)
        dist.init_process_group("gloo", timeout=wait)
        try:
            return _cases(job, folder, rank)
        except InputError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return UNWRITABLE
        except (PeerError, ClosedError):
            traceback.print_exc()
            if job.settings.device == "cpu":
                return LOST
            # a stream that waits for a dead peer would not let the process end
            sys.stderr.flush()
            os._exit(LOST)


def _cases(job: Job, folder: Folder, rank: int) -> int:
    group, numbers = make_group(job.settings, job.limit_s + 30)
    for number, case in enumerate(job.cases):
        with _in_time(job.limit_s):
            if rank == 0:
                _await_turn(job, number)
                _event(folder, job, case, "start")
            record = measure_case(case, group, job.settings, job.limit_s, numbers)
            if rank == 0:
                write_record(record, folder.record(case))
                _event(folder, job, case, "end", status=record.status)
                _pass_turn(job, number)
    group.close()
    dist.destroy_process_group()
    return 0


def make_group(settings: Settings, timeout_s: float) -> tuple[CollectiveGroup, list[int]]:
    """The widest group that the ranks can form, and the number of each rank's peer-access domain:
    peers' memory within one domain, collectives beyond. Selects this rank's device. Collective;
    InputError on every rank where one has no device to run on, or another one."""
    runtime, number = find_runtime(settings.device), int(os.environ["LOCAL_RANK"])
    label, fabric, seen, problem = "", None, None, None
    try:
        problem = runtime.problem(int(os.environ["LOCAL_WORLD_SIZE"]))
        if problem is None:
            runtime.select(number)
            label, fabric = runtime.label(), runtime.fabric()
            seen = seen_here(number) if settings.device == "cuda" else None
    except (InputError, RuntimeError) as error:  # torch raises the latter for what its driver says
        problem = str(error)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (problem, label, fabric, seen))
    for rank, (found, name, *_) in enumerate(everyone):
        if found is not None:
            raise InputError(f"device={settings.device!r} {found} (rank {rank})")
        if name != everyone[0][1]:
            raise InputError(f"device={name!r} on rank {rank} must be {everyone[0][1]!r} as on 0")
    if seen is not None and (problem := ranks_problem([one for *_, one in everyone])):
        raise InputError(problem)
    numbers = domains([fabric for *_, fabric, _ in everyone], settings.domain)
    if len(set(numbers)) > 1:
        return CollectiveGroup(timeout_s=timeout_s, device=settings.device), numbers
    if settings.device == "cpu":
        return SharedGroup(timeout_s=timeout_s), numbers
    return NvlinkGroup(timeout_s=timeout_s, device=settings.device), numbers


def _log_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.enable(all_threads=True)


@contextlib.contextmanager
def _only_ranks(folder: Folder, patience_s: float) -> Iterator[None]:
    """Waits until the ranks of a driver that was killed are gone from the folder."""
    with folder.ranks_lock.open("w") as lock:
        until = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        yield


@contextlib.contextmanager
def _in_time(limit_s: float) -> Iterator[None]:
    """Ends the process, its stacks written before, if the block does not end within `limit_s`."""
    faulthandler.dump_traceback_later(limit_s, exit=False)
    end = threading.Timer(limit_s + GRACE_S, os._exit, [HUNG])
    end.daemon = True
    end.start()
    try:
        yield
    finally:
        end.cancel()
        faulthandler.cancel_dump_traceback_later()


def _event(folder: Folder, job: Job, case: Case, event: str, **more: object) -> None:
    line = {"job": job.name, "case": case.id, "event": event, "time": time.time(), **more}
    try:
        with folder.events.open("a", encoding="utf-8") as events:
            events.write(json.dumps(line) + "\n")
    except OSError as error:
        raise InputError(f"{folder.events}: cannot be written: {error.strerror}") from None


def _await_turn(job: Job, number: int) -> None:
    """Waits until the others that take turns have measured what comes before case `number`."""
    if job.turns > 1:
        place = number * job.turns + (job.turn + number) % job.turns
        while int(Path(job.turn_file).read_text() or 0) != place:
            time.sleep(0.01)


def _pass_turn(job: Job, number: int) -> None:
    if job.turns > 1:
        from workbench.files import write_atomic

        place = number * job.turns + (job.turn + number) % job.turns
        write_atomic(Path(job.turn_file), str(place + 1))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
