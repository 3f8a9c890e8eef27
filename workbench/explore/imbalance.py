"""The imbalance explorer: what an uneven load costs, and what placing experts anew would gain."""

from collections.abc import Mapping
from typing import Any

from workbench.case import PROFILES
from workbench.explore.controls import (
    LayerTable,
    constrain_workload,
    dropdown,
    limit,
    number,
    offer,
    show,
    slider,
    workload_controls,
)
from workbench.explore.explorer import Explorer
from workbench.explore.imbalance_view import imbalance_view
from workbench.explore.loads import (
    DEFAULT_FACTORS,
    ImbalanceState,
    Load,
    largest_factor,
    layer_loads,
)
from workbench.explore.sources import ExplorerParameters, View, find_file, split_system
from workbench.explore.trace import Trace, load_trace, read_trace

LOADS = [
    ("one factor", "factor"),
    ("profile A (10 layers)", "A"),
    ("profile B (10 layers)", "B"),
    ("a factor per layer", "table"),
    ("trace from a file", "trace"),
]


class ImbalanceParameters(ExplorerParameters):
    """Parameters of the notebook: the initial state and the files. `trace`: a .csv or .npz file of
    real per-expert row counts, layers x experts, which then is the load."""

    load: Load = "factor"
    factor: float = 4.0
    factors: list[float] = DEFAULT_FACTORS
    trace: str = ""
    slotFactor: float = 2.5
    scratchFactor: float = 8.0
    system: str = "dist_moe mega mxfp8"


class ImbalanceExplorer(Explorer):
    """Raises InputError for parameters that are impossible or name a bad file."""

    name = "imbalance"
    file_types = ".csv,.npz"
    file_label = "trace (.csv, .npz)"

    def __init__(self, parameters: ImbalanceParameters | None = None) -> None:
        p = parameters or ImbalanceParameters()
        self.trace: Trace | None = load_trace(find_file(p.trace)) if p.trace else None
        own = {"load", "factor", "factors", "slotFactor", "scratchFactor"}
        fields = p.model_dump(include=own) | p.workload() | split_system(p.system)
        state = ImbalanceState.model_validate(fields)
        if self.trace is not None:
            state = state.model_copy(update={"load": "trace"})
        layer_loads(state, self.trace)  # refuses, with the rule, what no control could hold
        super().__init__(state, p.sources())
        if self.trace is not None:
            self.loaded = _told(self.trace)

    def build(self, state: ImbalanceState) -> dict[str, Any]:
        common = workload_controls(state, self.sources)
        load = {
            "load": dropdown("load", LOADS, state.load),
            "factor": slider(
                "factor",
                state.factor,
                0,
                max(largest_factor(state), 1),
                0.05,
                state.load == "factor",
            ),
            "factors": LayerTable(state.factors),
            "layer": number("show layer", state.layer, 0, 4096),
        }
        room = {
            "slotFactor": slider(
                "slotFactor", state.slotFactor, 0, 16, 0.1, self._slot_applies(state)
            ),
            "scratchFactor": slider("scratchFactor", state.scratchFactor, 0.1, 64, 0.1),
        }
        system = ("mode", "ep", "backend", "pipeline", "precision", "hardware")
        shape = {name: c for name, c in common.items() if name not in system}
        self.controls = load | {name: common[name] for name in system} | room | shape
        return self.controls

    @property
    def state(self) -> ImbalanceState:
        values = {n: c.value for n, c in self.controls.items() if n in ImbalanceState.model_fields}
        return ImbalanceState(**values | {"factors": list(self.controls["factors"].value)})

    def compute(self, state: ImbalanceState) -> View:
        return imbalance_view(state, self.trace, self.sources)

    def constrain(self) -> None:
        c = self.controls
        constrain_workload(c, self.sources)
        load = c["load"].value
        show(c["factor"], load == "factor")
        show(c["factors"], load == "table")
        c["factors"].disabled = load != "table"
        if self.fault:  # no state to go by
            return
        state = self.state
        most = largest_factor(state)
        possible = {"factor", "table"} | {n for n, f in PROFILES.items() if max(f) <= most}
        possible |= {"trace"} if self.trace is not None else set()
        offer(c["load"], [load for load in LOADS if load[1] in possible])
        layers = self._layers(self.state)
        c["layer"].high = layers
        limit(c["factor"], most if state.ep > 1 else 1, 0 if state.ep > 1 else 1)
        c["factor"].disabled = c["load"].value != "factor" or state.ep == 1
        show(c["factor"], c["load"].value == "factor")
        show(c["factors"], c["load"].value == "table")
        c["factors"].disabled = c["load"].value != "table"
        show(c["layer"], layers > 1)
        c["slotFactor"].disabled = not self._slot_applies(self.state)

    @property
    def from_file(self) -> bool:
        return bool(self.controls["load"].value == "trace")

    def _layers(self, state: ImbalanceState) -> int:
        if state.load == "trace" and self.trace is not None:
            return self.trace.layers
        return {"factor": 1, "table": len(state.factors)}.get(state.load, 10)

    def _slot_applies(self, state: ImbalanceState) -> bool:
        """A single layer keeps what its scratch admits; inference keeps nothing."""
        return self._layers(state) > 1 and state.mode != "inference"

    def go_to(self, row: Mapping[str, Any]) -> None:
        super().go_to(row)
        load = "factor" if len(row["factors"]) == 1 else "table"
        self.controls["load"].value = load
        self.constrain()
        if load == "factor":
            self.controls["factor"].value = row["factors"][0]
        else:
            self.controls["factors"].value = row["factors"]

    def take_file(self, name: str, content: bytes) -> str:
        trace = read_trace(name, content)
        self.trace = trace
        with self.quiet():
            self.constrain()  # which now offers it
            self.controls["load"].value = "trace"
            self.constrain()
        self.refresh()
        return _told(trace)


def _told(trace: Trace) -> str:
    return f"{trace.name}: {trace.layers} layers x {trace.experts} experts"
