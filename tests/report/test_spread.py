"""A measured time is shown with its spread, and with the protocol that its record says it ran."""

import json

import numpy as np
import pandas as pd
import pytest

from workbench.bench.compare import compare
from workbench.bench.sweep import Progress
from workbench.case import local_matrix
from workbench.hardware import load_hardware
from workbench.records.record import make_record, write_record
from workbench.records.results import concat, load_table
from workbench.report import tables
from workbench.report.draw import NOISY
from workbench.report.export import export_figures
from workbench.report.figure_data import figure_data
from workbench.report.figures import FIGURES, all_figures
from workbench.report.index import add_measured
from workbench.report.sweep_report import open_sweep_report

CASES = local_matrix()
SHARES = {"iteration": 1.0, "forward": 0.4, "backward": 0.6}
RAN = "measured: 2 warm-ups, 5 windows of 4 iterations, no graphs, no flush"
STUDY = "published: 10 warm-ups, 5 windows of 30 iterations"
BARS = "error bars: p20 to p80 over windows"
RINGS = "rings: noisy, slowest window above 1.25 x the median one"


def windows(number):
    """ms of each window of the case of this number; every seventh is noisy."""
    base = 5.0 + number
    return [base, 1.02 * base, 1.04 * base, 1.1 * base, base * (2.0 if number % 7 == 0 else 1.15)]


def record(number, protocol=(2, 5, 4)):
    case, times = CASES[number], windows(number)
    p = {q: float(np.percentile(times, q)) for q in (20, 50, 80)}
    names = ["iteration", "forward"] + ["backward"] * (case.mode == "training")
    statistics = {n: {f"p{q}": SHARES[n] * v for q, v in p.items()} for n in names}
    found = {f"{name}MS": statistics[name]["p50"] for name in names}
    found |= {"usefulTFPerGPU": 100 / p[50], "meanTXGBps": 10 / p[50], "noisy": number % 7 == 0}
    found["samples"] = {"statistics": statistics, "slowestRank": {"iteration": times}}
    told = dict(zip(("warmups", "windows", "iterations"), protocol, strict=True))
    provenance = {"protocol": told, "graphs": False, "flushedBytes": 0}
    return make_record(case, "CPU test", found, provenance)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("spread") / "sweep" / "records"
    for number, case in enumerate(CASES):
        write_record(record(number), base / f"{case.id}.record.json")
    return base


@pytest.fixture(scope="module")
def own(folder):
    return load_table(folder)


def numbers():
    return {case.id: number for number, case in enumerate(CASES)}


def test_the_table_has_percentiles_and_protocol_as_the_records_say(own, study):
    for row in own.to_dict("records"):
        times = windows(numbers()[row["id"]])
        for step, share in SHARES.items():
            low, high = row[f"{step}MS_p20"], row[f"{step}MS_p80"]
            if step == "backward" and row["mode"] == "inference":
                assert np.isnan([low, high]).all()
                continue
            assert (low, high) == pytest.approx(
                (share * np.percentile(times, 20), share * np.percentile(times, 80))
            )
        assert "measured: " + row["protocol"] == RAN
    assert study["iterationMS_p20"].isna().all()  # it has no samples
    assert "published: " + study["protocol"].unique().item() == STUDY


def test_percentiles_survive_an_export(own, tmp_path):
    from workbench.records.results import export_results

    export_results(own, tmp_path / "own.json")
    again = load_table(tmp_path / "own.json")
    pd.testing.assert_frame_equal(again, own)


@pytest.mark.parametrize(
    "samples",
    [
        {},
        {"statistics": []},
        {"statistics": {"iteration": [1]}},
        {"statistics": {"iteration": {"p20": "x", "p80": True}}},
    ],
)
def test_a_record_without_percentiles_has_none(samples, tmp_path):
    held = json.loads(record(1).model_dump_json(exclude_unset=True)) | {"samples": samples}
    held["provenance"] = {"protocol": "unknown"}
    path = tmp_path / f"{held['id']}.record.json"
    path.write_text(json.dumps(held))
    table = load_table(path)
    assert table[["iterationMS_p20", "iterationMS_p80"]].isna().all(axis=None)
    assert table["protocol"].tolist() == [""]


