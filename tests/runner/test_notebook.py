"""Real notebooks through the runner, the grid, the command line and plain papermill."""

import ast
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
import typer

import workbench
from tests import needs
from workbench.cli.output import reported
from workbench.errors import InputError
from workbench.runner.grid import Grid, point_name, run_grid
from workbench.runner.notebook import MAX_BYTES, NotebookError, Run, read_run, run_dir, run_notebook

COMMAND = [sys.executable, "-m", "workbench.cli"]


def write(path: Path, *cells: str) -> Path:
    made = [nbformat.v4.new_code_cell(source) for source in cells]
    made[0].metadata["tags"] = ["parameters"]
    spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=made, metadata={"kernelspec": spec}), path)
    return path


def outputs(path: Path) -> list[Any]:
    """Each cell's result where that is a text of JSON, parsed; else None."""
    found = []
    for cell in nbformat.read(path, as_version=4).cells:
        texts = [o.data["text/plain"] for o in cell.get("outputs", []) if "data" in o]
        value = ast.literal_eval(texts[0]) if texts else None
        found.append(json.loads(value) if isinstance(value, str) else None)
    return found


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_values_record_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a kernel of another Python, installed for the user and named by the environment
    for folder in (".local/share/jupyter", "jupyter"):
        spec = tmp_path / folder / "kernels/python3/kernel.json"
        spec.parent.mkdir(parents=True)
        spec.write_text(json.dumps({"argv": ["false"], "display_name": "x", "language": "python"}))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "none.py"))
    data = tmp_path / "data.json"
    data.write_text("[1]")
    notebook = write(
        tmp_path / "01 {a}.ipynb",
        "ep = 8\nrate = 1.0\nfast = True\nname = 'x'\nsizes = [1]\nrows: int | None = 3\n"
        "data = ''\nout_dir = ''",
        "import json, os, sys\njson.dumps([ep, rate, fast, name, sizes, rows, data])",
        "json.dumps([sys.executable, os.getcwd(), os.environ.get('PYTHONSTARTUP')])",
        "from workbench.runner.notebook import run_dir\n"
        "(run_dir(out_dir) / 'out.txt').write_text('kept')",
    )
    text = 'quote " back\\slash é\nnew {line}'
    given = {
        "ep": "16",
        "rate": "1e-3",
        "fast": "false",
        "name": text,
        "sizes": "8,16",
        "rows": "none",
        "data": "data.json",
    }
    seen: list[tuple[int, int]] = []
    run = run_notebook(notebook, "runs/r", given, on_cell=lambda *at: seen.append(at))

    values = [16, 1e-3, False, text, [8, 16], None, "data.json"]
    executed = tmp_path / "runs/r/01 {a}.ipynb"
    assert outputs(executed)[2:4] == [values, [sys.executable, str(tmp_path), None]]
    assert seen == [(index, 5) for index in range(5)]
    assert sorted(p.name for p in executed.parent.iterdir()) == [
        "01 {a}.ipynb",
        "out.txt",
        "run.json",
    ]
    written = nbformat.read(executed, as_version=4).metadata.papermill
    assert written.output_path == "runs/r/01 {a}.ipynb"

    assert run == read_run(executed.parent)
    names = ["ep", "rate", "fast", "name", "sizes", "rows", "data"]
    assert run.parameters == dict(zip(names, values, strict=True))
    assert run.inputs == {"data.json": sha256(data)}
    assert (run.status, run.executed, run.error) == ("complete", "01 {a}.ipynb", None)
    assert (run.notebook_sha256, run.version) == (sha256(notebook), workbench.__version__)
    assert run.finished is not None
    assert run.seconds is not None
    assert 0 < run.seconds < 120
    assert abs((run.finished - run.started).total_seconds() - run.seconds) < 1


def test_an_error_of_millions_of_characters_is_cut(tmp_path: Path) -> None:
    notebook = write(tmp_path / "n.ipynb", "a = 1", "raise ValueError('begin ' + 'x' * 20_000_000)")
    with pytest.raises(NotebookError) as error:
        run_notebook(notebook, tmp_path / "out")
    run = read_run(tmp_path / "out")
    assert run is not None
    for told in (str(error.value), str(run.error)):
        assert len(told) < 30_000
        assert "ValueError: begin xxx" in told
        assert "characters) ... xxx" in told


