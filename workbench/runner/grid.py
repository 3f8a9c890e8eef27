"""Runs a notebook once per point of a parameter grid: one folder per point, one index of them all.

A run's folder has `points.json` and `index.html`, rewritten as points finish, and `<point>/` with
what `workbench.runner.notebook.run_notebook` leaves there.
"""

import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from workbench.errors import InputError
from workbench.files import write_atomic
from workbench.report.page import render
from workbench.runner.notebook import (
    NotebookError,
    Run,
    new_run_dir,
    plan_run,
    read_run,
    run_notebook,
    runs_dir,
    writable_folder,
)
from workbench.runner.parameters import grid, notebook_parameters

LATEST = "latest"
_NAME_LENGTH = 100
Show = Callable[[int, float, str], None]


class Point(BaseModel):
    """One point of a grid: the parameters it was given and how its run stands."""

    model_config = ConfigDict(extra="forbid")

    name: str
    given: dict[str, Any]
    status: Literal["waiting", "running", "complete", "failed"] = "waiting"
    resumed: bool = False
    seconds: float | None = None
    executed: str | None = None
    error: str | None = None


class Grid(BaseModel):
    """A grid run, as in `points.json`."""

    model_config = ConfigDict(extra="forbid")

    notebook: str
    points: list[Point]

    def count(self, status: str) -> int:
        return sum(point.status == status for point in self.points)


def run_grid(
    notebook: Path,
    assignments: Sequence[str],
    *,
    out: Path | None = None,
    resume: str | None = None,
) -> tuple[Path, Grid]:
    """Executes `notebook` once per grid point; returns the run's folder and how the points stand.

    `out` is the run's folder (default: a new one in `outputs/runs`); `resume` is the id of a run
    there, `latest`, or with `out` anything. A resumed run keeps the points that are complete for
    the same notebook, parameters, input files and package version, and without `assignments`
    repeats those that it has. With `assignments` it runs theirs, and the points that it had before
    stay in its index. A failed point does not stop the others.

    Everything is checked before the first point runs; raises InputError. Progress goes to stderr.
    """
    known = notebook_parameters(notebook)
    folder = _folder(notebook, out, resume)
    before = _resumed(folder, notebook) if resume else []
    given = grid(notebook, known, assignments)
    if before and not assignments:
        given = [point.given for point in before]
    points = [Point(name=point_name(values), given=values) for values in given]
    asked = {point.name: point for point in points}
    earlier = [asked.pop(point.name, point) for point in before]
    state = Grid(notebook=str(notebook), points=[*earlier, *asked.values()])
    planned = [plan_run(notebook, values) for values in given]
    writable_folder(folder)
    for point, plan in zip(points, planned, strict=True):
        done = read_run(folder / point.name) if resume else None
        if done is not None and _still_complete(folder / point.name, done, plan):
            point.resumed = True
            _take(point, done)
    _write_index(folder, state)
    with _progress(points, sys.stderr.isatty()) as show:
        for index, point in enumerate(points):
            if point.resumed:
                continue
            point.status = "running"
            _write_index(folder, state)
            show(index, 0.0, "")
            try:
                run_notebook(
                    notebook,
                    folder / point.name,
                    point.given,
                    on_cell=partial(_show_cell, show, index),
                )
            except NotebookError as error:
                show(index, 1.0, str(error))
            finally:
                finished = read_run(folder / point.name)
                if finished is not None:
                    _take(point, finished)
                _write_index(folder, state)
            if point.status == "complete":
                show(index, 1.0, "")
    return folder, state


def _show_cell(show: Show, index: int, cell: int, cells: int) -> None:
    show(index, (cell + 0.5) / cells, "")


def point_name(given: Mapping[str, Any]) -> str:
    """A folder name that says the parameters; with a hash where it cannot say them in full."""
    if not given:
        return "defaults"
    full = ",".join(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in given.items())
    name = re.sub(r"[^\w.,=+-]+", "-", full.replace(" ", ""))
    if name != full or len(name) > _NAME_LENGTH:
        digest = hashlib.sha256(full.encode()).hexdigest()[:8]
        name = f"{name[:_NAME_LENGTH]}-{digest}"
    return name


