import pytest

from tests import needs
from workbench.hardware import load_hardware
from workbench.records.results import concat, load_table
from workbench.report.export import export_figures
from workbench.report.figures import all_figures


@pytest.fixture(scope="session")
def study():
    return load_table()


@pytest.fixture(scope="session")
def figures(study):
    return all_figures(study, load_hardware("GB300"))


@pytest.fixture(scope="session")
def browser():
    return needs.browser()


@pytest.fixture(scope="session")
def exported(figures, browser, tmp_path_factory):
    """The whole batch as HTML, SVG and CSV, made once."""
    done = export_figures(figures, tmp_path_factory.mktemp("figures"), ["html", "svg"])
    assert done.skipped == ""
    return done


@pytest.fixture(scope="session")
def overlaid(study, browser, tmp_path_factory):
    """SVG of the study with records of one's own over it, another shape on another device."""
    mine = study.assign(origin="measured", device="NVIDIA H200", implementation="own", T=512)
    figures = all_figures(concat([study, mine[mine["ep"] < 64]]), load_hardware("GB300"))
    return export_figures(figures, tmp_path_factory.mktemp("overlaid"), ["svg"])


@pytest.fixture(scope="module")  # only one of Playwright's drivers may be open at a time
def page():
    from playwright.sync_api import sync_playwright

    program = needs.driven_browser()
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium.new_page(viewport={"width": 1300, "height": 900})
        chromium.close()