def test_failures_leave_what_was_done_and_do_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = write(
        tmp_path / "n.ipynb",
        "act = 'fine'\nout_dir = ''",
        "open(f'{out_dir}/before.txt', 'w').write('kept')",
        "import os, sys\n"
        "if act == 'raise': raise ValueError('no such thing')\n"
        "if act == 'exit': sys.exit(0)\n"
        "if act == 'die': os._exit(3)\n"
        f"if act == 'big': print('x' * {MAX_BYTES})",
        "open(f'{out_dir}/after.txt', 'w').write('kept')",
    )
    folder, state = run_grid(notebook, ["act=raise,exit,die,big,fine"])
    assert folder.parent == Path("outputs/runs")
    told = capsys.readouterr().err
    errors = {}
    for point in state.points:
        act = point.given["act"]
        run = read_run(folder / point.name)
        assert run is not None
        names = {p.name for p in (folder / point.name).iterdir()}
        fine = act == "fine"
        assert (run.status, point.status) == ((("complete", "failed")[not fine],) * 2)
        assert ("n.ipynb" in names, "n.failed.ipynb" in names) == (fine, not fine)
        assert run.executed == ("n.ipynb" if fine else "n.failed.ipynb")
        assert "n.running.ipynb" not in names
        assert "before.txt" in names
        assert ("after.txt" in names) == (act in ("big", "fine"))
        errors[act] = run.error or ""
        assert errors[act] in told
        assert "\x1b" not in errors[act]
    assert "cell In [4] failed\n    import os, sys\n    if act == 'raise'" in errors["raise"]
    assert errors["raise"].endswith("ValueError: no such thing")
    assert "SystemExit: 0" in errors["exit"]
    assert errors["die"].startswith("cell 4 of 5 did not return: ")
    assert "Kernel died" in errors["die"]
    assert "    if act == 'die': os._exit(3)" in errors["die"]
    assert "must stay below 1,000,000; its largest cell is In [4] with 1,000," in errors["big"]
    assert "[5/5] act=fine: complete in " in told

    assert Grid.model_validate_json((folder / "points.json").read_bytes()) == state
    page = (folder / "index.html").read_text()
    assert "1 of 5 points complete, 4 failed" in page
    assert 'href="act%3Dfine/n.ipynb"' in page
    assert "ValueError: no such thing" in page


def test_resume(tmp_path: Path) -> None:
    data, broken = tmp_path / "data.txt", tmp_path / "broken"
    data.write_text("one")
    broken.touch()
    write(
        tmp_path / "n.ipynb",
        "ep = 8\ndata = 'data.txt'",
        "import json, os\nif ep == 16: assert not os.path.exists('broken')",
        "json.dumps([ep, open(data).read()])",
    )

    def state_of(*options: str) -> tuple[int, dict[str, tuple[int, Any]]]:
        command = [*COMMAND, "run", "n.ipynb", *options]
        code = subprocess.run(command, capture_output=True, text=True).returncode
        found = Path("outputs/runs").glob("*/*/n.ipynb")
        return code, {p.parent.name: (p.stat().st_mtime_ns, outputs(p)[-1]) for p in sorted(found)}

    code, first = state_of("-p", "ep=8,16")
    assert (code, list(first), first["ep=8"][1]) == (1, ["ep=8"], [8, "one"])
    broken.unlink()
    code, second = state_of("--resume")
    assert (code, second["ep=8"]) == (0, first["ep=8"])  # not run again
    assert second["ep=16"][1] == [16, "one"]
    data.write_text("two")
    code, third = state_of("--resume", "-p", "ep=8")
    assert (code, third["ep=8"][1]) == (0, [8, "two"])
    assert third["ep=16"] == second["ep=16"]
    assert len(list(Path("outputs/runs").iterdir())) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_ended_from_outside(tmp_path: Path, number: signal.Signals) -> None:
    notebook = write(
        tmp_path / "n.ipynb",
        "ep = 8\nout_dir = ''",
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "open('pids.tmp', 'w').write(f'{os.getpid()} {os.getppid()} {child.pid}')\n"
        "os.rename('pids.tmp', 'pids')\n"
        "time.sleep(600)",
    )
    command = [*COMMAND, "run", str(notebook), "-p", "ep=8,16", "--out", "r"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, preexec_fn=needs.heeded_signals
    )
    until = time.monotonic() + 60
    while not (tmp_path / "pids").exists():
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    _, told = process.communicate(timeout=30)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    while any(_runs(pid) for pid in pids):
        assert number == signal.SIGKILL  # else they were waited for
        assert time.monotonic() < until
        time.sleep(0.05)
    assert not list(tmp_path.glob("r/*/n.ipynb"))
    assert not (tmp_path / "r/ep=16").exists()
    run = read_run(tmp_path / "r/ep=8")
    assert run is not None
    if number == signal.SIGKILL:
        assert run.status == "running"  # which no resume takes for complete
        return
    assert process.returncode == 130
    assert "--resume goes on from here" in told
    assert "Traceback" not in told
    assert (run.status, run.error) == ("failed", "interrupted in cell 3 of 3")
    left = {path.name for path in (tmp_path / "r/ep=8").iterdir()}
    assert left - {"run.log"} == {"n.failed.ipynb", "run.json"}  # a kernel may die with a word
    state = Grid.model_validate_json((tmp_path / "r/points.json").read_bytes())
    assert [point.status for point in state.points] == ["failed", "waiting"]


