"""The imbalance explorer: what an uneven load costs, and what placing experts anew would gain."""

from typing import Any

from workbench.case import PROFILES
from workbench.explore.explorer import (
    Explorer,
    LayerTable,
    constrain_workload,
    dropdown,
    find_file,
    number,
    offer,
    show,
    slider,
    workload_controls,
)
from workbench.explore.imbalance_view import (
    ImbalanceState,
    imbalance_view,
    largest_factor,
)
from workbench.explore.sources import Sources, View
from workbench.explore.trace import Trace, load_trace, read_trace

LOADS = [
    ("one factor", "factor"),
    ("profile A (10 layers)", "A"),
    ("profile B (10 layers)", "B"),
    ("a factor per layer", "table"),
    ("trace from a file", "trace"),
]


class ImbalanceParameters(ImbalanceState):
    """Parameters of the notebook: the initial state and the files. `trace`: a .csv or .npz file of
    real per-expert row counts, layers x experts, which then is the load. `results`: records or a
    result file of one's own. `calibration`, `hardware_file`: in place of the packaged ones."""

    trace: str = ""
    results: str = ""
    calibration: str = ""
    hardware_file: str = ""
    out_dir: str = ""


class ImbalanceExplorer(Explorer):
    """Raises InputError for parameters that are impossible or name a bad file."""

    name = "imbalance"
    title = "Imbalance"
    file_types = ".csv,.npz"

    def __init__(self, parameters: ImbalanceParameters | None = None) -> None:
        p = parameters or ImbalanceParameters()
        self.trace: Trace | None = load_trace(find_file(p.trace)) if p.trace else None
        files = {"calibration", "hardware_file", "results", "out_dir", "trace"}
        state = ImbalanceState(**p.model_dump(exclude=files))
        if self.trace is not None:
            state = state.model_copy(update={"load": "trace"})
        super().__init__(
            state,
            Sources(
                own=str(find_file(p.results)) if p.results else "",
                calibration_file=p.calibration,
                hardware_file=p.hardware_file,
            ),
        )

    def build(self, state: ImbalanceState) -> dict[str, Any]:
        common = workload_controls(state, self.sources)
        load = {
            "load": dropdown("load", LOADS, state.load),
            "factor": slider("factor", state.factor, 0, max(largest_factor(state), 1), 0.05),
            "factors": LayerTable(state.factors),
            "layer": number("show layer", state.layer, 0, 4096),
        }
        room = {
            "slotFactor": slider("slotFactor", state.slotFactor, 0, 16, 0.1),
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
        most = largest_factor(self.state)
        possible = {"factor", "table"} | {n for n, f in PROFILES.items() if max(f) <= most}
        possible |= {"trace"} if self.trace is not None else set()
        offered = [load for load in LOADS if load[1] in possible]
        offer(c["load"], offered)
        if c["load"].value == "trace" and self.trace is not None:
            layers = self.trace.layers
        else:
            layers = {"factor": 1, "table": len(c["factors"].value)}.get(c["load"].value, 10)
        c["layer"].max = layers
        state = self.state
        c["factor"].max = most if state.ep > 1 else 1
        if state.ep == 1:
            c["factor"].value = 1
        show(c["factor"], c["load"].value == "factor")
        c["factor"].disabled = c["load"].value != "factor" or state.ep == 1
        c["factors"].disabled = c["load"].value != "table"
        show(c["factors"], c["load"].value == "table")
        show(c["layer"], layers > 1)
        # a single layer keeps what its scratch admits; inference keeps nothing
        c["slotFactor"].disabled = layers == 1 or state.mode == "inference"

    def take_file(self, name: str, content: bytes) -> str:
        trace = read_trace(name, content)
        self.trace = trace
        with self.quiet():
            self.controls["load"].value = "trace"
            self.constrain()
        self.refresh()
        return f"{trace.name}: {trace.layers} layers x {trace.experts} experts"
