"""No panel of an explorer is empty without a word, whatever the device and precision."""

import math
from typing import Any

import pytest

from workbench.explore.imbalance import ImbalanceExplorer, ImbalanceParameters
from workbench.explore.precision import PrecisionExplorer, PrecisionParameters
from workbench.explore.width import WidthExplorer, WidthParameters
from workbench.hardware import known_devices

SYSTEMS = ("dist_moe standard bf16", "dist_moe mega mxfp8", "mok native mxfp8")


def number(value: Any) -> bool:
    return isinstance(value, str) or (value is not None and math.isfinite(value))


def said(spec: dict[str, Any]) -> dict[str, list[str]]:
    """Panel -> the words in it, of each panel in which anything stands."""
    found: dict[str, list[str]] = {}
    for trace in spec["data"]:
        places = zip(trace["x"], trace["y"], strict=True)
        if any(number(x) and number(y) for x, y in places):
            words = trace.get("text", []) if trace.get("mode") == "text" else []
            found.setdefault(trace["meta"], []).extend(words)
    return found


def panels(spec: dict[str, Any]) -> set[str]:
    return {note["text"] for note in spec["layout"]["annotations"]}


@pytest.mark.parametrize("hardware", known_devices())
def test_every_panel_shows_something_or_says_why_not(hardware: str) -> None:
    explorers: list[Any] = [
        explorer(parameters(hardware=hardware, system=system, ep=ep))
        for explorer, parameters in (
            (WidthExplorer, WidthParameters),
            (ImbalanceExplorer, ImbalanceParameters),
        )
        for system in SYSTEMS
        for ep in (8, 64)
    ]
    explorers += [
        PrecisionExplorer(PrecisionParameters(hardware=hardware, formats=[name]))
        for name in ("bf16", "mxfp8-e4m3-rceil", "nvfp4")
    ]
    for explorer in explorers:
        spec = explorer.view.spec
        assert said(spec).keys() == panels(spec), explorer.state


def test_the_words_say_what_the_device_lacks() -> None:
    width = WidthExplorer(WidthParameters(hardware="H200"))
    assert said(width.view.spec)["Roofline"] == [
        "no MXFP8 roof: H200 has no block-scaled matrix units"
    ]
    width = WidthExplorer(WidthParameters(hardware="H200", system=SYSTEMS[0]))
    assert said(width.view.spec)["Roofline"] == []
    for name, lacks in (("mxfp8-e4m3-rceil", "block-scaled matrix units"), ("nvfp4", "FP4 peak")):
        one = PrecisionExplorer(PrecisionParameters(hardware="H200", formats=[name]))
        assert said(one.view.spec)["Time against error"] == [f"no time: H200 has no {lacks}"]
    plain = PrecisionExplorer(PrecisionParameters(formats=["bf16"]))
    assert said(plain.view.spec)["Scales of the tensor"] == ["BF16 has no scales"]
    assert said(PrecisionExplorer().view.spec)["Time against error"] == []
