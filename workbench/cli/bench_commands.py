"""`workbench bench ...`: parts of the workbench itself, measured."""

from pathlib import Path
from typing import Any

import typer

from workbench.cli.output import Json, print_figures

bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Measure parts of the workbench itself; a table for people, or `--json` for one line of "
    "named figures.",
)


@bench.command("kernels")
def bench_kernels_command(as_json: Json = False) -> None:
    """Triton kernels against torch's grouped product, cuBLAS and `alltoall`, on a GPU.

    Ratios are of rates: above 1 ours is faster.
    """
    from workbench.bench.kernel_bench import bench_kernels

    print_figures(bench_kernels(), as_json)


@bench.command("plan")
def bench_plan_command(as_json: Json = False) -> None:
    """Time to cost and plan a table of 100,000 random cases."""
    from workbench.cli.speed import bench_plan

    print_figures(bench_plan(), as_json)


@bench.command("predict")
def bench_predict_command(cases: int = 1_000_000, as_json: Json = False) -> None:
    """Time to predict a table of a million random cases."""
    from workbench.cli.speed import bench_predict

    print_figures(bench_predict(cases), as_json)


@bench.command("layer")
def bench_layer_command(rounds: int = 15, transformers: bool = True, as_json: Json = False) -> None:
    """The layer on this machine's cores against the dense products it is made of, and against
    transformers' DeepSeek-V3 MoE block (pip install transformers, or --no-transformers)."""
    from workbench.bench.layer_bench import bench_layer

    print_figures(bench_layer(rounds=rounds, transformers=transformers), as_json)


@bench.command("explore")
def bench_explore_command(changes: int = 200, as_json: Json = False) -> None:
    """Time from a control's change to the updated figure, for each explorer, in the kernel."""
    from workbench.cli.speed import bench_explore

    print_figures(bench_explore(changes), as_json)


@bench.command("runner")
def bench_runner(repeats: int = 3, as_json: Json = False) -> None:
    """Time from call to return for a notebook that does nothing: what the runner itself costs."""
    import statistics
    import tempfile
    import time

    import nbformat

    from workbench.runner.notebook import run_notebook

    cell = nbformat.v4.new_code_cell("n = 1", metadata={"tags": ["parameters"]})
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "empty.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
        for repeat in range(repeats):
            began = time.perf_counter()
            run_notebook(path, Path(folder) / str(repeat), {"n": repeat})
            seconds.append(time.perf_counter() - began)
    median, worst = statistics.median(seconds), max(seconds)
    figures: dict[str, Any] = {"median_s": median, "max_s": worst, "repeats": repeats}
    print_figures(figures, as_json)


@bench.command("sweep")
def bench_sweep_command(as_json: Json = False) -> None:
    """Time that the harness of a sweep adds to a case, on the local matrix."""
    from workbench.cli.speed import bench_sweep

    print_figures(bench_sweep(), as_json)
