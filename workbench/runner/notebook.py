"""Runs one notebook through papermill, strictly: checked before, one process, recorded in run.json.

A run's folder receives `run.json` at once, whatever the cells write (see `run_dir`), and at the end
the executed notebook: under the notebook's own name if it is complete, else as
`<stem>.failed.ipynb`. `run.log` has what the processes printed outside of cells, if anything.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

import workbench
from workbench.errors import InputError, one_line, shortened
from workbench.files import sha256, write_atomic
from workbench.runner.child import GRACE_SECONDS
from workbench.runner.parameters import convert_all, notebook_parameters, parameters

if TYPE_CHECKING:
    from workbench.explore.explorer import Explorer

__all__ = [
    "MAX_BYTES",
    "NotebookError",
    "Run",
    "interactive",
    "parameters",
    "plan_run",
    "present",
    "read_run",
    "run_dir",
    "run_notebook",
    "runs_dir",
    "writable_folder",
]

MAX_BYTES = 1_000_000
"""An executed notebook must stay below this, or nobody opens or reviews it."""

OUT_DIR = "out_dir"
"""The parameter that tells a notebook where to write; which folder that is changes no result."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_TRACEBACK_LINES = 60
_LINE_LENGTH = 400
"""Lines, and characters of each, that a message shows of a cell's source and of its error."""


class NotebookError(RuntimeError):
    """A notebook failed. The message has the failing cell's source and its error."""


