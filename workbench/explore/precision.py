"""The precision explorer: what a number format costs in error and gains in time."""

import tempfile
from pathlib import Path
from typing import Any

import ipywidgets as widgets
from torch import Tensor

from workbench.explore.controls import (
    LABEL,
    constrain_shape,
    control_layout,
    dropdown,
    number,
    offer,
    shape_controls,
)
from workbench.explore.explorer import Explorer
from workbench.explore.precision_study import load_tensor
from workbench.explore.precision_view import (
    DEFAULT_FORMATS,
    METRIC_NAMES,
    Data,
    Metric,
    PrecisionState,
    precision_view,
)
from workbench.explore.sources import ExplorerParameters, View, find_file
from workbench.kernels.formats import FORMATS

DATA = [
    ("Gaussian", "gaussian"),
    ("heavy-tailed (Student t, 3)", "student_t"),
    ("outlier channels (30x)", "outlier_channel"),
    ("tensor from a file", "tensor"),
]


class PrecisionParameters(ExplorerParameters):
    """Parameters of the notebook: the initial state and the files. `tensor`: a .npy or .pt file
    with one floating-point tensor, which then is the data; nothing in it is executed."""

    formats: list[str] = DEFAULT_FORMATS
    data: Data = "gaussian"
    tensor: str = ""
    metric: Metric = "mlp"
    seed: int = 0


class PrecisionExplorer(Explorer):
    """Raises InputError for parameters that are impossible or name a bad file."""

    name = "precision"
    file_types = ".npy,.pt,.pth"
    file_label = "tensor (.npy, .pt)"

    def __init__(self, parameters: PrecisionParameters | None = None) -> None:
        p = parameters or PrecisionParameters()
        self.tensor: Tensor | None = load_tensor(find_file(p.tensor)) if p.tensor else None
        own = {"formats", "data", "metric", "seed"}
        state = PrecisionState.model_validate(p.model_dump(include=own) | p.workload())
        if self.tensor is not None:
            state = state.model_copy(update={"data": "tensor"})
        precision_view(state, self.tensor, p.sources())  # refuses what no control could hold
        super().__init__(state, p.sources())
        if self.tensor is not None:
            self.loaded = _told(Path(p.tensor).name, self.tensor)

    def build(self, state: PrecisionState) -> dict[str, Any]:
        formats = widgets.SelectMultiple(
            options=[(spec.label, name) for name, spec in FORMATS.items()],
            value=tuple(state.formats),
            rows=len(FORMATS),
            description="formats",
            style=LABEL,
            layout=control_layout(),
        )
        metrics = [(label, name) for name, label in METRIC_NAMES.items()]
        common = shape_controls(state, self.sources)
        self.controls = {
            "data": dropdown("data", DATA, state.data),
            "formats": formats,
            "metric": dropdown("error of", metrics, state.metric),
            "seed": number("seed", state.seed, 0, 10**6),
            **common,
        }
        return self.controls

    @property
    def state(self) -> PrecisionState:
        names = PrecisionState.model_fields
        values = {n: c.value for n, c in self.controls.items() if n in names}
        formats = list(self.controls["formats"].value)
        return PrecisionState(**values | {"formats": formats})

    def compute(self, state: PrecisionState) -> View:
        return precision_view(state, self.tensor, self.sources)

    def constrain(self) -> None:
        c = self.controls
        constrain_shape(c)
        offer(c["data"], [d for d in DATA if d[1] != "tensor" or self.tensor is not None])
        if not c["formats"].value:
            c["formats"].value = ("bf16",)

    @property
    def from_file(self) -> bool:
        return bool(self.controls["data"].value == "tensor")

    def take_file(self, name: str, content: bytes) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / Path(name).name
            path.write_bytes(content)
            tensor = load_tensor(path)
        self.tensor = tensor
        with self.quiet():
            self.constrain()
            self.controls["data"].value = "tensor"
        self.refresh()
        return _told(name, tensor)


def _told(name: str, tensor: Tensor) -> str:
    return f"{name}: a tensor of {' x '.join(map(str, tensor.shape)) or 'one value'}"