def _runs(pid: int) -> bool:
    try:
        # an orphan that nobody reaps stays as a zombie where no init process runs
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_plain_papermill(tmp_path: Path) -> None:
    write(
        tmp_path / "n.ipynb",
        "ep = 8\nfast = True\nout_dir = ''",
        "import json\nfrom pydantic import BaseModel\n"
        "from workbench.runner.notebook import parameters\n"
        "class P(BaseModel):\n    ep: int\n    fast: bool\n    out_dir: str\n"
        "p = parameters(P, globals())\njson.dumps([p.ep, p.fast])",
        "from workbench.runner.notebook import run_dir\njson.dumps(str(run_dir(p.out_dir)))",
    )
    papermill = [sys.executable, "-m", "papermill", "-k", "python3", "--log-level", "ERROR"]
    run = [*papermill, "--no-progress-bar", "n.ipynb", "out.ipynb", "-p", "fast", "false"]
    assert subprocess.run([*run, "-p", "ep", "16"]).returncode == 0
    values = outputs(tmp_path / "out.ipynb")
    assert values[2] == [16, False]
    folder = Path(values[3])
    assert folder.parent == Path("outputs/runs")
    assert folder.is_dir()
    refused = subprocess.run([*run, "-p", "epp", "16"], capture_output=True, text=True)
    assert refused.returncode != 0
    assert "epp=16 is not a parameter (known parameters: ep, fast, out_dir)" in refused.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["-p", "nope=1"], "n.ipynb: nope='1' is not a parameter (known parameters: ep (int)"),
        (["-p", "ep=8,x"], "n.ipynb: ep='x' must be int"),
        (["--out", "n.ipynb/r"], "out=n.ipynb/r cannot be written: Not a directory"),
        (["--out", "done"], "out=done has a run already"),
        (["--resume"], "resume: no run of n.ipynb in outputs/runs"),
        (["--resume", "gone"], "resume=gone must be a run in outputs/runs (none)"),
    ],
)
def test_bad_input_is_one_line_and_runs_nothing(
    tmp_path: Path, options: list[str], told: str
) -> None:
    write(tmp_path / "n.ipynb", "ep = 8\nout_dir = ''", "open('ran', 'w')")
    (tmp_path / "done").mkdir()
    (tmp_path / "done/points.json").write_text("{}")
    command = [*COMMAND, "run", "n.ipynb", *options]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {told}")
    assert result.stderr.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["done", "n.ipynb"]


