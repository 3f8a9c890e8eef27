"""JupyterLab on copies of the notebooks, and Chromium, for the browser tests."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import files
from pathlib import Path
from typing import Any

import pytest

from tests import needs

ROOT = Path(__file__).parents[2]
SHOTS = ROOT / "outputs" / "screenshots"
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # cells out of sight are else not drawn
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
}


@dataclass(kw_only=True)
class Lab:
    """A running JupyterLab; `log` has what it and its kernels print."""

    url: str
    folder: Path
    log: Path


def _shared(kind: str, marker: str) -> str:
    """Where the installed packages have their Jupyter files of a kind (share or etc): not always
    under sys.prefix, when one environment is laid over another."""
    for package in ("jupyterlab", "jupyterlab_widgets", "notebook_shim"):
        for file in files(package) or ():
            path = str(file.locate())
            if f"/{kind}/jupyter/{marker}" in path:
                return path.split(f"/{kind}/jupyter/")[0] + f"/{kind}/jupyter"
    raise AssertionError(f"no {kind}/jupyter/{marker} in the installed packages")


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    home = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", home / "notebooks")
    for name, content in SETTINGS.items():
        path = home / "settings" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    share = Path(os.path.realpath(_shared("share", "lab")))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTER", "IPYTHON"))}
    environment = kept | {
        "JUPYTER_PATH": str(share),
        "JUPYTER_CONFIG_PATH": os.path.realpath(_shared("etc", "jupyter_server_config.d")),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "JUPYTER_PREFER_ENV_PATH": "0",
        **{f"JUPYTER_{n}_DIR": str(home / n.lower()) for n in ("CONFIG", "DATA", "RUNTIME")},
        "IPYTHONDIR": str(home / "ipython"),
        "OMP_NUM_THREADS": "2",
    }
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        f"--port={port}",
        "--ServerApp.port_retries=0",
        "--IdentityProvider.token=",
        "--ContentsManager.pre_save_hook=workbench.lab.keep_without_outputs",
        f"--LabApp.app_dir={share / 'lab'}",
        f"--ServerApp.root_dir={home / 'notebooks'}",
    ]
    log = home / "lab.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=environment, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(url, process, log)
        yield Lab(url=url, folder=home / "notebooks", log=log)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(240):
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(f"{url}/api", timeout=1).close()
            return
        except OSError:
            time.sleep(0.25)
    raise AssertionError(log.read_text())


@pytest.fixture(scope="module")  # only one of Playwright's drivers may be open at a time
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    program = needs.driven_browser()
    options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=options)
        yield browser
        browser.close()


@dataclass(kw_only=True)
class Notebook:
    """A notebook open in the browser. `errors` has what the console and the pages complained of,
    and every address outside this machine that was asked for."""

    page: Any
    lab: Lab
    name: str
    errors: list[str] = field(default_factory=list)

    def run_all(self) -> None:
        self.page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for(timeout=60_000)
        self.page.get_by_role("menuitem", name="Run", exact=True).first.click()
        self.page.get_by_text("Run All Cells", exact=True).click()

    def save(self, path: Path) -> None:
        """Save, and wait until the file has been written."""
        self.page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for(timeout=60_000)
        before = path.stat().st_mtime_ns
        self.page.get_by_role("menuitem", name="File", exact=True).first.click()
        self.page.get_by_text("Save Notebook", exact=True).first.click()
        seen = None
        for _ in range(100):
            self.page.wait_for_timeout(100)
            # The file is emptied first: it is written when it is not empty and stays as it is.
            now = path.stat()
            last, seen = seen, (now.st_mtime_ns, now.st_size)
            if now.st_mtime_ns != before and now.st_size and seen == last:
                return
        raise AssertionError(f"{path.name} was not saved")

    def control(self, label: str) -> Any:
        exact = re.compile(f"^{re.escape(label)}$")
        widget = self.page.locator(".jupyter-widgets.widget-inline-hbox")
        return widget.filter(has=self.page.locator("label", has_text=exact)).first

    def choose(self, label: str, option: str) -> None:
        self.control(label).locator("select").select_option(label=option)

    def type(self, label: str, text: str) -> None:
        """Type a text into a field and leave it."""
        field = self.control(label).locator("input")
        field.fill(text)
        field.press("Enter")

    def press(self, label: str, key: str, times: int) -> None:
        """Move a slider's handle by keys."""
        handle = self.control(label).locator(".noUi-handle")
        for _ in range(times):
            handle.press(key)

    def readout(self, label: str) -> float:
        return float(self.control(label).locator(".widget-readout").inner_text())

    def wait_text(self, text: str) -> None:
        self.page.locator(".widget-html", has_text=text).first.wait_for(timeout=60_000)

    def trace(self, name: str, panel: str, axis: str) -> list[Any]:
        """What the browser draws: x or y of a trace."""
        found = self.page.evaluate(
            """([name, panel, axis]) => document.querySelector('.js-plotly-plot').data
               .filter(t => t.name === name && t.meta === panel && t[axis] && t[axis].length)
               .map(t => Array.from(t[axis]))[0]""",
            [name, panel, axis],
        )
        return list(found or [])

    def wait_trace(self, name: str, panel: str, axis: str, expected: Any) -> None:
        """Until the browser draws these values: the plot follows the text a little later."""
        for _ in range(100):
            if self.trace(name, panel, axis) == expected:
                return
            self.page.wait_for_timeout(100)
        assert self.trace(name, panel, axis) == expected

    def layout(self, path: str) -> Any:
        return self.page.evaluate(
            "path => path.split('.').reduce((o, k) => o?.[k], "
            "document.querySelector('.js-plotly-plot')._fullLayout)",
            path,
        )

    def upload(self, path: Path) -> None:
        with self.page.expect_file_chooser() as chooser:
            self.page.locator(".widget-upload").click()
        chooser.value.set_files(path)

    def shot(self, name: str, width: int) -> None:
        """A picture of the explorer at a width of the window, kept in outputs/screenshots."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.set_viewport_size({"width": width, "height": 1150})
        self.page.wait_for_timeout(700)
        self.page.locator(".js-plotly-plot").scroll_into_view_if_needed()
        self.page.screenshot(path=SHOTS / f"{name}-{width}.png")

    def complaints(self) -> list[str]:
        """Errors of the console, of cells, and of the kernel's handlers."""
        cells = self.page.locator('[data-mime-type="application/vnd.jupyter.stderr"]')
        told = re.findall(r"(?m)^.*(?:Traceback|Exception in|Error:).*$", self.lab.log.read_text())
        return self.errors + cells.all_inner_texts() + told


@pytest.fixture
def notebook(lab: Lab, chromium: Any, request: pytest.FixtureRequest) -> Iterator[Notebook]:
    """The notebook that `pytest.mark.parametrize(..., indirect=True)` names, open in a page."""
    page = chromium.new_page(viewport={"width": 1300, "height": 1150})
    opened = Notebook(page=page, lab=lab, name=request.param)
    outside = re.compile(r"https?://(?!127\.0\.0\.1)")
    page.on("console", lambda m: opened.errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: opened.errors.append(str(error)))
    page.on("request", lambda r: opened.errors.append(r.url) if outside.match(r.url) else None)
    page.goto(f"{lab.url}/lab/tree/{request.param}?reset")
    yield opened
    page.close()
