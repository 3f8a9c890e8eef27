"""The report as a whole: the stored notebook, the run, the index page, bad input."""

import ast
import csv
import html
import json
import re

import nbformat
import papermill
import pytest

from workbench.errors import InputError
from workbench.records.results import REFERENCE, load_table
from workbench.report.figure_data import figure_data
from workbench.report.figures import FIGURES
from workbench.report.study_report import ReportParameters, open_report
from workbench.runner.main_job import EXPLORERS, MODEL_NOTEBOOK, NOTEBOOK, build_report
from workbench.runner.notebook import MAX_BYTES, NotebookError

SHA256 = "24bd0ff21754fb429eca41829929d655fe51ab86ee01e171cb4817ed3794e272"


@pytest.fixture(scope="module")
def index(tmp_path_factory, browser):
    """The page of a small run with non-default parameters, made by the strict runner."""
    out = tmp_path_factory.mktemp("runs")
    return build_report(out, {"formats": ["html", "svg"], "ep": "8,32", "hardware": "GB300"})


def markup(index) -> str:
    """A page without its scripts."""
    return re.sub(r"<script[^>]*>.*?</script>", "", index.read_text(), flags=re.DOTALL)


def test_notebook_is_stored_clean():
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(book)
    assert (book.nbformat, book.nbformat_minor) == (4, 5)
    assert book.metadata.kernelspec.name == "python3"
    assert [c.metadata.tags for c in book.cells if "tags" in c.metadata] == [["parameters"]]
    for cell in book.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
            assert len(cell.source.splitlines()) <= 15
            nodes = ast.walk(ast.parse(cell.source))
            assert not any(isinstance(n, ast.FunctionDef | ast.ClassDef) for n in nodes)


def test_notebook_shows_every_figure_and_declares_the_model_s_parameters():
    book = nbformat.read(NOTEBOOK, as_version=4)
    source = "\n".join(cell.source for cell in book.cells if cell.cell_type == "code")
    assert re.findall(r'files\.show\("(\w+)"\)', source) == list(FIGURES)
    (cell,) = [c for c in book.cells if c.metadata.get("tags") == ["parameters"]]
    declared = {
        node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(cell.source).body
    }
    assert declared == ReportParameters().model_dump()


@pytest.mark.browser
def test_run_leaves_the_files_that_it_names(index):
    folder = index.parent
    run = json.loads((folder / "run.json").read_text())
    assert run["status"] == "complete"
    assert run["parameters"]["ep"] == [8, 32]
    notebook = folder / NOTEBOOK.name
    assert notebook.stat().st_size < MAX_BYTES
    assert notebook.stat().st_size > 100_000  # it holds the figures
    links = re.findall(r'<a href="([^"]+)"', markup(index))
    assert len(links) == 3 * len(FIGURES) + 5 + len(EXPLORERS)
    assert f"model/{MODEL_NOTEBOOK.name}" in links
    assert [link for link in links if not (folder / link).is_file()] == []
    exported = load_table(folder / "data" / "results.json")
    assert set(exported["ep"]) == {8, 32}
    study = load_table()
    assert exported["id"].tolist() == study.loc[study["ep"].isin([8, 32]), "id"].tolist()
    with (folder / "data" / "cases.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(exported)


@pytest.mark.browser
def test_page_loads_nothing_and_draws_every_figure(index, page):
    requests, errors = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text))
    page.goto(index.as_uri())
    page.click("summary")
    page.wait_for_timeout(500)
    requests = [url for url in requests if not url.startswith(("data:", "blob:"))]
    assert requests == [index.as_uri()]
    assert errors == []
    assert page.locator("figure .main-svg").count() >= len(FIGURES)
    drawn = page.locator("figure").evaluate_all("fs => fs.map(f => f.id)")
    assert drawn == list(FIGURES)
    notebook = page.frames[1]
    assert notebook.locator("h1").first.inner_text() == "Report of an expert-parallel MoE study"
    pictures = notebook.locator("img").evaluate_all("imgs => imgs.map(i => i.naturalWidth)")
    assert len(pictures) == len(FIGURES)
    assert min(pictures) > 300


BARS = """fs => fs.map(f => {
  const box = e => (({left, right, top, bottom}) => ({left, right, top, bottom}))(
    e.getBoundingClientRect());
  const texts = [...f.querySelectorAll('.main-svg text')].filter(t => t.textContent.trim());
  return {bar: box(f.querySelector('.modebar')), texts: texts.map(t => [t.textContent, box(t)])};
})"""


@pytest.mark.browser
def test_no_text_lies_under_the_buttons(index, page):
    """On the page and in each figure's own file, in a browser that shows the buttons always."""
    page.goto(index.as_uri())
    found = page.locator("figure").evaluate_all(BARS)
    for path in sorted((index.parent / "figures").glob("*.html")):
        page.goto(path.as_uri())
        found += page.locator(".plotly-graph-div").evaluate_all(BARS)
    assert len(found) == 2 * len(FIGURES)
    for figure in found:
        bar = figure["bar"]
        assert bar["right"] - bar["left"] > 100
        under = [
            text
            for text, box in figure["texts"]
            if box["right"] > bar["left"]
            and box["left"] < bar["right"]
            and box["bottom"] > bar["top"]
            and box["top"] < bar["bottom"]
        ]
        assert under == []