def test_command_that_executes_one_notebook(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = write(tmp_path / "n.ipynb", "ep = 8", "assert ep == 8, 'not eight'")
    with reported("n.ipynb") as on_cell:
        run = run_notebook(notebook, Path("r"), {"ep": 8}, on_cell=on_cell)
    assert run == read_run(tmp_path / "r")
    with pytest.raises(typer.Exit) as end, reported("n.ipynb"):
        run_notebook(notebook, Path("r"), {"ep": 9})
    assert end.value.exit_code == 1
    assert "AssertionError: not eight" in capsys.readouterr().err
    assert sorted(p.name for p in Path("r").iterdir()) == ["n.failed.ipynb", "run.json"]


def test_refused_before_anything_is_written(tmp_path: Path) -> None:
    notebook = write(tmp_path / "n.ipynb", "ep = 8")
    with pytest.raises(InputError, match="ep='x' must be int"):
        run_notebook(notebook, "r", {"ep": "x"})
    with pytest.raises(InputError, match="epp=8 is not a parameter"):
        run_notebook(notebook, "r", {"epp": 8})
    assert not Path("r").exists()


def test_same_work_looks_at_notebook_parameters_inputs_and_version() -> None:
    run = Run.model_validate(
        {
            "status": "complete",
            "notebook": "n",
            "notebook_sha256": "a",
            "version": "1",
            "parameters": {"x": float("nan")},
            "inputs": {"f": "1"},
            "started": "2026-12-01T00:00:00Z",
        }
    )
    assert run.same_work(Run.model_validate_json(run.model_dump_json()))
    assert run.same_work(run.model_copy(update={"notebook": "m", "seconds": 2.0}))
    for change in (
        {"notebook_sha256": "b"},
        {"version": "2"},
        {"parameters": {"x": 1.0}},
        {"inputs": {"f": "2"}},
        {"inputs": {}},
    ):
        assert not run.same_work(run.model_copy(update=change))


def test_inputs_are_files_and_folders_with_a_slash(tmp_path: Path) -> None:
    from workbench.runner.notebook import plan_run

    for name in ("a.txt", "set/b.txt", "set/deep/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    notebook = write(tmp_path / "n.ipynb", "files = ['a.txt', 'gone', '']\nrecords = 'set'")
    assert plan_run(notebook, {}).inputs == {"a.txt": sha256(tmp_path / "a.txt")}
    with_folder = plan_run(notebook, {"records": "set/"}).inputs
    assert set(with_folder) == {"a.txt", "set/b.txt", "set/deep/c.txt"}


def test_point_names() -> None:
    assert point_name({}) == "defaults"
    assert point_name({"ep": 8, "precision": "bf16"}) == "ep=8,precision=bf16"
    names = [point_name({"file": text}) for text in ("a/b", "a:b", "a b", "x" * 300, "x" * 301)]
    assert len(set(names)) == 5
    assert all("/" not in name and len(name) < 120 for name in names)


def test_run_dir_and_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("outputs", "notebooks"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    first, second = run_dir(), run_dir("")
    assert first != second
    assert first.parent == second.parent == tmp_path / "outputs/runs"
    assert run_dir(tmp_path / "x/y").is_dir()


def test_help_is_complete_and_imports_little() -> None:
    code = (
        "import sys, workbench.cli\n"
        "print(sorted({'pydantic', 'papermill', 'torch', 'plotly', 'pandas'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
    env = os.environ | {"COLUMNS": "200", "NO_COLOR": "1"}
    text = subprocess.check_output([*COMMAND, "run", "--help"], text=True, env=env)
    for said in ("-p 'sizes=[8,16]' is one list", "--resume", "[RUN_ID]", "--out", "exit code"):
        assert said in text
    version = subprocess.check_output([*COMMAND, "--version"], text=True)
    assert version == f"moe-workbench {workbench.__version__}\n"


def test_other_points_in_a_resumed_run(tmp_path: Path) -> None:
    """The points that a run has stay in its index, whichever are asked for later."""
    notebook = write(tmp_path / "n.ipynb", "ep = 8", "import json", "json.dumps(ep)")
    folder, first = run_grid(notebook, ["ep=8"], out=tmp_path / "r")
    assert [point.name for point in first.points] == ["ep=8"]
    _, second = run_grid(notebook, ["ep=16"], out=folder, resume="latest")
    assert [(p.name, p.status) for p in second.points] == [
        ("ep=8", "complete"),
        ("ep=16", "complete"),
    ]
    assert second.points[0].seconds == first.points[0].seconds
    assert Grid.model_validate_json((folder / "points.json").read_bytes()) == second
    page = (folder / "index.html").read_text()
    assert "2 of 2 points complete" in page
    assert 'href="ep%3D8/n.ipynb"' in page
    # without parameters all of them are gone through
    (folder / "ep=8/run.json").unlink()
    _, third = run_grid(notebook, [], out=folder, resume="latest")
    assert [(p.name, p.status, p.resumed) for p in third.points] == [
        ("ep=8", "complete", False),
        ("ep=16", "complete", True),
    ]


def test_a_folder_without_a_run_or_with_another_is_not_resumed(tmp_path: Path) -> None:
    notebook = write(tmp_path / "n.ipynb", "ep = 8")
    with pytest.raises(InputError, match=r"out=.*WRONG holds no run to resume"):
        run_grid(notebook, ["ep=16"], out=tmp_path / "WRONG", resume="latest")
    assert not (tmp_path / "WRONG").exists()
    folder, _ = run_grid(notebook, [], out=tmp_path / "r")
    before = (folder / "points.json").read_bytes()
    other = write(tmp_path / "m.ipynb", "ep = 8")
    with pytest.raises(InputError, match=r"holds a run of .*n\.ipynb, not of .*m\.ipynb"):
        run_grid(other, [], out=folder, resume="latest")
    assert (folder / "points.json").read_bytes() == before
