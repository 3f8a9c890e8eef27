"""The controls of the explorers: how each looks, and what it may offer beside the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as widgets
import numpy as np
import traitlets
from traitlets import Bunch

from workbench.errors import InputError
from workbench.explore.sources import ShapeState, Sources, WorkloadState
from workbench.report.theme import PRECISIONS, system_name
from workbench.systems import MODES

LABEL = {"description_width": "96px"}
MAX_EP = 1024
SHAPE = {
    "F": (32, 16384),
    "T": (1, 65536),
    "D": (64, 16384),
    "E": (1, 4096),
    "K": (1, 64),
    "sharedExperts": (0, 8),
}
"""Controls of the shape, and the range of each."""


def control_layout() -> widgets.Layout:
    return widgets.Layout(width="286px", margin="1px 4px 1px 0")


def show(control: widgets.Widget, shown: bool) -> None:
    """Show or hide a control."""
    control.layout.display = None if shown else "none"


def dropdown(label: str, options: Sequence[Any], value: Any) -> widgets.Dropdown:
    """A choice; options are values or (label, value). Raises InputError unless `value` is one."""
    values = [o[1] if isinstance(o, tuple) else o for o in options]
    if value not in values:
        raise InputError(f"{label}={value!r} must be one of {', '.join(map(str, values))}")
    return widgets.Dropdown(
        options=options, value=value, description=label, style=LABEL, layout=control_layout()
    )


def slider(
    label: str, value: float, low: float, high: float, step: float, applies: bool = True
) -> widgets.FloatSlider:
    """Raises InputError unless `value` lies between `low` and `high`; where it does not apply yet,
    the handle stands at the nearest end instead, until `limit` gives it room."""
    chosen = value
    if not applies:
        value = min(max(value, low), high) if math.isfinite(value) else low
    if not low <= value <= high:
        raise InputError(f"{label}={value:g} must lie between {low:g} and {high:g}")
    control = widgets.FloatSlider(
        value=value,
        min=low,
        max=high,
        step=step,
        description=label,
        style=LABEL,
        layout=control_layout(),
        readout_format=".2f",
    )
    if chosen > high:
        _stand_in(control, chosen, value)
    return control


class Number(widgets.FloatText):
    """A field for a whole number between `low` and `high`. It takes whatever is typed, as bounded
    fields do not: they clamp in the browser, so that nobody learns of it."""

    def __init__(self, label: str, value: int, low: int, high: int, step: int = 1) -> None:
        self.low, self.high = low, high
        super().__init__(
            value=value, step=step, description=label, style=LABEL, layout=control_layout()
        )

    @property
    def problem(self) -> str:
        """What is wrong with the value; "" for nothing."""
        if not self.value.is_integer():  # NaN and infinity too
            return f"{self.description}={self.value:g} must be a whole number"
        if not self.low <= self.value <= self.high:
            rule = f"must lie between {self.low} and {self.high}"
            return f"{self.description}={int(self.value)} {rule}"
        return ""


def number(label: str, value: int, low: int, high: int, step: int = 1) -> Number:
    """Raises InputError unless `value` lies between `low` and `high`."""
    control = Number(label, value, low, high, step)
    if control.problem:
        raise InputError(control.problem)
    return control


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
    }


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
    """EP divides E."""
    if not controls["E"].problem:
        offer(controls["ep"], divisors(int(controls["E"].value)))


def offer(control: widgets.Dropdown, options: Sequence[Any]) -> None:
    """Change the options and keep the value that was chosen; while they lack it, the nearest number
    or the first stands in its place, and it returns with them."""
    values = [o[1] if isinstance(o, tuple) else o for o in options]
    if list(control.options) == list(options):
        return
    value = chosen = wanted(control)
    if value not in values:
        near: Callable[[Any], float] = lambda v: abs(math.log(v / chosen))  # noqa: E731
        value = min(values, key=near) if isinstance(value, int) else values[0]
    control.options = options  # falls back to the first one
    _stand_in(control, chosen, value)


def limit(control: widgets.FloatSlider, most: float, least: float = 0) -> None:
    """Change how far a slider goes; a value beyond returns with the room for it."""
    chosen = wanted(control)
    control.max = most
    _stand_in(control, chosen, min(max(chosen, least), most))


def wanted(control: Any) -> Any:
    """What was last chosen: the value, unless that stands in for one that is not offered now."""
    chosen, instead = getattr(control, "stand_in", (None, None))
    return chosen if instead is not None and control.value == instead else control.value


def _stand_in(control: Any, chosen: Any, value: Any) -> None:
    control.value = value
    control.stand_in = (None, None) if value == chosen else (chosen, value)


def stands_in(control: Any) -> str:
    """`EP is 17 in place of 32`, or "" where the value is what was chosen."""
    chosen = wanted(control)
    if chosen == control.value or control.disabled or control.layout.display == "none":
        return ""
    return f"{control.description} is {control.value} in place of {chosen}"


class LayerTable(widgets.VBox):
    """An editable table of one imbalance factor per layer; `value` is a tuple of floats."""

    value = traitlets.Tuple()
    disabled = traitlets.Bool(False)

    def __init__(self, value: Sequence[float], most: int = 64) -> None:
        self._count = Number("layers", len(value), 1, most)
        self._cells = widgets.Box(layout=widgets.Layout(flex_flow="row wrap", width="286px"))
        self._setting = False
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
            cell = widgets.FloatText(
                step=0.1,
                description=f"{n + 1}",
                style={"description_width": "16px"},
                layout=widgets.Layout(width="90px", margin="0 2px 0 0"),
            )
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
        if self._setting:
            return
        value = self.value
        if not self.problem:
            count = int(self._count.value)
            value = (value + (1.0,) * max(count - len(value), 0))[:count]
        if value != self.value:
            self.value = value
        else:  # the problem is new, or gone
            self._setting = True
            self.notify_change(Bunch(name="value", old=value, new=value, owner=self, type="change"))
            self._setting = False

    @property
    def problem(self) -> str:
        """What is wrong with the number of layers; "" for nothing."""
        return self._count.problem

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
    if isinstance(control, Number):
        low, high = control.low, control.high
        drawn = math.exp(rng.uniform(math.log(low + 1), math.log(high + 1))) - 1
        return int(np.clip(round(drawn / control.step) * control.step, low, high))
    if isinstance(control, widgets.FloatSlider):
        return float(np.round(rng.uniform(control.min, control.max), 2))
    raise TypeError(f"{type(control).__name__} has no random value")
