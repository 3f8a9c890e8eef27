"""Two sweeps of the same cases measured turn by turn, so that what drifts with time meets both."""

import os
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import groupby

from workbench.bench.job import Job
from workbench.bench.launch import JobRun, run_jobs
from workbench.bench.sweep import CaseCounter, Progress, Sweep, after, alone, sweep_up
from workbench.errors import InputError
from workbench.files import write_atomic


def run_pair(
    a: Sweep, b: Sweep, on_progress: Callable[[str, Progress], None] = lambda name, _: None
) -> tuple[Progress, Progress]:
    """Measures what is left of either sweep in both, case by case: A B, B A, A B ...

    Both have their ranks alive at a time, and while one measures the other waits. Raises InputError
    where the cases or settings differ; else like `run_sweep`.
    """
    if [c.id for c in a.cases] != [c.id for c in b.cases] or a.settings != b.settings:
        raise InputError(f"out={b.folder.path} must have the cases and settings of {a.folder.path}")
    with alone(a.folder) as lock_a, alone(b.folder) as lock_b:
        if lock_a is None or lock_b is None:
            raise InputError(f"out={a.folder.path} is being measured by another process")
        start = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
        left_ids = {case.id for sweep in (a, b) for case in sweep.left()}
        left = [case for case in a.cases if case.id in left_ids]
        counters = []
        for name, sweep in (("A", a), ("B", b)):
            sweep_up(sweep.folder)
            counters.append(CaseCounter(sweep, left, lambda p, name=name: on_progress(name, p)))  # type: ignore[misc]
        turn_file = a.folder.path / "turn"
        number = 0
        for _, group in groupby(sorted(left, key=lambda case: case.ep), lambda case: case.ep):
            waiting = list(group)
            while waiting:
                number += 1
                write_atomic(turn_file, "0")
                runs = []
                for turn, (sweep, counter) in enumerate(zip((a, b), counters, strict=True)):
                    job = Job(
                        name=f"{start}-{number}-ep{waiting[0].ep}",
                        cases=tuple(waiting),
                        settings=sweep.settings,
                        limit_s=sweep.limit_s,
                        turn=turn,
                        turns=2,
                        turn_file=str(turn_file),
                    )
                    runs.append(JobRun(job, sweep.folder, sweep.hosts, counter.event))
                both = run_jobs(*runs)
                rests = [
                    after(sweep, waiting, ended, counter)
                    for sweep, ended, counter in zip((a, b), both, counters, strict=True)
                ]
                # a pair that either lost is measured again by both
                again = {case.id for rest in rests for case in rest}
                waiting = [case for case in waiting if case.id in again]
        return counters[0].told(), counters[1].told()
