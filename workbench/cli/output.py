"""What several commands print, and how."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON line of named figures.")]


def print_figures(figures: Mapping[str, float | int | str], as_json: bool) -> None:
    """What a `bench` command prints: one JSON line, or a table. Names end in their unit."""
    if as_json:
        print(json.dumps(figures))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", "value")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console().print(table)


def print_frame(frame: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*map(str, frame.columns))
    for row in frame.itertuples(index=False, name=None):
        table.add_row(
            *("" if v != v else f"{v:,.4g}" if isinstance(v, float) else str(v) for v in row)
        )
    console = Console()
    Console(width=None if console.is_terminal else 200).print(table)


def show_parameters(notebook: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from workbench.runner.parameters import notebook_parameters

    table = Table("parameter", "type", "default", "")
    for p in notebook_parameters(notebook).values():
        table.add_row(p.name, p.kind_name, repr(p.default), p.help)
    Console().print(table)


@contextmanager
def reported(name: str) -> Iterator[Callable[[int, int], None]]:
    """Around one notebook: progress on stderr by the yielded `on_cell`; a failing cell is shown and
    ends the command with exit code 1, Ctrl-C with 130."""
    from workbench.runner.notebook import NotebookError

    try:
        with _cell_progress(name) as on_cell:
            yield on_cell
    except NotebookError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(130) from None


@contextmanager
def _cell_progress(name: str) -> Iterator[Callable[[int, int], None]]:
    if not sys.stderr.isatty():
        yield lambda index, cells: None if index else print(f"{name}: started", file=sys.stderr)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=None)
        yield lambda index, cells: bar.update(task, completed=index, total=cells)
        bar.update(task, completed=1, total=1)
