"""Figures: units, one look, values, and selections that have nothing to show."""

import re

import numpy as np
import pytest

from workbench.errors import InputError
from workbench.hardware import load_hardware
from workbench.records.results import concat
from workbench.report.figure_data import figure_data
from workbench.report.figures import FIGURES, all_figures
from workbench.report.theme import STYLES
from workbench.systems import PIPELINES

GB300 = load_hardware("GB300")
UNIT = re.compile(r"\S.* \[(ms|1|-|%|ranks|index|GiB|GB/s|TFLOP/s|TFLOP/s per GPU|FLOP/B)\]")


def axes(fig):
    return [
        axis for name, axis in fig.layout.to_plotly_json().items() if re.match("[xy]axis", name)
    ]


def test_there_are_ten_to_fourteen_figures():
    assert 10 <= len(FIGURES) <= 14


@pytest.mark.parametrize("name", FIGURES)
def test_every_axis_has_a_title_with_a_unit(name, figures):
    found = axes(figures[name])
    assert len(found) >= 2
    for axis in found:
        assert UNIT.fullmatch(axis["title"]["text"]), axis["title"]["text"]


@pytest.mark.parametrize("name", FIGURES)
def test_every_trace_lies_on_a_titled_axis_and_every_figure_has_a_legend(name, figures):
    fig = figures[name]
    for trace in fig.data:
        for letter in "xy":
            axis = getattr(trace, f"{letter}axis").replace(letter, f"{letter}axis")
            assert fig.layout[axis].title.text
    names = [trace.name for trace in fig.data if trace.showlegend]
    assert len(names) == len(set(names)) == len({trace.name for trace in fig.data})
    assert fig.layout.legend.title.text
    assert FIGURES[name].caption.endswith(".")


def test_every_system_has_a_look_of_its_own():
    systems = {(b, p, x) for b, ps in PIPELINES.items() for p, xs in ps.items() for x in xs}
    assert systems <= set(STYLES)
    for part in ("colour", "symbol", "dash", "pattern"):
        assert len({getattr(style, part) for style in STYLES.values()}) == len(STYLES)


def test_a_system_looks_the_same_in_every_figure(figures):
    looks: dict = {}
    for fig in figures.values():
        for trace in fig.data:
            if trace.name.startswith(("dist_moe ", "mok ")):
                looks.setdefault(trace.name, set()).add(trace.marker.color)
    assert len(looks) == 5
    assert all(len(colours) == 1 for colours in looks.values())


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("imbalance", "iterationMS"),
        ("slowdown", None),
        ("width", "usefulTFPerGPU"),
        ("roofline", "usefulTFPerGPU"),
        ("packing_time", "iterationMS"),
        ("packing_memory", "peakAllocatedGiB"),
        ("memory", "peakAllocatedGiB"),
        ("rates", "meanTXGBps"),
        ("balanced", "iterationMS"),
    ],
)
def test_a_figure_shows_the_record_of_each_of_its_cases(name, column, figures, study):
    """Every y of a case is one of its record's numbers, and `column` is shown for every case;
    without a column it is how often its time is that of its balanced case."""
    shown = figure_data(figures[name])
    shown = shown[shown["case"].notna()]
    records = study.set_index("id")
    numeric = records.select_dtypes("number").astype(float)
    numeric["reserved"] = numeric["peakReservedBytes"] / 2**30
    if column is None:  # a ratio: against the time of the same case at an even load
        assert len(shown) == 60
        times = study.set_index(
            ["backend", "pipeline", "precision", "mode", "ep", "category", "F", "imbalance"]
        )["iterationMS"]
        for case, y in zip(shown["case"], shown["y"], strict=True):
            key = records.loc[case, times.index.names[:-1]]
            assert y == pytest.approx(records.loc[case, "iterationMS"] / times[(*key, 1.0)])
        return
    for case, y in zip(shown["case"], shown["y"], strict=True):
        values = numeric.loc[case].to_numpy()
        assert np.isclose(values, y, rtol=1e-12, atol=0).any(), (case, y)
    for case in set(shown["case"]):
        ys = shown.loc[shown["case"] == case, "y"].astype(float)
        assert np.isclose(ys, numeric.loc[case, column], rtol=1e-12).any()


def test_counts_of_what_is_shown(figures):
    cases = {name: figure_data(fig)["case"].nunique() for name, fig in figures.items()}
    assert cases["roofline"] == cases["floors"] == 110
    assert cases["pairs"] == 66
    assert cases["imbalance"] == cases["slowdown"] == cases["rates"] == 60
    assert cases["balanced"] == 20
    assert cases["width"] == 30
    assert cases["packing_time"] == cases["packing_memory"] == 20
    assert cases["packing_slot"] == 12


