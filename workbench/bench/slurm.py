"""A sweep as a SLURM job: the script is written and submitted, and watched from where it was.

In the job runs the same driver as anywhere, which resumes; so a job that is requeued or submitted
again goes on where it stopped. srun starts torchrun once per node, torchrun's rendezvous joins
them.
"""

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workbench.bench.launch import Events
from workbench.bench.sweep import CaseCounter, Progress, Sweep, SweepError
from workbench.errors import InputError
from workbench.files import write_atomic

POLL_S = 1.0
RDZV_PORT = 29400


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What SLURM is asked for. `options` are those of sbatch, such as --partition=gpu; `ranks` in
    all, None for what the nodes take."""

    folder: Path
    nnodes: int = 1
    ranks: int | None = None
    options: tuple[str, ...] = ()

    def script(self) -> str:
        """The sbatch script."""
        folder = self.folder.absolute()
        command = [
            sys.executable,
            "-m",
            "workbench.cli",
            "sweep",
            "--resume",
            "--in-job",
            "--out",
            str(folder),
            "--nnodes",
            str(self.nnodes),
        ]
        if self.ranks is not None:
            command += ["--ranks", str(self.ranks)]
        asked = [
            "--job-name=moe-workbench",
            f"--nodes={self.nnodes}",
            "--requeue",
            f"--output={folder / 'logs' / 'slurm-%j.log'}",
            "--open-mode=append",
            *self.options,
        ]
        lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in asked)]
        end = ""
        if self.nnodes > 1:
            lines.append('head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)')
            end = f' --rdzv "$head:{RDZV_PORT}"'
        # exec: the signals of scancel and of a time limit reach the driver itself
        return "\n".join([*lines, f"exec {shlex.join(command)}{end}", ""])


def submit(sweep: Sweep, submission: Submission) -> str:
    """Writes `sweep.sbatch` into the folder and submits it; the job's id. Raises InputError where
    there is no SLURM or it refuses the job."""
    if shutil.which("sbatch") is None:
        raise InputError("--slurm needs sbatch on the PATH, and there is none")
    path = sweep.folder.path / "sweep.sbatch"
    write_atomic(path, submission.script())
    sweep.folder.logs.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise InputError(f"sbatch refused {path}: {' '.join(done.stderr.split())}")
    return done.stdout.strip().partition(";")[0]


def state(job: str) -> str:
    """What squeue calls the job's state, or an empty text when it is gone."""
    done = subprocess.run(
        ["squeue", "--noheader", "--jobs", job, "--format=%T"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def cancel(job: str) -> None:
    """Cancels the job, its driver included, so that it ends its ranks itself."""
    subprocess.run(["scancel", "--full", job], check=False)


def watch(sweep: Sweep, job: str, on_progress: Callable[[Progress], None] = lambda _: None) -> None:
    """Until the job is gone from the queue, with progress as its cases end; through a requeue too.
    Ctrl-C cancels the job and is passed on. Raises SweepError where it ended with cases left."""
    counter = CaseCounter(sweep, sweep.left(), on_progress)
    events = Events(sweep.folder.events)
    try:
        gone = False
        while not gone:
            gone = state(job) in ("", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
            for event in events.new():
                if event["case"] in counter.cases:
                    counter.event(event)
            time.sleep(0 if gone else POLL_S)
    except KeyboardInterrupt:
        cancel(job)
        raise
    left = [case for case in sweep.left() if not sweep.folder.record(case).exists()]
    if left:
        log = sweep.folder.logs / f"slurm-{job}.log"
        lines = log.read_text(errors="replace").split("\n") if log.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no word")
        raise SweepError(f"SLURM job {job} ended with {len(left)} cases left: {last} ({log})")
