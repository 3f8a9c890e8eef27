"""The width explorer: how wide an expert must be, and what then binds."""

from typing import Any

from workbench.explore.explorer import (
    Explorer,
    constrain_workload,
    dropdown,
    find_file,
    workload_controls,
)
from workbench.explore.sources import Sources, View
from workbench.explore.width_view import WidthState, width_view


class WidthParameters(WidthState):
    """Parameters of the notebook: the initial state and the files. `results`: records or a result
    file of one's own. `calibration`, `hardware_file`: in place of the packaged ones."""

    results: str = ""
    calibration: str = ""
    hardware_file: str = ""
    out_dir: str = ""


class WidthExplorer(Explorer):
    """Raises InputError for parameters that are impossible or name a bad file."""

    name = "width"
    title = "Expert width"

    def __init__(self, parameters: WidthParameters | None = None) -> None:
        p = parameters or WidthParameters()
        files = {"calibration", "hardware_file", "results", "out_dir"}
        super().__init__(
            WidthState(**p.model_dump(exclude=files)),
            Sources(
                own=str(find_file(p.results)) if p.results else "",
                calibration_file=p.calibration,
                hardware_file=p.hardware_file,
            ),
        )

    def build(self, state: WidthState) -> dict[str, Any]:
        common = workload_controls(state, self.sources)
        shape = ("F", "D", "K", "E", "T")
        self.controls = {
            **{name: common[name] for name in shape},
            **{name: control for name, control in common.items() if name not in shape},
            "tile": dropdown("tile columns", [64, 128, 256], state.tile),
        }
        return self.controls

    @property
    def state(self) -> WidthState:
        values = {n: c.value for n, c in self.controls.items() if n in WidthState.model_fields}
        return WidthState(**values)

    def compute(self, state: WidthState) -> View:
        return width_view(state, self.sources)

    def constrain(self) -> None:
        constrain_workload(self.controls, self.sources)