def test_slowdown_figure_has_the_published_extremes(figures):
    shown = figure_data(figures["slowdown"])
    worst = shown[shown["case"].notna() & (shown["x"] == 8)]["y"].astype(float)
    assert (round(worst.min(), 3), round(worst.max(), 3)) == (4.757, 6.430)
    line = shown[shown["case"].isna()]
    assert (line["x"] == line["y"]).all()


def test_roofs_bend_where_hbm_meets_the_peak(figures):
    shown = figure_data(figures["roofline"])
    for name, peak in (("BF16 roof", 2500.0), ("FP8 roof (for MXFP8)", 5000.0)):
        roof = shown[shown["series"] == name].astype({"x": float, "y": float})
        assert (roof["y"] == np.minimum(peak, roof["x"] * 8)).all()
        assert peak / 8 in set(roof["x"])


def test_floors_stay_below_the_measured_time_and_name_what_binds(figures):
    shown = figure_data(figures["floors"])
    assert shown["y"].astype(float).between(30, 66).all()
    assert shown["panel"].value_counts().to_dict() == {
        "compute binds": 99,
        "link binds": 6,
        "HBM binds": 5,
    }


EMPTY = {
    "no packing": (
        "category != 'packing'",
        {"packing_load", "packing_slot", "packing_time", "packing_memory"},
    ),
    "only packing": (
        "category == 'packing'",
        {"balanced", "imbalance", "slowdown", "width", "rates", "memory"},
    ),
    "no mok": ("backend == 'dist_moe'", {"headline", "pairs"}),
    "no dist_moe": ("backend == 'mok'", {"headline", "pairs", "packing_slot"}),
    "one EP": (
        "ep == 8",
        {"packing_load", "packing_slot", "packing_time", "packing_memory", "width"},
    ),
    "imbalance 8": (
        "imbalance == 8",
        {
            "packing_load",
            "packing_slot",
            "packing_time",
            "balanced",
            "packing_memory",
            "width",
            "slowdown",
            "memory",
        },
    ),
    "nothing": ("ep == 7", set(FIGURES)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_selection_without_cases_gives_a_figure_that_says_so(name, study):
    query, empty = EMPTY[name]
    found = all_figures(study.query(query), GB300)
    assert {name for name, fig in found.items() if not fig.data} == empty
    for key in empty:
        (note,) = found[key].layout.annotations
        assert re.search(r"^no .* in this selection$", note.text), note.text
        assert figure_data(found[key]).empty


def test_a_single_case_has_figures(study):
    for row in (0, 12, 24, 46, 56, 99):
        found = all_figures(study.iloc[[row]], GB300)
        assert found["roofline"].data


def test_cases_without_times_are_left_out(study):
    failed = study.copy()
    failed.loc[failed["precision"] == "mxfp8", ["iterationMS", "usefulTFPerGPU"]] = np.nan
    found = all_figures(failed, GB300)
    assert figure_data(found["roofline"])["case"].nunique() == 44
    assert not any("MXFP8" in trace.name for trace in found["imbalance"].data)


def test_records_of_ones_own_lie_over_the_published_ones(study):
    mine = study.assign(origin="measured", device="NVIDIA H200", meanTXGBps=np.nan)
    found = all_figures(concat([study, mine]), GB300)
    shown = figure_data(found["imbalance"])
    assert shown["case"].value_counts().unique().tolist() == [4]
    marks = {t.name: (t.marker.color, t.marker.symbol) for t in found["imbalance"].data}
    ours = marks["mok native BF16 (measured, NVIDIA H200)"]
    theirs = marks["mok native BF16 (published, NVIDIA GB300)"]
    assert ours[0] == theirs[0]
    assert ours[1] != theirs[1]
    # the roofline holds only the cases of its own device against its peaks
    assert figure_data(found["roofline"])["case"].count() == 110


def test_a_device_without_peaks_is_said(study):
    unknown = study.assign(device="abacus")
    found = all_figures(unknown, None)
    assert "no peaks are known" in found["roofline"].layout.annotations[0].text
    found = all_figures(unknown, GB300)
    assert found["floors"].layout.annotations[0].text == "no case on GB300 in this selection"


def test_a_precision_without_a_peak_is_an_error(study, tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(
        '[GB300]\nmatch = "GB300"\nbf16_tflops = {value = 1, source = "x"}\n'
        'hbm_gb = {value = 1, source = "x"}\nhbm_tb_s = {value = 1, source = "x"}\n'
        'scale_up_gb_s = {value = 1, source = "x"}\nscale_up_domain = {value = 72, source = "x"}\n'
    )
    with pytest.raises(InputError, match="precision=mxfp8 must be one with a known peak"):
        all_figures(study, load_hardware("GB300", file), str(file))
