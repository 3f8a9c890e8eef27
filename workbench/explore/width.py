"""The width explorer: how wide an expert must be, and what then binds."""

from typing import Any, Literal

from workbench.errors import InputError
from workbench.explore.controls import constrain_workload, dropdown, workload_controls
from workbench.explore.explorer import Explorer
from workbench.explore.sources import ExplorerParameters, View, split_system
from workbench.explore.width_panels import WidthState
from workbench.explore.width_view import width_view


class WidthParameters(ExplorerParameters):
    """Parameters of the notebook: the initial state and the files."""

    F: int = 3072
    ep: int = 64
    system: str = "dist_moe mega mxfp8"
    tile: Literal[64, 128, 256] = 256


class WidthExplorer(Explorer):
    """Raises InputError for parameters that are impossible or name a bad file."""

    name = "width"

    def __init__(self, parameters: WidthParameters | None = None) -> None:
        p = parameters or WidthParameters()
        if "F" in p.model_fields_set and p.shape.get("F", p.F) != p.F:
            raise InputError(f"shape F={p.shape['F']} must be F={p.F}, the parameter of that name")
        fields = {"F": p.F, "tile": p.tile} | p.workload() | split_system(p.system)
        super().__init__(WidthState.model_validate(fields), p.sources())

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
