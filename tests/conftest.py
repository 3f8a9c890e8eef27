"""In continuous integration (CI set, not to 0 or false) a skipped test fails the run: a missing
tool must show.

Tests marked `gpu` are deselected by default, which is not a skip. Without them Triton's kernels run
in its interpreter, which must be said before anything imports triton. With `-m gpu` tests marked
`values` are among them, and run their kernels on the GPU.
"""

import os

import pytest

from tests.interpreter import list_names_once


def _on_gpu(config: pytest.Config) -> bool:
    return str(config.getoption("markexpr", "")).strip() == "gpu"


def pytest_configure(config: pytest.Config) -> None:
    """Interpreter mode unless GPU tests are asked for, in worker processes too."""
    if not _on_gpu(config):
        os.environ["TRITON_INTERPRET"] = "1"
        list_names_once()
        return
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError("-m gpu needs a CUDA device, and torch sees none")


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _on_gpu(config):
        for item in items:
            if item.get_closest_marker("values"):
                item.add_marker("gpu")


def _skipped(config: pytest.Config) -> list[pytest.TestReport]:
    """Skips of tests and of whole modules; empty outside continuous integration."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI", "").lower() in ("", "0", "false") or reporter is None:
        return []
    return list(reporter.stats.get("skipped", []))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _skipped(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for report in _skipped(config):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        terminalreporter.write_line(
            f"FAILED {report.nodeid}: {reason}; with CI set a skip is a failure", red=True
        )
