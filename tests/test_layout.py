"""Files stay small, names are given once, and nothing is written twice."""

import ast
import re
import statistics
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
