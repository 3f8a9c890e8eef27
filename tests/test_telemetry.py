"""Clocks, temperature and power by a driver's answers, and what a record keeps of them."""

from types import SimpleNamespace

import pytest
import torch

from tests import fake_nvml
from workbench.bench.monitor import Monitor
from workbench.cuda import Cuda
from workbench.runtime import Cpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's second GPU is the driver's first."""
    fake_nvml.install(monkeypatch, [fake_nvml.gpu("GPU-b"), fake_nvml.gpu("GPU-a")])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    named = {0: "a", 1: "b"}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=named[index])
    )


@pytest.mark.usefixtures("gpu")
def test_what_the_driver_does_not_say_is_left_out() -> None:
    assert Cuda().telemetry() == {
        "clockMHz": 1755,
        "memoryClockMHz": 3201,
        "temperatureC": 54,
        "slowedBy": "power cap",
    }


def test_without_a_driver_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="a")
    )
    fake_nvml.install(monkeypatch, [])
    assert Cuda().telemetry() is None


class Told(Cpu):
    """A CPU that is told what to say."""

    def __init__(self, *said: dict[str, object]) -> None:
        self.said = list(said)

    def telemetry(self) -> dict[str, object]:
        return self.said.pop(0)


def test_least_median_most_and_every_reason() -> None:
    looks = [(1980, ""), (1200, "power cap"), (1755, "temperature")]
    monitor = Monitor(Told(*({"clockMHz": mhz, "slowedBy": why} for mhz, why in looks)))
    for _ in looks:
        monitor._look()
    assert monitor.summary() == {
        "looks": 3,
        "clockMHz": [1200, 1755, 1980],
        "slowedBy": ["power cap", "temperature"],
    }
