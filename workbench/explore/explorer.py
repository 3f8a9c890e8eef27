"""What the explorers have in common: controls on the left, sentence and figure on the right.

All state is in the controls. A change reads them, computes the view and updates the figure's
traces in place, so that zoom and selection stay. A state that is impossible is explained above the
figure, which then still shows the last possible one.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import ipywidgets as widgets
import numpy as np
import pandas as pd
import plotly.graph_objects as go
import traitlets

from workbench.case import MODES
from workbench.errors import InputError
from workbench.explore.sources import (
    ShapeState,
    Sources,
    View,
    WorkloadState,
    find_file,
    workload_name,
)
from workbench.files import write_atomic
from workbench.report.export import Exported, export_figures
from workbench.report.figures_explore import Spec
from workbench.report.theme import PRECISIONS, system_name

LABEL = {"description_width": "96px"}
MAX_EP = 1024
SHAPE = {"F": (32, 16384), "T": (1, 65536), "D": (64, 16384), "E": (1, 4096), "K": (1, 64),
         "sharedExperts": (0, 8)}  # fmt: skip
"""Controls of the shape, and the range of each."""


def control_layout() -> widgets.Layout:
    return widgets.Layout(width="286px", margin="1px 4px 1px 0")


def show(control: widgets.Widget, shown: bool) -> None:
    """Show or hide a control."""
    control.layout.display = None if shown else "none"


class Explorer:
    """One explorer. `figure()`, `table()`, `sentence()` and `export()` are those of the current
    state and raise InputError, with the reason, while it is impossible."""

    name: ClassVar[str]
    file_types: ClassVar[str] = ""
    """What the upload accepts, e.g. `.csv,.npz`; empty for no upload."""
    file_label: ClassVar[str] = ""

    def __init__(self, state: ShapeState, sources: Sources) -> None:
        self.sources = sources
        self.problem = ""
        self._quiet = False
        self.live: go.FigureWidget | None = None
        self._message, self._file_message = widgets.HTML(), widgets.HTML()
        self._sentence, self._notes, self._rows = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self._more = widgets.Accordion([self._rows], titles=["Table"])
        self.controls: dict[str, Any] = self.build(state)
        self.controls["results"] = widgets.Text(
            value=sources.own, placeholder="outputs/runs/<id>", continuous_update=False,
            description="own results", style=LABEL, layout=control_layout(),
        )  # fmt: skip
        self.upload = widgets.FileUpload(
            accept=self.file_types, description=self.file_label, layout=control_layout()
        )
        with self.quiet():
            self.constrain()
        self.view: View = self.compute(self.state)
        for name, control in self.controls.items():
            control.observe(self._own_results if name == "results" else self._changed, "value")
        self.upload.observe(self._uploaded, "value")
        self._more.observe(lambda _: self._tell(), "selected_index")

    def build(self, state: Any) -> dict[str, Any]:
        """The controls, by the name of the state's field that each holds."""
        raise NotImplementedError

    @property
    def state(self) -> Any:
        """The state that the controls are in."""
        raise NotImplementedError

    def compute(self, state: Any) -> View:
        """The view of a state. Raises InputError where it is impossible."""
        raise NotImplementedError

    def constrain(self) -> None:
        """Adjust controls that depend on others, so that they offer only what is possible."""

    def take_file(self, name: str, content: bytes) -> str:
        """Use an uploaded file; returns what to say of it. Raises InputError."""
        raise NotImplementedError

    @property
    def message(self) -> str:
        """What stands in the warning above the figure, as plain text; "" for none."""
        return _plain(self._message.value)

    @property
    def file_message(self) -> str:
        """What is said of the file that was last loaded, as plain text."""
        return _plain(self._file_message.value)

    def figure(self) -> go.Figure:
        return self._possible().figure

    def table(self) -> pd.DataFrame:
        return self._possible().table

    def sentence(self) -> str:
        """What the state means, as plain text."""
        view = self._possible()
        return "\n".join([_plain(view.sentence), *view.notes])

    def export(self, folder: str | Path, formats: Sequence[str] = ("html", "svg")) -> Exported:
        """Write figure and table of the current state into `folder`. Raises InputError."""
        view, folder = self._possible(), Path(folder)
        exported = export_figures({self.name: view.figure}, folder, formats)
        write_atomic(folder / f"{self.name}-table.csv", view.table.to_csv(index=False))
        return exported

    def _possible(self) -> View:
        if self.problem:
            raise InputError(self.problem)
        return self.view

    def show(self) -> None:
        """Display the widgets in a notebook."""
        from IPython.display import display

        display(self.widget())

    def widget(self) -> widgets.Box:
        """Controls and live figure as one widget."""
        if self.live is None:
            self.live = go.FigureWidget(self.view.spec)
            self.live.layout.width = None
            self.live.layout.autosize = True
        self._tell()
        held = [c for name, c in self.controls.items() if name != "results"]
        files = [self.controls["results"], *([self.upload] if self.file_types else [])]
        box = widgets.Box(
            [*held, *files],
            layout=widgets.Layout(
                flex="1 1 290px", flex_flow="row wrap", align_content="flex-start"
            ),
        )
        right = widgets.VBox(
            [
                self._message,
                self._file_message,
                self._sentence,
                self._notes,
                self.live,
                self._more,
            ],
            layout=widgets.Layout(flex="100 1 560px", min_width="500px", max_width="860px"),
        )
        return widgets.Box([box, right], layout=widgets.Layout(flex_flow="row wrap", width="100%"))

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Controls may be set inside without a refresh for each."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def set(self, **values: Any) -> None:
        """Set several controls, then refresh once."""
        with self.quiet():
            for name, value in values.items():
                self.controls[name].value = value
                self.constrain()
        self.refresh()

    def _changed(self, _change: Any) -> None:
        if self._quiet:
            return
        with self.quiet():
            self.constrain()
        self.refresh()

    def refresh(self) -> None:
        """Compute the state's view and show it, or say why there is none."""
        try:
            view = self.compute(self.state)
            self.problem = ""
        except InputError as error:
            self.problem = str(error)
            self._tell()
            return
        before, self.view = self.view, view
        if self.live is not None:
            update_in_place(self.live, before.spec, view.spec)
        self._tell()

    def _tell(self) -> None:
        if self.live is None:
            return
        hint = "The figure shows the last possible state."
        self._message.value = (
            _alert(f"Not possible: {self.problem}. {hint}") if self.problem else ""
        )
        self._sentence.value = f'<div style="line-height:1.4">{self.view.sentence}</div>'
        self._notes.value = "".join(f"<i>{html.escape(note)}</i><br>" for note in self.view.notes)
        if self._more.selected_index == 0:
            self._rows.value = html_table(self.view.rows)

    def _uploaded(self, change: Any) -> None:
        for file in change["new"]:
            try:
                told = self.take_file(file["name"], bytes(file["content"]))
                self._file_message.value = html.escape(told)
            except InputError as error:
                self._file_message.value = _alert(str(error))

    def _own_results(self, change: Any) -> None:
        """Take the user's records; where none has the workload shown, go to one of theirs."""
        text = change["new"].strip()
        own = replace(self.sources, own=str(find_file(text)) if text else "")
        try:
            rows = own.own_rows
        except InputError as error:
            self._file_message.value = _alert(str(error))
            return
        self.sources = own
        told = f"{len(rows)} own records" if rows else ""
        if rows and not any(self.fits(row) for row in rows):
            with self.quiet():
                self.go_to(rows[0])
                self.constrain()
            told += f"; the workload is now {workload_name(rows[0])}"
        self._file_message.value = html.escape(told)
        self.refresh()

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Whether a record has the state's mode, EP and shape."""
        return all(
            row[n] == control.value for n, control in self.controls.items() if n in _WORKLOAD
        )

    def go_to(self, row: Mapping[str, Any]) -> None:
        """Set mode, EP and shape to those of a record."""
        for name in _WORKLOAD:
            if name in self.controls:
                self.controls[name].value = row[name]
                self.constrain()

    def step(self, rng: np.random.Generator) -> str:
        """Set one control, drawn at random, to a random value that it admits; returns its name."""
        names = [n for n, c in self.controls.items() if n != "results" and not c.disabled]
        name = str(rng.choice(names))
        self.controls[name].value = random_value(self.controls[name], rng)
        return name