def balanced_like(case):
    """Number of the balanced case of the same system and shape."""
    names = ("mode", "ep", "pipeline", "F")
    return next(
        n
        for n, c in enumerate(CASES)
        if c.imbalance == 1
        and c.category == "single_layer"
        and all(getattr(c, name) == getattr(case, name) for name in names)
    )


TIMED = {
    "balanced": ("y", "iterationMS"),
    "imbalance": ("y", "iterationMS"),
    "width": ("y", "iterationMS"),
    "packing_time": ("y", "iterationMS"),
    "slowdown": ("y", "slowdown"),
    "rates": ("y", "meanTXGBps"),
}


@pytest.mark.parametrize("name", TIMED)
def test_error_bars_reach_from_p20_to_p80(name, own, study):
    axis, column = TIMED[name]
    shown = figure_data(all_figures(concat([study, own]), None)[name])
    cases = shown[shown["case"].notna() & ~shown["series"].eq(NOISY)]
    mine = cases[cases["case"].isin(own["id"])]
    assert len(mine)
    theirs = cases[cases["case"].isin(study["id"]) & ~cases["case"].isin(own["id"])]
    assert theirs[[f"{axis}_low", f"{axis}_high"]].isna().all(axis=None)
    checked = 0
    for row in mine.to_dict("records"):
        times = windows(numbers()[row["case"]])
        low, high = np.percentile(times, 20), np.percentile(times, 80)
        middle = np.median(times)
        wanted = {"iterationMS": (low, high), "meanTXGBps": (10 / high, 10 / low)}.get(column)
        if wanted is None:
            base = windows(balanced_like(CASES[numbers()[row["case"]]]))
            if row["x"] == 1:
                assert np.isnan(row["y_low"])
                continue
            wanted = (low / np.percentile(base, 80), high / np.percentile(base, 20))
        value = {"iterationMS": middle, "meanTXGBps": 10 / middle}.get(column)
        if value is not None and not np.isclose(row["y"], value):
            continue  # the figure's other row
        assert (row[f"{axis}_low"], row[f"{axis}_high"]) == pytest.approx(wanted)
        checked += 1
    assert checked


def test_ratios_of_pairs_and_shares_of_floors_have_bars_too(own, study):
    mine = study.assign(origin="measured", device="NVIDIA GB300", protocol="as it was")
    mine["iterationMS_p20"], mine["iterationMS_p80"] = (
        mine["iterationMS"] * factor for factor in (0.9, 1.2)
    )
    found = all_figures(mine, load_hardware("GB300"))
    pairs = figure_data(found["pairs"]).dropna(subset="case")
    np.testing.assert_allclose(pairs["x_low"], pairs["x"].astype(float) * 0.9 / 1.2)
    np.testing.assert_allclose(pairs["x_high"], pairs["x"].astype(float) * 1.2 / 0.9)
    for name in ("floors", "roofline"):
        shown = figure_data(found[name]).dropna(subset="case")
        np.testing.assert_allclose(shown["y_low"], shown["y"].astype(float) / 1.2)
        np.testing.assert_allclose(shown["y_high"], shown["y"].astype(float) / 0.9)
    floors = figure_data(found["floors"])
    np.testing.assert_allclose(floors["x_low"], floors["x"].astype(float) * 0.9)


def test_noisy_cases_are_ringed_and_said(own):
    noisy = set(own.loc[own["noisy"], "id"])
    assert noisy == {case.id for n, case in enumerate(CASES) if n % 7 == 0}
    found = all_figures(own, None)
    for name in ("balanced", "imbalance", "width", "packing_time"):
        shown = figure_data(found[name])
        drawn = set(shown.loc[shown["case"].notna(), "case"])
        assert set(shown.loc[shown["series"] == NOISY, "case"]) == drawn & noisy
    subtitles = {
        n: f.layout.title.subtitle.text.replace("<br>", " ")
        for n, f in found.items()
        if FIGURES[n].timed and f.data
    }
    assert subtitles["imbalance"] == f"{RAN} {BARS} {RINGS}"
    assert subtitles["balanced"] == f"{RAN} {BARS}"  # none of its cases is noisy


def test_what_is_predicted_has_no_spread_and_no_protocol(folder):
    report = open_sweep_report(folder)
    for fig in report.figures.values():
        shown = figure_data(fig)
        ends = shown[["x_low", "x_high", "y_low", "y_high"]].notna().any(axis=1)
        assert ends.any()
        assert shown.loc[ends, "series"].str.contains("measured").all()
        assert shown["series"].eq(NOISY).sum() <= shown["series"].str.contains("measured").sum() / 5
        assert "predicted: " not in fig.layout.title.subtitle.text
    shown = figure_data(report.figures["side_by_side"])
    assert shown["series"].eq(NOISY).sum() == sum(n % 7 == 0 for n in range(len(CASES)))


