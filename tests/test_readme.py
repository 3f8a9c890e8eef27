"""README.md is what people type: its commands are understood, its files there, its Python runs.

Read from the top, in a folder that has the repository's notebooks and nothing else. A file must be
in the repository, or made further up. Commands of a second or two are really run; of the others,
which measure, compile, submit or execute notebooks for minutes and have tests of their own, the
options are parsed and what they are given is checked as the command itself would first.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from markdown_it import MarkdownIt
from markdown_it.token import Token
from papermill.cli import papermill

from workbench.bench.matrix import check_pipelines, load_matrix
from workbench.case import reference_matrix
from workbench.cli import _bare_resume, app
from workbench.hardware import load_hardware
from workbench.model.calibration import load_calibration
from workbench.runner.main_job import NOTEBOOK
from workbench.runner.parameters import grid, notebook_parameters

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RUN = ("predict", "calibrate")
READ = ("notebook", "results", "calibration", "hardware_file", "trace", "sweep_dir")
"""Options of commands and parameters of notebooks that name what must be there; "" is the default.
"""
RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
"""What torchrun sets, for a group of one: to start two ranks takes longer, and test_ranks does."""

Command = Callable[[list[str]], None]


def tokens() -> list[Token]:
    """All parts of the text in order, those within paragraphs and tables too."""
    found = []
    for token in MarkdownIt().enable("table").parse(README):
        found += [token, *(token.children or ())]
    return found


FENCES = [token for token in tokens() if token.type == "fence"]
INLINE = [token.content for token in tokens() if token.type == "code_inline"]


def shell_lines(token: Token) -> list[str]:
    """The command lines of a block, or of code in a sentence that is one."""
    if token.type == "fence":
        return token.content.splitlines() if token.info == "sh" else []
    words = token.content.split() if token.type == "code_inline" else []
    if len(words) == 2 and words[0] == "workbench":  # a sentence about a command: there is one
        words.append("--help")
    return [shlex.join(words)] if len(words) > 1 and words[0] in COMMANDS else []


def options_of(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """Name and options of the `workbench` command that would run; nothing is run."""
    found: list[tuple[str, dict[str, Any]]] = []
    root = typer.main.get_command(app)

    def only_record(command: Any, name: str) -> None:
        for sub, below in getattr(command, "commands", {}).items():
            only_record(below, f"{name} {sub}".strip())
        if not hasattr(command, "commands"):
            command.callback = lambda *_, **options: found.append((name, options))

    only_record(root, "")
    root.main(_bare_resume(arguments), standalone_mode=False)
    return found[0] if found else ("help", {})


def check_files(given: dict[str, Any]) -> None:
    for name in READ:
        if given.get(name):
            assert Path(given[name]).exists(), f"{name}={given[name]} is in no line above"


def check_notebook(notebook: Path, params: list[str] | None) -> None:
    """As `workbench run` begins: the parameters are the notebook's, of its types, and are there."""
    for point in grid(notebook, notebook_parameters(notebook), params or []):
        check_files(point)
        if point.get("hardware"):
            load_hardware(point["hardware"], point.get("hardware_file") or None)


def workbench(arguments: list[str]) -> None:
    name, options = options_of(arguments)
    check_files(options)
    if name in RUN or options.get("show"):
        app(arguments, standalone_mode=False)
    elif name in ("run", "report"):
        check_notebook(options.get("notebook", NOTEBOOK), options["param"])
    elif name == "sweep":
        if options["resume"]:
            assert options["out"].is_dir()
        else:
            cases = load_matrix(options["matrix"])
            check_pipelines(cases)
            assert all(case.ep % options["nnodes"] == 0 for case in cases)
        for folder in filter(None, (options["out"], options["beside"])):
            folder.mkdir(parents=True, exist_ok=True)  # as the sweep would leave it
    elif name == "compare":
        assert all(Path(value).is_dir() for key, value in options.items() if key[:4] == "run_")


def make(arguments: list[str]) -> None:
    targets = {line.partition(":")[0] for line in (ROOT / "Makefile").read_text().splitlines()}
    assert set(arguments) <= targets


def papermill_as_it_is(arguments: list[str]) -> None:
    given = papermill.make_context("papermill", list(arguments)).params
    known = notebook_parameters(given["notebook_path"])
    assert dict(given["parameters"]).keys() <= known.keys()
    load_hardware(dict(given["parameters"])["hardware"])


COMMANDS: dict[str, Command] = {
    "workbench": workbench,
    ".venv/bin/workbench": workbench,
    "make": make,
    "papermill": papermill_as_it_is,
}


def python(source: str) -> None:
    """Runs a block in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, **RANK},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_block_from_the_top(folder: Path) -> None:
    ran = []
    for token in tokens():
        if token.type == "fence" and token.info == "python":
            python(token.content)
        elif token.type == "fence" and token.info in ("yaml", "toml"):
            name = token.content.removeprefix("# ").split()[0].rstrip(":")
            (folder / name).write_text(token.content)
        for line in shell_lines(token):
            words = shlex.split(line, comments=True)
            assert not {"&&", "..."}.intersection(words), line
            try:
                COMMANDS[words[0]](words[1:])
            except (Exception, SystemExit) as error:
                raise AssertionError(f"{line}: {error}") from error
            ran.append(words[:2])
    assert ["workbench", "predict"] in ran
    assert ["workbench", "sweep"] in ran
    assert len(load_calibration("mine.json").ranges) > 0


def test_blocks_are_of_kinds_that_are_tried() -> None:
    assert {token.info for token in FENCES} == {"sh", "python", "yaml", "toml", ""}
    (diagram,) = [token.content for token in FENCES if not token.info]
    assert diagram.startswith("case -> routing")  # no command


def test_what_the_text_names_is_there() -> None:
    named = {text for text in INLINE if "/" in text and " " not in text and "<" not in text}
    named |= {text for text in INLINE if text.endswith((".txt", ".ipynb"))}
    made = {"outputs/", ".venv/bin/workbench"}
    below = {"grid.py": "workbench"}
    missing = [n for n in sorted(named - made) if not (ROOT / below.get(n, "") / n).exists()]
    assert not missing
    images = [t.attrs["src"] for t in tokens() if t.type == "image"]
    assert len(images) == 2
    assert all((ROOT / str(image)).is_file() for image in images)


def test_what_the_text_counts() -> None:
    calibration = load_calibration()
    parameters = sum(len(by_slot) for by_slot in calibration.values.values())
    assert f"A time model with {parameters} physical parameters" in README
    assert f"{len(reference_matrix())} measured cases" in " ".join(README.split())