_WORKLOAD = ("mode", "E", "ep", "K", "F", "T", "D", "sharedExperts")
"""In the order that lets each be set: EP must divide E, K must not exceed it."""


def update_in_place(figure: go.FigureWidget, before: Spec, after: Spec) -> None:
    """Apply to a live figure what differs between two specs, and touch nothing else: whatever the
    user zoomed, selected or hid stays as it is."""
    if [_kind(t) for t in before["data"]] != [_kind(t) for t in after["data"]]:
        figure.data = ()
        figure.add_traces(after["data"])
        before = {"data": after["data"], "layout": before["layout"]}
    with figure.batch_update():
        for trace, old, new in zip(figure.data, before["data"], after["data"], strict=True):
            changed = _difference(old, new)
            if changed:
                trace.update(changed, overwrite=True)
        for name, value in _difference(before["layout"], after["layout"]).items():
            if name == "width":
                continue
            if "axis" in name:
                figure.layout[name].update(_difference(before["layout"].get(name, {}), value))
            else:
                figure.layout[name] = value


def _kind(trace: Mapping[str, Any]) -> tuple[Any, ...]:
    return trace["type"], trace["meta"], trace.get("mode"), trace.get("fill")


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    changed = {k: v for k, v in new.items() if k not in old or not _same(old[k], v)}
    return changed | {k: None for k in old if k not in new}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(np.asarray(a), np.asarray(b))
    return bool(a == b)