def test_the_protocol_stands_on_every_figure_of_times_and_on_no_other(own, study):
    hardware = load_hardware("GB300")
    for name, fig in all_figures(concat([study, own]), hardware).items():
        text = (fig.layout.title.subtitle.text or "").replace("<br>", " ")
        ours = not FIGURES[name].needs_hardware  # those hold the cases of one device
        assert (STUDY in text) == FIGURES[name].timed, name
        assert (RAN in text) == (FIGURES[name].timed and ours), name


def test_what_the_records_say_is_shown_not_a_constant(tmp_path):
    for number, case in enumerate(CASES[:2]):
        write_record(record(number, (7, 3, 9)), tmp_path / f"{case.id}.record.json")
    report = open_sweep_report(tmp_path)  # whose own defaults are others
    told = "measured: 7 warm-ups, 3 windows of 9 iterations, no graphs, no flush"
    assert report.protocol().startswith(told)
    text = report.figures["side_by_side"].layout.title.subtitle.text.replace("<br>", " ")
    assert text.startswith(told)


def test_tables_of_a_sweep_have_the_columns(folder):
    report = open_sweep_report(folder, ["html"])
    times = report.times()
    for step in ("iteration", "forward", "backward"):
        at = times.columns.get_loc(f"{step}MS")
        assert times.columns[at + 1 : at + 3].tolist() == [f"{step}MS_p20", f"{step}MS_p80"]
    assert times["noisy"].sum() == sum(n % 7 == 0 for n in range(len(CASES)))
    fit = report.fit()
    assert {"measured_p20", "measured_p80"} <= set(fit.columns)
    index = folder.parents[1] / "index.html"
    index.write_text("<body><!-- notebook --></body>")
    add_measured(index, index.parent)
    page = index.read_text()
    assert RAN in page
    for text in ("iterationMS_p20", "backwardMS_p80", "noisy"):
        assert f"<th>{text}</th>" in page


def test_progress_names_a_noisy_case():
    for number, said in ((7, " ms, noisy"), (8, " ms")):
        ended = Progress(done=1, total=1, failed=0, record=record(number))
        assert ended.line().endswith(said)


def test_a_comparison_has_the_columns_and_names_noise(folder, tmp_path):
    found = compare(folder, folder).set_index("id")
    for number, case in enumerate(CASES):
        row = found.loc[case.id]
        for side in "ab":
            percentiles = [row[f"{side}MS{end}"] for end in ("_p20", "", "_p80")]
            assert percentiles == pytest.approx(np.percentile(windows(number), [20, 50, 80]))
        assert row["why"].endswith("A and B noisy") == (number % 7 == 0)


def test_one_id_with_other_work_is_not_compared(tmp_path):
    from dataclasses import replace

    case = next(case for case in CASES if case.profile)
    for name, factors in (("a", case.factors), ("b", case.factors[::-1])):
        held = record(CASES.index(case)).model_dump() | {"factors": list(factors)}
        held["profile"] = "own"
        path = tmp_path / name / f"{replace(case, profile='own', factors=factors).id}.record.json"
        held["id"] = path.name.removesuffix(".record.json")
        path.parent.mkdir()
        path.write_text(json.dumps(held))
    (row,) = compare(tmp_path / "a", tmp_path / "b").to_dict("records")
    assert row["verdict"] == "undecided"
    assert row["why"].startswith("factors differs: (")


@pytest.mark.browser
@pytest.mark.parametrize("name", [*TIMED, "pairs"])
def test_bars_rings_and_captions_do_not_overlap(name, own, study, browser, tmp_path, page):
    from tests.report.test_export import measure, text_faults

    fig = all_figures(concat([study, own]), None, names=[name])[name]
    done = export_figures({name: fig}, tmp_path, ["svg"])
    svg = done.files[name]["svg"].read_text()
    assert text_faults(measure(page, svg)) == []


def test_tables_keep_what_they_are_given(own):
    before = own.copy()
    tables.single_layer(own)
    tables.balanced(own)
    pd.testing.assert_frame_equal(own, before)