class Run(BaseModel):
    """One execution of a notebook, as in `run.json`. Times are UTC, hashes are SHA-256.

    `parameters` has every parameter but `out_dir`, given or by default. `inputs` has the hash of
    each file that a parameter names, and of each file below a folder named with a slash in it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    status: Literal["running", "complete", "failed"]
    notebook: str
    notebook_sha256: str
    parameters: dict[str, Any]
    inputs: dict[str, str]
    version: str
    started: datetime
    finished: datetime | None = None
    seconds: float | None = None
    executed: str | None = None
    error: str | None = None

    def same_work(self, other: "Run") -> bool:
        """Whether `other` computes the same: notebook, parameters, inputs and package version."""
        names = ("notebook_sha256", "parameters", "inputs", "version")
        # as JSON, so that a NaN equals itself
        return self.model_dump_json(include=set(names)) == other.model_dump_json(include=set(names))


def run_notebook(
    notebook: str | Path,
    out_dir: str | Path,
    given: Mapping[str, Any] | None = None,
    *,
    on_cell: Callable[[int, int], None] | None = None,
) -> Run:
    """Executes `notebook` into the folder `out_dir`, which is made; returns the record of the run.

    `given` has values or texts by parameter name; a text is read by the parameter's type. Relative
    paths start at the caller's working directory, which is the kernel's too. If the notebook has a
    parameter `out_dir`, it gets this folder. `on_cell(index, cells)` is called as cells start.

    The notebook runs in a process and a kernel of its own, on this interpreter. Raises InputError
    before anything is written or run; NotebookError when a cell fails, the kernel dies, or the
    executed notebook has MAX_BYTES or more: what was written until then stays. Any other exception,
    Ctrl-C among them, ends the processes, marks the run failed and is passed on.
    """
    notebook, folder = Path(notebook), Path(out_dir)
    known = notebook_parameters(notebook)
    passed = convert_all(notebook, known, given or {})
    run = plan_run(notebook, passed)
    if OUT_DIR in known:
        passed[OUT_DIR] = str(folder)
    writable_folder(folder)
    final = folder / notebook.name
    partial, failed = final.with_suffix(".running.ipynb"), final.with_suffix(".failed.ipynb")
    for stale in (final, partial, failed):
        stale.unlink(missing_ok=True)
    _write_run(folder, run)
    began = time.monotonic()

    def close(**fields: Any) -> Run:
        times = {"finished": _now(), "seconds": round(time.monotonic() - began, 3)}
        closed = run.model_copy(update=times | fields)
        _write_run(folder, closed)
        return closed

    def fail(error: str) -> None:
        if partial.exists():
            partial.replace(failed)
        close(status="failed", error=error, executed=failed.name if failed.exists() else None)

    cell = -1

    def started(index: int) -> None:
        nonlocal cell
        cell = index
        if on_cell is not None:
            on_cell(index, cells)

    cells = len(json.loads(notebook.read_text(encoding="utf-8"))["cells"]) + bool(passed)
    try:
        code = _execute(notebook, partial, passed, folder / "run.log", started)
        problem = _problem(partial, code, cell, folder / "run.log")
    except BaseException as cause:
        interrupted = isinstance(cause, KeyboardInterrupt)
        what = "interrupted" if interrupted else one_line(f"{type(cause).__name__}: {cause}")
        fail(f"{what} in cell {cell + 1} of {cells}")
        raise
    if problem is not None:
        fail(problem)
        raise NotebookError(f"{notebook}: {problem}")
    content = json.loads(partial.read_text(encoding="utf-8"))
    content["metadata"]["papermill"]["output_path"] = str(final)
    write_atomic(final, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    partial.unlink()
    return close(status="complete", executed=final.name)


def plan_run(notebook: Path, given: Mapping[str, Any]) -> Run:
    """The record of a run that starts now. Raises InputError where `given` is refused."""
    known = notebook_parameters(notebook)
    values = {name: p.default for name, p in known.items()} | convert_all(notebook, known, given)
    values.pop(OUT_DIR, None)
    return Run(
        status="running",
        notebook=str(notebook),
        notebook_sha256=sha256(notebook),
        parameters=json.loads(json.dumps(values)),
        inputs={str(path): sha256(path) for path in sorted(set(_files(list(values.values()))))},
        version=workbench.__version__,
        started=_now(),
    )


def read_run(folder: Path) -> Run | None:
    """The record in `folder`; None where there is none that can be read."""
    try:
        return Run.model_validate_json((folder / "run.json").read_bytes())
    except (OSError, ValidationError):
        return None


def run_dir(out_dir: str | Path | None = None) -> Path:
    """The folder that a notebook writes to, made if need be: `out_dir`, or a new one in `runs_dir`.

    Call it as `run_dir(p.out_dir)` with a parameter `out_dir = ""`: the strict runner sets it to
    the run's own folder, and plain papermill or JupyterLab leave it empty.
    """
    folder = Path(out_dir) if out_dir else new_run_dir("notebook")
    writable_folder(folder)
    return folder


def interactive() -> bool:
    """Whether a person can answer the cell that runs: its client takes requests for input.

    JupyterLab and its like do; papermill, nbconvert and our runner say that they do not.
    """
    from IPython.core.getipython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    request = kernel.get_parent("shell") if kernel is not None else {}
    return bool(request.get("content", {}).get("allow_stdin", False))


def present(explorer: "Explorer", out_dir: str | Path | None = None) -> None:
    """Display an explorer: its widgets for a person, else the exported figure of its state.

    The figure's files and the table go to `run_dir(out_dir)`.
    """
    if interactive():
        explorer.show()
        return
    explorer.export(run_dir(out_dir)).show(explorer.name)
    print(explorer.sentence())


def runs_dir() -> Path:
    """`outputs/runs` of the checkout that the working directory lies in, else of that directory."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "notebooks").is_dir() and (folder / "outputs").is_dir():
            here = folder
            break
    runs = here / "outputs" / "runs"
    return runs.relative_to(Path.cwd()) if runs.is_relative_to(Path.cwd()) else runs


def new_run_dir(name: str) -> Path:
    """A folder in `runs_dir` that does not exist yet, named by time (UTC) and `name`; not made."""
    stem = runs_dir() / f"{_now():%Y%m%d-%H%M%S}-{name}"
    folder, again = stem, 1
    while folder.exists():
        again += 1
        folder = stem.with_name(f"{stem.name}-{again}")
    return folder


