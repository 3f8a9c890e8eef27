"""Files stay small, names are given once, nothing is written twice, imports are declared."""

import ast
import re
import statistics
import sys
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = sorted(path for part in ("workbench", "kernels") for path in (ROOT / part).rglob("*.py"))
LONGEST_COPY = 12
"""Lines in a row that may stand in two places."""
IDLE = re.compile(r"(#|import |from )|\w+(: [^=()]+)?( ?= ?[\w.]+)?,$")


def test_files_are_small() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in FILES}
    assert {path.name: n for path, n in lines.items() if n > 400} == {}
    assert statistics.median(lines.values()) < 180


def test_no_two_modules_or_classes_share_a_name() -> None:
    modules = Counter(path.stem for path in FILES if not path.stem.startswith("__"))
    classes = Counter(
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, n in (modules + classes).items() if n > 1] == []


def test_no_long_run_of_lines_stands_twice() -> None:
    assert len(runs_of("a\n" * 14)) + 12 > LONGEST_COPY  # what follows sees a run
    places = defaultdict(set)
    for path in FILES:
        for at, run in runs_of(path.read_text()):
            places[run].add((path.relative_to(ROOT).as_posix(), at))
    assert [sorted(found) for found in places.values() if len(found) > 1] == []


def runs_of(text: str) -> list[tuple[int, str]]:
    """(line, text) of every run of LONGEST_COPY + 1 lines that do something: no blank lines,
    imports, comments, or arguments one to a line, which an op, its twin and its calls share."""
    lines = [
        (n, line.strip())
        for n, line in enumerate(text.splitlines(), 1)
        if line.strip() and not IDLE.match(line.strip())
    ]
    return [
        (lines[n][0], "\n".join(line for _, line in lines[n : n + LONGEST_COPY + 1]))
        for n in range(len(lines) - LONGEST_COPY)
    ]


NAMES = {
    "pyyaml": "yaml",
    "ipython": "IPython",
    "markdown-it-py": "markdown_it",
    "nvidia-ml-py": "pynvml",
}
"""Packages whose module has another name, beyond a dash."""
WITHOUT_IMPORT = {"anywidget", "jupyterlab"}
"""Needed though nothing imports them; pyproject.toml says why."""
ASKED_FOR = {"transformers"}
"""Imported by a benchmark that says so where it is missing."""


def imported(*folders: str) -> set[str]:
    """Top-level modules from elsewhere that the files of the folders import."""
    found = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    own = {path.stem for path in (ROOT / "tests").rglob("*.py")} | {"workbench", "tests"}
    return found - own - set(sys.stdlib_module_names)


def modules_of(requirements: list[str]) -> set[str]:
    packages = {re.split(r"[<>=\[ ]", requirement)[0] for requirement in requirements}
    return {NAMES.get(package, package.replace("-", "_")) for package in packages}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = modules_of(project["dependencies"])
    assert imported("workbench", "kernels") - ASKED_FOR == declared - WITHOUT_IMPORT
    for_tests = modules_of(project["optional-dependencies"]["test"])
    assert imported("tests") - declared <= for_tests | {"dist_moe"}  # tools/install has its reason