def _plain(marked: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", marked))


def _alert(text: str) -> str:
    style = "border-left:4px solid #d55e00;padding:4px 10px;background:#fdf3ec;color:#222"
    return f'<div role="alert" style="{style};line-height:1.4">{html.escape(text)}</div>'


def html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as an HTML table; numbers with four digits."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f'<th style="text-align:left;padding:0 8px">{name}</th>' for name in names)
    body = "".join(
        "<tr>"
        + "".join(f'<td style="padding:0 8px">{_cell(row.get(n))}</td>' for n in names)
        + "</tr>"
        for row in rows
    )
    style = "font-size:12px;line-height:1.5;white-space:nowrap"
    return (
        f'<div style="overflow-x:auto"><table style="{style}"><tr>{head}</tr>{body}</table></div>'
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:,.4g}"
    return "" if value is None else html.escape(str(value))


def dropdown(label: str, options: Sequence[Any], value: Any) -> widgets.Dropdown:
    """A choice; options are values or (label, value). Raises InputError unless `value` is one."""
    values = [o[1] if isinstance(o, tuple) else o for o in options]
    if value not in values:
        raise InputError(f"{label}={value!r} must be one of {', '.join(map(str, values))}")
    return widgets.Dropdown(
        options=options, value=value, description=label, style=LABEL, layout=control_layout()
    )


def slider(label: str, value: float, low: float, high: float, step: float) -> widgets.FloatSlider:
    """Raises InputError unless `value` lies between `low` and `high`."""
    if not low <= value <= high:
        raise InputError(f"{label}={value:g} must lie between {low:g} and {high:g}")
    return widgets.FloatSlider(
        value=value, min=low, max=high, step=step, description=label, style=LABEL,
        layout=control_layout(), readout_format=".2f",
    )  # fmt: skip


def number(label: str, value: int, low: int, high: int, step: int = 1) -> widgets.BoundedIntText:
    """Raises InputError unless `value` lies between `low` and `high`."""
    if not low <= value <= high:
        raise InputError(f"{label}={value} must lie between {low} and {high}")
    return widgets.BoundedIntText(
        value=value,
        min=low,
        max=high,
        step=step,
        description=label,
        style=LABEL,
        layout=control_layout(),
    )


def workload_controls(state: WorkloadState, sources: Sources) -> dict[str, Any]:
    """Controls of the system, the device and the shape."""
    state.case(state.system)  # refuses, with the rule, what no control could hold
    if state.system not in sources.systems:
        raise InputError(f"system={system_name(state.system)} has no record in the calibration")
    return {
        "backend": dropdown("backend", list(sources.pipelines()), state.backend),
        "pipeline": dropdown("pipeline", [state.pipeline], state.pipeline),
        "precision": dropdown("precision", [state.precision], state.precision),
        **shape_controls(state, sources),
    }


def shape_controls(state: ShapeState, sources: Sources) -> dict[str, Any]:
    """Controls of mode, EP, the device and the shape."""
    return {
        "mode": dropdown("mode", list(MODES), state.mode),
        "ep": dropdown("EP", divisors(state.E), state.ep),
        "hardware": dropdown("hardware", list(sources.devices), state.hardware),
        **{
            name: number(name, getattr(state, name), low, top, 64 if name in "DF" else 1)
            for name, (low, top) in SHAPE.items()
        },
    }  # fmt: skip


def divisors(number: int) -> list[int]:
    """The EP degrees that share `number` experts evenly."""
    return [n for n in range(1, min(number, MAX_EP) + 1) if number % n == 0]


def constrain_workload(controls: Mapping[str, Any], sources: Sources) -> None:
    """Drop-downs offer what exists: backend -> pipelines -> precisions, E -> EP; K at most E."""
    pipelines = sources.pipelines()[controls["backend"].value]
    offer(controls["pipeline"], list(pipelines))
    precisions = pipelines[controls["pipeline"].value]
    offer(controls["precision"], [(PRECISIONS[p], p) for p in precisions])
    constrain_shape(controls)


def constrain_shape(controls: Mapping[str, Any]) -> None:
    """EP divides E; K is at most E."""
    controls["K"].max = min(SHAPE["K"][1], controls["E"].value)
    offer(controls["ep"], divisors(controls["E"].value))


def offer(control: widgets.Dropdown, options: Sequence[Any]) -> None:
    """Change the options and keep the value, or take the nearest number, or the first."""
    values = [o[1] if isinstance(o, tuple) else o for o in options]
    if list(control.options) == list(options):
        return
    value = control.value
    if value not in values:
        near: Callable[[Any], float] = lambda v: abs(math.log(v / value))  # noqa: E731
        value = min(values, key=near) if isinstance(value, int) else values[0]
    control.options = options  # falls back to the first one
    control.value = value


class LayerTable(widgets.VBox):
    """An editable table of one imbalance factor per layer; `value` is a tuple of floats."""

    value = traitlets.Tuple()
    disabled = traitlets.Bool(False)

    def __init__(self, value: Sequence[float], most: int = 64, high: float = 1e6) -> None:
        self._count = widgets.BoundedIntText(
            value=len(value),
            min=1,
            max=most,
            description="layers",
            style=LABEL,
            layout=control_layout(),
        )
        self._cells = widgets.Box(layout=widgets.Layout(flex_flow="row wrap", width="286px"))
        self._setting, self._high = False, high
        super().__init__([self._count, self._cells])
        self._count.observe(self._resized, "value")
        self.observe(self._written, "value")
        self.value = tuple(map(float, value))

    def _written(self, _change: Any) -> None:
        if self._setting:
            return
        self._setting = True
        cells = list(self._cells.children)[: len(self.value)]
        for n in range(len(cells), len(self.value)):
            cell = widgets.BoundedFloatText(
                min=0, max=self._high, step=0.1, description=f"{n + 1}",
                style={"description_width": "16px"},
                layout=widgets.Layout(width="90px", margin="0 2px 0 0"),
            )  # fmt: skip
            cell.observe(self._edited, "value")
            cells.append(cell)
        for cell, factor in zip(cells, self.value, strict=True):
            cell.value = factor
        self._cells.children = cells
        self._count.value = len(cells)
        self._setting = False

    def _edited(self, _change: Any) -> None:
        if not self._setting:
            self._set(tuple(cell.value for cell in self._cells.children))

    def _resized(self, _change: Any) -> None:
        if not self._setting:
            grown = self.value + (1.0,) * max(self._count.value - len(self.value), 0)
            self.value = grown[: self._count.value]

    def _set(self, value: tuple[float, ...]) -> None:
        self._setting = True
        self.value = value
        self._setting = False

    def random(self, rng: np.random.Generator) -> tuple[float, ...]:
        return tuple(np.round(rng.uniform(0, 4, rng.integers(1, 13)), 1).tolist())


def random_value(control: Any, rng: np.random.Generator) -> Any:
    """A value that a control admits."""
    if isinstance(control, LayerTable):
        return control.random(rng)
    if isinstance(control, widgets.SelectMultiple):
        values = [o[1] if isinstance(o, tuple) else o for o in control.options]
        return tuple(v for v in values if rng.random() < 0.5) or (values[0],)
    if isinstance(control, widgets.Dropdown):
        chosen = control.options[rng.integers(len(control.options))]
        return chosen[1] if isinstance(chosen, tuple) else chosen
    if isinstance(control, widgets.BoundedIntText):
        low, high = control.min, control.max
        drawn = math.exp(rng.uniform(math.log(low + 1), math.log(high + 1))) - 1
        return int(np.clip(round(drawn / control.step) * control.step, low, high))
    if isinstance(control, widgets.FloatSlider):
        return float(np.round(rng.uniform(control.min, control.max), 2))
    raise TypeError(f"{type(control).__name__} has no random value")
