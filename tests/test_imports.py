"""Imports point one way along the data flow, and `import workbench` stays light."""

import ast
import graphlib
import json
import re
import subprocess
import sys
from collections.abc import Container
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOW = (
    ("errors",),
    ("files",),
    ("extensions",),
    ("systems",),
    ("case",),
    ("routing", "hardware", "records"),
    ("kernels",),
    ("domain",),
    ("cuda",),
    ("runtime",),
    ("moe.config", "moe.weights"),
    ("planning.arithmetic", "moe.oracle", "moe.pipelines"),
    ("planning.reference_table", "moe.arena"),
    ("planning.reference",),
    ("planning.case_plan", "moe.failures", "moe.pages", "moe.step"),
    ("moe.groups",),
    ("moe.executor_torch",),
    ("moe.executor_triton",),
    ("moe.executor_library",),
    ("moe.context",),
    ("moe.autograd",),
    ("moe.layer",),
    ("model",),
    ("bench",),
    ("report",),
    ("explore",),
    ("runner", "lab"),
    ("cli",),
)
RANK = {part: rank for rank, parts in enumerate(FLOW) for part in parts}
LIGHT = ("errors", "case", "routing", "hardware", "planning", "moe.config", "model", "cli")
"""Modules and packages whose import brings neither torch nor plotly."""


def module_name(path: Path) -> str:
    """`workbench/moe/step.py` -> `workbench.moe.step`; `kernels/x.py` -> `workbench.kernels.x`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts if parts[0] == "workbench" else ("workbench", *parts))
    return name.removesuffix(".__init__")


def place(name: str) -> str:
    """The part of the flow that the dotted name `workbench.x.y` belongs to: `x.y`, or `x`."""
    parts = name.split(".")[1:]
    return ".".join(parts[:2]) if ".".join(parts[:2]) in RANK else (parts or [""])[0]


def imported(source: str, module: str, *, package: bool = False, types: bool = True) -> set[str]:
    """Absolute dotted names that `source`, read as `module`, imports anywhere in it; without
    `types`, not those under `if TYPE_CHECKING:`."""
    names: set[str] = set()
    tree = ast.parse(source)
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in for_types and not types:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")
            base = parents[: len(parents) - node.level + package] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names.update(f"{stem}.{alias.name}" for alias in node.names)
    return names


def against_the_flow(source: str, module: str, *, package: bool = False) -> list[str]:
    """What `module` imports from further along the flow, or sideways; [] if all is well.

    Within a package types may be imported from further along."""
    part = place(module)
    wrong = []
    run = imported(source, module, package=package, types=False)
    for name in sorted(imported(source, module, package=package)):
        if not name.startswith("workbench."):
            continue
        target = place(name)
        if name not in run and target.split(".")[0] == part.split(".")[0]:
            continue
        if target.startswith("__") or target == part:
            continue
        if part not in RANK or RANK.get(target, len(FLOW)) >= RANK[part] or part == "kernels":
            wrong.append(f"{module} imports {name}")
    return wrong


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_every_module_has_its_place_in_the_flow() -> None:
    names = {module_name(path) for path in python_files("workbench", "kernels")}
    assert {
        place(name) for name in names - {"workbench", "workbench.moe", "workbench.planning"}
    } <= set(RANK)


def test_no_module_imports_itself_through_others() -> None:
    paths = {module_name(path): path for path in python_files("workbench", "kernels")}
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        package = path.name == "__init__.py"
        found = imported(path.read_text(), name, package=package, types=False)
        targets = {_module(target, paths) for target in found}
        graph[name] = targets - {"", name, "workbench"}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) >= len(paths) - 1


def _module(name: str, known: Container[str]) -> str:
    """The module that a dotted name lies in; "" where it is none of ours."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def test_imports_follow_the_flow() -> None:
    files = python_files("workbench", "kernels")
    assert ROOT / "workbench/case.py" in files
    wrong = [
        line
        for path in files
        for line in against_the_flow(
            path.read_text(), module_name(path), package=path.name == "__init__.py"
        )
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("source", "module", "wrong"),
    [
        ("import workbench.routing", "workbench.case", "workbench.routing"),
        ("from workbench import cli", "workbench.model.cost", "workbench.cli"),
        ("def f():\n    from ..report import figures", "workbench.moe.step", "report.figures"),
        ("from workbench.errors import InputError", "workbench.kernels.gemm", "errors.InputError"),
        (
            "from workbench.hardware import Hardware",
            "workbench.records.schema",
            "hardware.Hardware",
        ),
        ("import workbench.unheard", "workbench.cli", "workbench.unheard"),
        ("from workbench.bench import sweep", "workbench.model.fit", "workbench.bench.sweep"),
        ("from workbench.moe.layer import MoELayer", "workbench.moe.context", "layer.MoELayer"),
        ("from .pipelines.parts import Part", "workbench.moe.config", "pipelines.parts.Part"),
        ("from workbench.moe import executor_triton", "workbench.moe.step", "executor_triton"),
        ("if TYPE_CHECKING:\n    import workbench.cli", "workbench.moe.step", "workbench.cli"),
    ],
)
def test_an_import_against_the_flow_is_found(source: str, module: str, wrong: str) -> None:
    (line,) = against_the_flow(source, module)
    assert line.endswith(wrong)


@pytest.mark.parametrize(
    ("source", "module"),
    [
        (
            "from workbench.planning import reference\nfrom workbench.records.record import R",
            "model.fit",
        ),
        ("from . import cost\nfrom ..errors import InputError", "model.roofline"),
        ("from .tile import x\nimport torch", "kernels.gemm"),
        ("from workbench import __version__", "cli"),
        ("if TYPE_CHECKING:\n    from workbench.moe.step import Step", "moe.pipelines.parts"),
    ],
)
def test_an_import_along_the_flow_passes(source: str, module: str) -> None:
    assert against_the_flow(source, f"workbench.{module}") == []


def test_a_relative_import_in_a_package_file_is_resolved() -> None:
    assert imported("from .step import f", "workbench.moe", package=True) == {
        "workbench.moe.step.f"
    }


def test_nothing_imports_a_top_level_package_called_kernels() -> None:
    for path in python_files("workbench", "kernels", "tests"):
        names = imported(path.read_text(), module_name(path), package=path.name == "__init__.py")
        assert not {name for name in names if name.split(".")[0] == "kernels"}, path
    for path in (ROOT / "notebooks").rglob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        assert not re.search(r"^\s*(import|from) kernels\b", code, re.MULTILINE), path


def test_import_workbench_is_light() -> None:
    assert _loaded("workbench", "torch", "plotly", "pandas", "pydantic", "numpy") == []


def test_arithmetic_modules_bring_neither_torch_nor_plotly() -> None:
    modules = [
        name
        for path in python_files("workbench")
        if (name := module_name(path)).partition(".")[2].startswith(LIGHT)
    ]
    assert {"workbench.case", "workbench.hardware", "workbench.routing"} <= set(modules)
    assert _loaded(",".join(modules), "torch", "plotly") == []


def _loaded(modules: str, *heavy: str) -> list[str]:
    """Which of `heavy` are loaded after importing `modules` in a fresh interpreter."""
    code = f"import sys, {modules}\nprint([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(ast.literal_eval(done.stdout))
