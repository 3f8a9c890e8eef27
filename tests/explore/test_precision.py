"""The precision explorer: random states against the study, the model and the floors."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from workbench.kernels.formats import FORMATS

from tests.explore.test_imbalance import CALIBRATION, STATES, SYSTEMS, device, drawn, uploaded, walk
from workbench.case import Case, case_table
from workbench.errors import InputError
from workbench.explore.explorer import Explorer
from workbench.explore.precision import PrecisionExplorer, PrecisionParameters
from workbench.explore.precision_study import Study, scale_histogram, sqnr
from workbench.explore.precision_view import format_floors
from workbench.explore.sources import ShapeState
from workbench.hardware import load_hardware
from workbench.model.roofline import roofline_table
from workbench.report.theme import system_name

TENSOR = torch.from_numpy(np.random.default_rng(2).laplace(size=(64, 512)).astype(np.float32))
PRECISIONS = {"bf16": "bf16", "e4m3": "mxfp8", "e5m2": "mxfp8", "e2m1": ""}


def check(explorer: Explorer) -> None:
    state, spec = explorer.state, explorer.view.spec
    study = Study(
        kind=state.data, seed=state.seed, tensor=TENSOR if state.data == "tensor" else None
    )
    shape = {n: getattr(state, n) for n in ("mode", "ep", "F", "T", "D", "E", "K", "sharedExperts")}
    cases = [Case(backend=b, pipeline=p, precision=c, **shape) for b, p, c in SYSTEMS]
    found = CALIBRATION.predict(cases, device(state.hardware))
    counts = scale_histogram(study, state.formats)
    for name in state.formats:
        spec_of, errors = FORMATS[name], sqnr(study, name)
        bars = drawn(spec, "Error of a small real layer", spec_of.label)["y"]
        assert [math.inf if v is None else v for v in bars] == list(errors.values())
        storage = drawn(spec, "Storage against error", spec_of.label)
        assert (storage["x"], storage["y"]) == ([spec_of.bits_per_value], [errors[state.metric]])
        part = counts[counts["fmt"] == name]
        if len(part):
            histogram = drawn(spec, "Scales of the tensor", spec_of.label)
            assert list(histogram["x"]) == part["exponent"].tolist()
            assert list(histogram["y"]) == part["blocks"].tolist()
    trade = {
        (t["name"], float(t["x"][0]), float(t["y"][0]))
        for t in spec["data"]
        if t["meta"] == "Time against error"
        and len(t["x"])
        and t.get("customdata")
        and t["name"] != "published"
    }
    expected = {
        (system_name(system), float(time), sqnr(study, name)[state.metric])
        for name in state.formats
        for system, time in zip(SYSTEMS, found["iterationMS"], strict=True)
        if system[2] == PRECISIONS[FORMATS[name].element] and not math.isnan(time)
    }
    assert trade == expected


def test_random_states() -> None:
    explorer = PrecisionExplorer()
    explorer.tensor = TENSOR
    explorer.controls["seed"].max = 2  # a new seed is a new layer: three are enough
    possible, touched = walk(explorer, STATES, seed=7, look=check)
    assert possible > 0.8 * STATES
    assert touched == set(explorer.controls) - {"results"}


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("ep", [1, 8, 64])
@pytest.mark.parametrize(
    ("name", "system"),
    [
        ("bf16", ("dist_moe", "standard", "bf16")),
        ("mxfp8-e4m3-rceil", ("dist_moe", "mega", "mxfp8")),
    ],
)
def test_floors_of_known_formats_are_the_rooflines(
    mode: str, ep: int, name: str, system: tuple[str, str, str]
) -> None:
    state = ShapeState(mode=mode, ep=ep)
    hardware = load_hardware("GB300")
    row = roofline_table(case_table([state.case(system)]), hardware).iloc[0]
    floors = format_floors(state, FORMATS[name], hardware)
    expected = {
        n: row[f"busiest{c}FloorMS"]
        for n, c in (("compute", "Compute"), ("HBM", "Hbm"), ("link", "Link"))
    }
    assert floors == pytest.approx(expected, rel=1e-12)


def test_fp4_floor_by_hand() -> None:
    floors = format_floors(ShapeState(), FORMATS["nvfp4"], load_hardware("GB300"))
    # 3 passes x 2048 x 6 rows x 6 x 7168 x 3072 FLOP at 15 PFLOP/s, the shared expert at 2.5
    per_row = 6 * 7168 * 3072
    assert floors["compute"] == pytest.approx(
        3 * 2048 * per_row * (6 / 15000e9 + 1 / 2500e9), rel=1e-12
    )


def test_a_device_without_fp4_says_so() -> None:
    explorer = PrecisionExplorer(PrecisionParameters(hardware="H100"))
    assert "NVFP4: H100 has no FP4 peak" in explorer.sentence()
    assert "no time known" in explorer.sentence()


def test_expected_errors_are_told() -> None:
    text = PrecisionExplorer().sentence()
    table = PrecisionExplorer(PrecisionParameters(metric="tensor")).table()
    rceil = table[table["format"] == "MXFP8 E4M3 (rceil)"]["tensorSqnrDB"].iloc[0]
    assert rceil == pytest.approx(31.5, abs=0.2)
    assert "NVFP4: no system was measured in it" in text


class Harmful:
    """Runs code when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (Path(self.path),))


def bad_tensors(folder: Path) -> dict[str, str]:
    """File name -> part of the message."""
    np.save(folder / "object.npy", np.array([Harmful(str(folder / "ran"))]), allow_pickle=True)
    torch.save(Harmful(str(folder / "ran")), folder / "code.pt")
    np.save(folder / "integer.npy", np.arange(4))
    np.save(folder / "empty.npy", np.zeros((0, 4), np.float32))
    np.save(folder / "nan.npy", np.array([1.0, np.nan], np.float32))
    (folder / "text.npy").write_text("no tensor")
    (folder / "text.csv").write_text("1,2")
    return {
        "object.npy": "must",
        "code.pt": "must hold one plain tensor",
        "integer.npy": "must be a floating-point type",
        "empty.npy": "must hold 1 to",
        "nan.npy": "must be finite",
        "text.npy": "must hold one plain tensor",
        "text.csv": "must end in",
        "missing.npy": "must be an existing file",
    }


def test_bad_tensor_files(tmp_path: Path) -> None:
    explorer = PrecisionExplorer()
    explorer.widget()
    before = explorer.view
    for name, message in bad_tensors(tmp_path).items():
        path = tmp_path / name
        with pytest.raises(InputError, match=message) as error:
            PrecisionExplorer(PrecisionParameters(tensor=str(path)))
        assert "\n" not in str(error.value)
        if path.exists():
            uploaded(explorer, name, path.read_bytes())
            assert message in explorer.file_message
    assert not (tmp_path / "ran").exists(), "nothing in a file may run"
    assert explorer.view is before


def test_own_tensor_is_the_data(tmp_path: Path) -> None:
    torch.save(TENSOR, tmp_path / "w.pt")
    explorer = PrecisionExplorer(PrecisionParameters(tensor=str(tmp_path / "w.pt")))
    assert explorer.state.data == "tensor"
    explorer.tensor = TENSOR
    check(explorer)
