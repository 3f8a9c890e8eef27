"""What a test needs of the machine beyond what the README's commands install.

Each function gives what the test needs, or skips it with the reason; in continuous integration,
which installs these tools and runs as root, a skip is a failure (tests/conftest.py).
"""

import os
import shutil
import signal
import subprocess
import sys

import pytest

ADMIN_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
"""Where administrators' programs are too, which an ordinary user's PATH leaves out."""


def program(name: str) -> str:
    """The path of a program."""
    path = shutil.which(name, path=ADMIN_PATH)
    if path is None:
        pytest.skip(f"needs {name}, which is not installed here")
    return path


def root(what: str) -> None:
    """That we are root, for `what` needs it."""
    if os.geteuid() != 0:
        pytest.skip(f"{what} needs root")


def permitted(name: str, *arguments: str) -> None:
    """Runs a program that changes the machine, which root alone may, and not in every container."""
    done = subprocess.run([program(name), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = " ".join(done.stderr.split())
        pytest.skip(f"{name} {arguments[0]} is not permitted here: {said}")


def heeded_signals() -> None:
    """For a child that is to be interrupted: nohup and a shell's `&` would have it ignore that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def browser() -> str:
    """The path of a Chrome or Chromium, found as the export finds it."""
    from workbench.report.export import find_browser

    path, reason = find_browser()
    if path is None:
        pytest.skip(reason)
    return path


def driven_browser() -> str:
    """The path of a browser that Playwright can drive: its driver must start too."""
    path = browser()
    driver = [sys.executable, "-m", "playwright", "--version"]
    done = subprocess.run(driver, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"Playwright's driver does not start: {' '.join(done.stderr.split())}")
    return path