def writable_folder(folder: Path) -> None:
    """Makes `folder`; raises InputError where it cannot be made or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass  # that a file can be made is all that is asked
    except OSError as error:
        raise InputError(f"out={folder} cannot be written: {error.strerror}") from error


def _execute(
    notebook: Path,
    output: Path,
    values: Mapping[str, Any],
    log: Path,
    started: Callable[[int], None],
) -> int:
    """The exit code of the process that executes the notebook; an exception here ends it."""
    read_end, write_end = os.pipe()
    with tempfile.TemporaryDirectory(prefix="workbench-") as private, log.open("wb") as log_file:
        process = subprocess.Popen(
            [sys.executable, "-m", "workbench.runner.child"],
            stdin=subprocess.PIPE,
            stdout=log_file,
            stderr=log_file,
            pass_fds=[write_end],
            env=_clean_environment(private),
            start_new_session=True,  # a Ctrl-C reaches it from us, in order, not from the terminal
        )
        os.close(write_end)
        assert process.stdin is not None
        try:
            with os.fdopen(read_end) as progress:
                job = {
                    "notebook": str(notebook),
                    "output": str(output),
                    "parameters": values,
                    "progress": write_end,
                }
                process.stdin.write(json.dumps(job).encode() + b"\n")
                process.stdin.flush()  # and left open: its end would tell that we are gone
                for line in progress:
                    started(int(line))
            return process.wait()
        except BaseException:
            _end(process)
            raise
        finally:
            process.stdin.close()
            if not log.stat().st_size:
                log.unlink()


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(timeout=GRACE_SECONDS + 3)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _clean_environment(private: str) -> dict[str, str]:
    """Ours without what would change the kernel: settings of another Python, of another Jupyter,
    start-up files. What decides which modules are found is left as it is."""
    prefixes = ("JUPYTER", "JPY_", "IPYTHON")
    names = {"PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONHOME", "PYTHONEXECUTABLE", "PYTHONBREAKPOINT"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(prefixes) and k not in names}
    return kept | {
        "IPYTHONDIR": private,
        "JUPYTER_RUNTIME_DIR": private,
        "JUPYTER_NO_CONFIG": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }


def _problem(executed: Path, code: int, cell: int, log: Path) -> str | None:
    """Why the execution is no success, in words; None if it is one."""
    cells = json.loads(executed.read_text(encoding="utf-8"))["cells"] if executed.exists() else []
    for candidate in cells:
        for output in candidate.get("outputs", []):
            # SystemExit too: papermill calls that a success and leaves out the cells that follow
            if output["output_type"] == "error":
                text = _ANSI.sub("", "\n".join(output["traceback"])).splitlines()
                told = text[-_TRACEBACK_LINES:] or [f"{output['ename']}: {output['evalue']}"]
                told = [shortened(line, _LINE_LENGTH) for line in told]
                place = f"cell In [{candidate['execution_count']}] failed"
                return "\n".join([place, *_indented(candidate), "", *told])
    if code != 0:
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        last = shortened(_ANSI.sub("", lines[-1]), _LINE_LENGTH) if lines else f"exit code {code}"
        if not 0 <= cell < len(cells):
            return f"could not be started: {last} (more in {log})"
        place = f"cell {cell + 1} of {len(cells)} did not return: {last}"
        return "\n".join([place, *_indented(cells[cell])])
    size = executed.stat().st_size
    if size >= MAX_BYTES:
        sizes = [len(json.dumps(c, ensure_ascii=False).encode()) for c in cells]
        largest = max(range(len(cells)), key=sizes.__getitem__)
        place = (
            f"executed notebook has {size:,} bytes and must stay below {MAX_BYTES:,}; "
            f"its largest cell is In [{cells[largest].get('execution_count')}] "
            f"with {sizes[largest]:,} bytes"
        )
        return "\n".join([place, *_indented(cells[largest])])
    return None


def _indented(cell: Mapping[str, Any]) -> list[str]:
    lines = [
        "    " + shortened(line, _LINE_LENGTH) for line in "".join(cell["source"]).splitlines()
    ]
    left_out = len(lines) - _TRACEBACK_LINES
    return lines if left_out <= 0 else [*lines[:_TRACEBACK_LINES], f"    ... ({left_out} lines)"]


def _files(value: Any) -> Iterator[Path]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _files(item)
    elif isinstance(value, str) and value and len(value) < 4096 and "\0" not in value:
        path = Path(value)
        try:
            if path.is_file():
                yield path
            elif os.sep in value and path.is_dir():
                yield from (p for p in path.rglob("*") if p.is_file())
        except OSError:
            return  # a text that no file system takes for a name


def _write_run(folder: Path, run: Run) -> None:
    write_atomic(folder / "run.json", run.model_dump_json(indent=1) + "\n")


def _now() -> datetime:
    return datetime.now(UTC)
