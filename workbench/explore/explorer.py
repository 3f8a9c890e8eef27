"""What the explorers have in common: controls on the left, sentence and figure on the right.

All state is in the controls. A change reads them, computes the view and updates the figure's
traces in place, so that zoom and selection stay. A state that is impossible is explained above the
figure, which then still shows the last possible one.
"""

from __future__ import annotations

import html
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import ipywidgets as widgets
import numpy as np
import pandas as pd
import plotly.graph_objects as go

from workbench.errors import InputError
from workbench.explore.controls import LABEL, control_layout, random_value, stands_in
from workbench.explore.sources import ShapeState, Sources, View, find_file, workload_name
from workbench.files import write_atomic
from workbench.report.export import Exported, export_figures
from workbench.report.figures_explore import Spec


class Explorer(ABC):
    """One explorer. `figure()`, `table()`, `sentence()` and `export()` are those of the current
    state and raise InputError, with the reason, while it is impossible."""

    name: ClassVar[str]
    file_types: ClassVar[str] = ""
    """What the upload accepts, e.g. `.csv,.npz`; empty for no upload."""
    file_label: ClassVar[str] = ""

    def __init__(self, state: ShapeState, sources: Sources) -> None:
        self.sources = sources
        self.problem = ""
        self.loaded = ""  # what is said of the file in use
        self._told = ""  # of the last file or results, as HTML, until something else changes
        self._quiet = False
        self.live: go.FigureWidget | None = None
        self._message, self._file_message = widgets.HTML(), widgets.HTML()
        self._sentence, self._notes, self._rows = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self._more = widgets.Accordion([self._rows], titles=["Table"])
        self.controls: dict[str, Any] = self.build(state)
        self.controls["results"] = widgets.Text(
            value=sources.own,
            placeholder="outputs/runs/<id>",
            continuous_update=False,
            description="own results",
            style=LABEL,
            layout=control_layout(),
        )
        self.upload = widgets.FileUpload(
            accept=self.file_types, description=self.file_label, layout=control_layout()
        )
        with self.quiet():
            self.constrain()
        if self.fault:
            raise InputError(self.fault)
        self.view: View = self.compute(self.state)
        for name, control in self.controls.items():
            control.observe(self._own_results if name == "results" else self._changed, "value")
        self.upload.observe(self._uploaded, "value")
        self._more.observe(lambda _: self._tell(), "selected_index")

    @abstractmethod
    def build(self, state: Any) -> dict[str, Any]:
        """The controls, by the name of the state's field that each holds."""

    @property
    @abstractmethod
    def state(self) -> Any:
        """The state that the controls are in."""

    @abstractmethod
    def compute(self, state: Any) -> View:
        """The view of a state. Raises InputError where it is impossible."""

    @abstractmethod
    def constrain(self) -> None:
        """Adjust controls that depend on others, so that they offer only what is possible."""

    @property
    def from_file(self) -> bool:
        """Whether the state uses the file that was given."""
        return False

    @property
    def fault(self) -> str:
        """What is wrong with a field that is shown, before any state is made of it; "" for
        nothing."""
        shown = (c for c in self.controls.values() if c.layout.display != "none" and not c.disabled)
        return next((c.problem for c in shown if getattr(c, "problem", "")), "")

    @property
    def notes(self) -> list[str]:
        """What is said below the sentence, each a line of plain text."""
        instead = ", ".join(filter(None, map(stands_in, self.controls.values())))
        told = f"{instead}: the other controls do not admit it" if instead else ""
        return list(filter(None, (told, *self.view.notes)))

    def take_file(self, name: str, content: bytes) -> str:
        """Use an uploaded file; returns what to say of it. Raises InputError."""
        raise InputError(f"{name}: the {self.name} explorer takes no file")

    @property
    def message(self) -> str:
        """What stands in the warning above the figure, as plain text; "" for none."""
        return _plain(self._message.value)

    @property
    def file_message(self) -> str:
        """What is said of the file in use, or of the last attempt to load one, as plain text."""
        return _plain(self._told) or (self.loaded if self.from_file else "")

    def figure(self) -> go.Figure:
        return self._possible().figure

    def table(self) -> pd.DataFrame:
        return self._possible().table

    def sentence(self) -> str:
        """What the state means, as plain text."""
        view = self._possible()
        return "\n".join([_plain(view.sentence), *self.notes])

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
            [self._message, self._file_message, self._sentence, self._notes, self.live, self._more],
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
        self._told = ""
        with self.quiet():
            self.constrain()
        self.refresh()

    def refresh(self) -> None:
        """Compute the state's view and show it, or say why there is none."""
        try:
            if self.fault:
                raise InputError(self.fault)
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
        self._file_message.value = self._told or html.escape(self.file_message)
        self._sentence.value = f'<div style="line-height:1.4">{self.view.sentence}</div>'
        self._notes.value = "".join(f"<i>{html.escape(note)}</i><br>" for note in self.notes)
        if self._more.selected_index == 0:
            self._rows.value = html_table(self.view.rows)

    def _uploaded(self, change: Any) -> None:
        for file in change["new"]:
            try:
                self._told = ""
                self.loaded = self.take_file(file["name"], bytes(file["content"]))
            except InputError as error:
                self._told = _alert(str(error))
        self._tell()

    def _own_results(self, change: Any) -> None:
        """Take the user's records; where none has the workload or the device shown, go to one of
        theirs."""
        text = change["new"].strip()
        own = replace(self.sources, own=str(find_file(text)) if text else "")
        try:
            rows = own.own_rows
        except InputError as error:
            self._told = _alert(str(error))
            self._tell()
            return
        self.sources = own
        told = f"{len(rows)} own records" if rows else ""
        if rows and not any(self.fits(row) for row in rows):
            with self.quiet():
                self.go_to(rows[0])
                self.constrain()
            told += f"; the workload is now {workload_name(rows[0])}"
        hardware = self.controls["hardware"]
        theirs = [row["peaks"] for row in rows if self.fits(row) and row["peaks"]]
        if theirs and hardware.value not in theirs:
            with self.quiet():
                hardware.value = theirs[0]
            told += f"; the device is now {theirs[0]}, as theirs"
        self._told = html.escape(told)
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
        value = random_value(self.controls[name], rng)
        if name == "K":
            value = min(value, int(self.controls["E"].value))
        elif name == "E":
            value = max(value, int(self.controls["K"].value))
        self.controls[name].value = value
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