def test_page_and_notebook_name_no_other_host(index):
    body = markup(index)
    inner = html.unescape(re.search(r'srcdoc="([^"]*)"', body)[1])
    for source in (body, inner):
        loads = re.findall(r"""(?:src|href|action)\s*=\s*["'](?:https?:)?//[^"']*""", source)
        assert loads == []
        assert not re.search(r"@import|url\(\s*[\"']?(?:https?:)?//", source)


def test_page_has_headline_and_provenance(index):
    text = index.read_text()
    facts = dict(re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>", text))
    assert facts["input"] == REFERENCE.name
    assert facts["input SHA-256"] == SHA256
    assert facts["ep"] == "8, 32"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", facts["made"])
    assert {"moe-workbench", "plotly", "pandas", "Python"} <= set(facts)
    groups = dict(re.findall(r"<td>([\w ]+)</td>\s*<td>(\d+)</td>", text))
    # EP 8 has 6 pairs, EP 32 has 10
    assert groups.pop("all pairs") == "16"
    assert sum(map(int, groups.values())) == 16


@pytest.mark.browser
def test_plain_papermill_writes_the_page_too(tmp_path, browser):
    values = {
        "out_dir": str(tmp_path),
        "category": ["packing"],
        "formats": ["html"],
        "precision": "mxfp8",
    }
    papermill.execute_notebook(
        str(NOTEBOOK), str(tmp_path / "out.ipynb"), parameters=values, progress_bar=False
    )
    text = (tmp_path / "index.html").read_text()
    assert "12 published cases on NVIDIA GB300" in text
    assert "no balanced one-layer case in this selection" in text
    assert sorted(p.suffix for p in (tmp_path / "figures").glob("headline.*")) == [".csv", ".html"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ep": [7]}, r"no case with a time for ep=\[7\]"),
        ({"hardware": "GB1"}, r"hardware=GB1 must be one of GB300,"),
        ({"hardware_file": "/nowhere.toml"}, r"/nowhere.toml: cannot be read"),
        ({"results": "/nowhere.json"}, r"/nowhere.json: cannot be read"),
    ],
)
def test_bad_input_is_one_line(given, message):
    with pytest.raises(InputError, match=message) as caught:
        open_report(ReportParameters(**given))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"formatz": ["png"]}, "formatz"),
        ({"ep": "many"}, "ep='many'"),
        ({"formats": ["gif"]}, r"formats=\['gif'\]"),
        ({"results": __file__}, r"test_study_report\.py: line 1, column 3: not JSON"),
        ({"ep": "7"}, r"no case with a time for ep=\[7\]"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_is_written(given, message, tmp_path):
    with pytest.raises(InputError, match=message) as caught:
        build_report(tmp_path, given)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_cell_that_fails_fails_the_run(tmp_path, monkeypatch):
    """A folder that turns unwritable between the check and the run."""
    (tmp_path / "figures").write_text("in the way")
    monkeypatch.setattr("workbench.runner.main_job.new_run_dir", lambda name: tmp_path)
    with pytest.raises(NotebookError, match="figures"):
        build_report(None, {"formats": ["html"]})
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "failed"
    assert not (tmp_path / "index.html").exists()


def test_a_device_that_is_named_holds_all_cases():
    found = open_report(ReportParameters(hardware="H200", category=["packing"])).figures["roofline"]
    assert "H200" in found.layout.title.text
    assert "cases on NVIDIA GB300" in found.layout.title.text
    assert figure_data(found)["case"].count() == 20
    roof = figure_data(found)
    assert roof.loc[roof["series"] == "BF16 roof", "y"].max() == 989


def test_a_folder_of_ones_own_records_is_reported(tmp_path):
    study = json.loads(REFERENCE.read_text())
    for case in study["cases"][:3]:
        shape = {name: study["meta"][name] for name in ("T", "D", "E", "K", "sharedExperts")}
        own = {"origin": "measured", "implementation": "torch", "device": "a CPU"}
        path = tmp_path / f"{case['id']}.record.json"
        path.write_text(json.dumps({**case, **shape, **own}))
    report = open_report(ReportParameters(results=str(tmp_path)))
    assert report.hardware is None
    assert report.provenance()["origin"] == "measured"
    assert report.provenance()["cases"] == "3 on a CPU"
    exported = report.figures
    assert "no peaks are known" in exported["roofline"].layout.annotations[0].text
    assert {t.name for t in exported["imbalance"].data} == {"mok native BF16 (torch)"}
    before = report.input_sha256
    path.write_text(path.read_text() + "\n")
    assert open_report(report.parameters).input_sha256 != before