def _still_complete(folder: Path, done: Run, plan: Run) -> bool:
    there = done.executed is not None and (folder / done.executed).is_file()
    return done.status == "complete" and there and done.same_work(plan)


def _take(point: Point, run: Run) -> None:
    point.status = run.status
    point.seconds, point.executed, point.error = run.seconds, run.executed, run.error


def _folder(notebook: Path, out: Path | None, resume: str | None) -> Path:
    if out is not None:
        if resume is None and (out / "points.json").exists():
            raise InputError(f"out={out} has a run already; resume it or name another folder")
        return out
    if resume is None:
        return new_run_dir(notebook.stem)
    if resume != LATEST:
        folder = runs_dir() / resume
        if not folder.is_dir():
            known = ", ".join(sorted(p.parent.name for p in runs_dir().glob("*/points.json")))
            raise InputError(f"resume={resume} must be a run in {runs_dir()} ({known or 'none'})")
        return folder
    runs = [
        path.parent
        for path in sorted(runs_dir().glob("*/points.json"), key=lambda p: p.stat().st_mtime)
        if (state := _read_grid(path.parent)) and Path(state.notebook).name == notebook.name
    ]
    if not runs:
        raise InputError(f"resume: no run of {notebook.name} in {runs_dir()}")
    return runs[-1]


def _resumed(folder: Path, notebook: Path) -> list[Point]:
    """The points of the run in `folder`, none of them at work. Raises InputError where there is no
    run, or one of another notebook."""
    state = _read_grid(folder)
    if state is None:
        raise InputError(f"out={folder} holds no run to resume")
    if Path(state.notebook).name != notebook.name:
        raise InputError(
            f"out={folder} holds a run of {state.notebook}, not of {notebook}; name another folder"
        )
    for point in state.points:
        point.resumed = False
        if point.status == "running":  # it was ended from outside
            point.status = "waiting"
    return state.points


def _read_grid(folder: Path) -> Grid | None:
    try:
        return Grid.model_validate_json((folder / "points.json").read_bytes())
    except (OSError, ValidationError):
        return None


def _write_index(folder: Path, state: Grid) -> None:
    write_atomic(folder / "points.json", state.model_dump_json(indent=1) + "\n")
    page = render(
        "points",
        title=f"{folder.name}: {state.notebook}",
        names=sorted({name for point in state.points for name in point.given}),
        points=state.points,
        complete=state.count("complete"),
        failed=state.count("failed"),
        pages=[p.name for p in state.points if (folder / p.name / "index.html").exists()],
    )
    write_atomic(folder / "index.html", page + "\n")


@contextmanager
def _progress(points: Sequence[Point], terminal: bool) -> Iterator[Show]:
    """Yields `show(point index, fraction done, error)`: a bar on a terminal, else plain lines."""
    total, resumed = len(points), sum(point.resumed for point in points)
    began = time.monotonic()

    def line(index: int, fraction: float, error: str) -> str | None:
        name = f"[{index + 1}/{total}] {points[index].name}"
        if error:
            return f"{name}: failed\n{error}"
        if fraction == 0:
            return f"{name}: started"
        if fraction < 1:
            return None
        done = index + 1 - sum(point.resumed for point in points[: index + 1])
        ahead = sum(not point.resumed for point in points[index + 1 :])
        left = timedelta(seconds=round((time.monotonic() - began) / done * ahead))
        return f"{name}: complete in {points[index].seconds:.1f} s, about {left} left"

    if resumed:
        print(f"{resumed} of {total} points are complete already", file=sys.stderr)
    if not terminal:

        def plain(index: int, fraction: float, error: str) -> None:
            text = line(index, fraction, error)
            if text is not None:
                print(text, file=sys.stderr, flush=True)

        yield plain
        return

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeLeft())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total - resumed)

        def rich_bar(index: int, fraction: float, error: str) -> None:
            before = sum(not point.resumed for point in points[:index])
            bar.update(task, completed=before + fraction, description=points[index].name)
            if error:
                bar.console.print(line(index, fraction, error), markup=False, highlight=False)

        yield rich_bar
