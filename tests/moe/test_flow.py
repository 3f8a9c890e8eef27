"""Imports point one way along the flow, and arithmetic needs no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import workbench

ROOT = Path(workbench.__file__).parents[1]
FLOW = ("errors", "case", "hardware", "routing", "kernels", "moe", "bench")
MOE = ("config", "plan_ours", "traffic", "failures", "pages", "group", "step", "pipelines",
       "executor_torch", "context", "autograd", "layer")  # fmt: skip


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_layer_modules_import_along_the_flow():
    for path in (ROOT / "workbench" / "moe").rglob("*.py"):
        for name in _imports(path):
            if name.startswith("workbench."):
                assert name.split(".")[1] in FLOW[: FLOW.index("moe") + 1], (path, name)


def test_modules_of_the_layer_import_only_earlier_ones():
    for place, name in enumerate(MOE):
        path = ROOT / "workbench" / "moe" / name
        files = [*path.glob("*.py")] if path.is_dir() else [path.with_suffix(".py")]
        assert files
        for file in files:
            later = {f"workbench.moe.{other}" for other in MOE[place + 1 :]}
            assert not _imports(file) & later, file


def test_kernels_import_nothing_of_workbench_and_nobody_imports_them_by_their_folder():
    for path in (ROOT / "kernels").glob("*.py"):
        assert not any(name.startswith("workbench") for name in _imports(path)), path
    for folder in ("workbench", "kernels", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not any(name.split(".")[0] == "kernels" for name in _imports(path)), path


def test_plan_and_routing_need_no_torch():
    code = (
        "import sys, workbench.moe.config, workbench.moe.plan_ours, workbench.routing;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
