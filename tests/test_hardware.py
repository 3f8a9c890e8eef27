"""Device peaks: the published table, names that drivers report, and files that break a rule."""

import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from workbench.errors import InputError
from workbench.hardware import known_devices, load_hardware, match_device

# name: BF16, FP8, FP4 TFLOP/s, HBM GB, TB/s, scale-up GB/s, domain, NIC Gbit/s, measured BF16
TABLE = {
    "GB300": (2500, 5000, 15000, 288, 8, 900, 72, 800, None),
    "GB200": (2500, 5000, 10000, 186, 8, 900, 72, 800, 1822),
    "B300": (2250, 4500, 14000, 288, 8, 900, 8, 800, 1769),
    "B200": (2250, 4500, 9000, 180, 8, 900, 8, 400, 1745),
    "H200": (989, 1979, None, 141, 4.8, 450, 8, 400, 788),
    "H100": (989, 1979, None, 80, 3.35, 450, 8, 400, 794.5),
    "MI355X": (2516, 5033, 10066, 288, 8, 537.6, 8, 400, 1565),
    "MI300X": (1307.4, 2614.9, None, 192, 5.3, 448, 8, 400, 668.4),
}

OWN = """
[Lab1]
bf16_tflops = { value = 100, source = "s" }
hbm_gb = { value = 16, source = "s" }
hbm_tb_s = { value = 1, source = "s" }
scale_up_gb_s = { value = 50, source = "s", note = "n" }
scale_up_domain = { value = 4, source = "s" }
"""


@pytest.mark.parametrize("name", TABLE)
def test_packaged_values_are_the_published_ones(name: str) -> None:
    gpu = load_hardware(name)
    assert (
        gpu.bf16_tflops,
        gpu.fp8_tflops,
        gpu.fp4_tflops,
        gpu.hbm_gb,
        gpu.hbm_tb_s,
        gpu.scale_up_gb_s,
        gpu.scale_up_domain,
        gpu.nic_gbit_s,
        gpu.measured_bf16_tflops,
    ) == TABLE[name]


def test_every_device_is_listed_and_the_h200_copy_is_kept() -> None:
    assert known_devices() == tuple(TABLE)
    assert load_hardware("H200").measured_copy_tb_s == 4.3


def test_every_number_in_the_file_has_its_source_beside_it() -> None:
    text = (Path(__file__).parents[1] / "workbench/data/hardware.toml").read_text()
    assert set(tomllib.loads(text)) == set(known_devices()) >= {"GB300", "B200", "H200"}
    for name, device in tomllib.loads(text).items():
        numbers = {k: v for k, v in device.items() if k not in ("title", "match")}
        assert all(number["source"].strip() for number in numbers.values())
        assert set(load_hardware(name).sources) == set(numbers)
    assert "12600" in load_hardware("B300").notes["fp4_tflops"]


def test_no_source_claims_a_measurement_of_our_own_without_a_record() -> None:
    root = Path(__file__).parents[1]
    claims = re.compile(r"\b(own|our|ours|we|here|this (project|machine|repo)|measure\w*)\b", re.I)
    for name in known_devices():
        gpu = load_hardware(name)
        for field, source in gpu.sources.items():
            named = re.findall(r"[\w/]+\.(?:py|json)\b", source)
            assert named or not claims.search(source), (name, field, source)
            assert all((root / path).is_file() for path in named)
    h200 = load_hardware("H200").sources
    for field in ("measured_bf16_tflops", "measured_copy_tb_s"):
        assert h200[field] == "report of one H200 machine, 2026-10-28"


def test_which_devices_scale_blocks() -> None:
    scaled = {name for name in known_devices() if load_hardware(name).block_scaled}
    assert scaled == {"GB300", "GB200", "B300", "B200", "MI355X"}
    assert {load_hardware(n).block_scaled for n in known_devices()} == {True, False}


def test_a_measured_ceiling_lies_below_its_peak() -> None:
    for name in known_devices():
        gpu = load_hardware(name)
        assert (gpu.measured_bf16_tflops or 0) < gpu.bf16_tflops
        assert (gpu.measured_fp8_tflops or 0) < gpu.peak_tflops("fp8")
        assert (gpu.measured_copy_tb_s or 0) < gpu.hbm_tb_s


def test_peak_by_precision() -> None:
    gpu = load_hardware("gb300")
    peaks = {p: gpu.peak_tflops(p) for p in ("bf16", "fp8", "mxfp8", "fp4", "mxfp4", "nvfp4")}
    assert peaks == {
        "bf16": 2500,
        "fp8": 5000,
        "mxfp8": 5000,
        "fp4": 15000,
        "mxfp4": 15000,
        "nvfp4": 15000,
    }


@pytest.mark.parametrize(("name", "precision"), [("H200", "mxfp4"), ("GB300", "fp64")])
def test_a_precision_without_a_peak_raises_and_lists_the_known(name: str, precision: str) -> None:
    with pytest.raises(InputError, match=rf"precision={precision} .*{name}: bf16, fp8, mxfp8"):
        load_hardware(name).peak_tflops(precision)


def test_an_unknown_device_raises_and_lists_the_known() -> None:
    with pytest.raises(InputError, match=r"hardware=A100 must be one of GB300, .*MI300X"):
        load_hardware("A100")


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA GB300", "GB300"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 SXM5 80GB", "H100"),
        ("GB300", "GB300"),
        ("AMD Instinct MI355X", "MI355X"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_reported_names_match(reported: str, name: str) -> None:
    assert match_device(reported) == name


@pytest.mark.parametrize(
    "reported",
    [
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA GH200 480GB",
        "NVIDIA GB300-WS",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H100 96GB HBM3",
        "NVIDIA H100 64GB HBM2",
        "NVIDIA H100 SXM5 64GB",
        "NVIDIA H100 CNX",
        "NVIDIA H200 MIG 3g.71gb",
        "NVIDIA B200 MIG 1g.23gb",
        "NVIDIA B200-X",
        "NVIDIA GB300 MIG 1g.34gb",
        "AMD Instinct MI300X VF",
        "AMD Instinct MI300X HF",
        "NVIDIA RTX PRO H100 Laptop",
        "",
    ],
)
def test_a_device_with_other_peaks_is_not_matched(reported: str) -> None:
    with pytest.raises(
        InputError, match=f"device={reported} must be one of GB300.*give a hardware_file that has"
    ):
        match_device(reported)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    gpu = load_hardware("lab1", path)
    assert (gpu.name, gpu.title, gpu.scale_up_gb_s, gpu.fp8_tflops) == ("Lab1", "Lab1", 50, None)
    assert (gpu.sources["hbm_gb"], gpu.notes) == ("s", {"scale_up_gb_s": "n"})
    assert known_devices(path) == ("Lab1",)
    assert match_device("ACME Lab1 PCIe", path) == "Lab1"
    with pytest.raises(InputError, match=r"device=ACME Lab1 MIG 1g\.2gb must be one of Lab1"):
        match_device("ACME Lab1 MIG 1g.2gb", path)
    with pytest.raises(InputError, match=r"hardware=GB300 must be one of Lab1 \(.*own.toml\)"):
        load_hardware("GB300", path)
    with pytest.raises(InputError, match=r"precision=mxfp8 .* Lab1: bf16$"):
        gpu.peak_tflops("mxfp8")


@pytest.mark.parametrize(
    ("old", "new", "place", "rule"),
    [
        ("value = 100", "value = -1", "Lab1.bf16_tflops.value", "greater than 0, not -1"),
        ("value = 100", "value = 0", "Lab1.bf16_tflops.value", "greater than 0, not 0"),
        ("value = 100", "value = nan", "Lab1.bf16_tflops.value", "finite number, not nan"),
        ("value = 100", "value = inf", "Lab1.bf16_tflops.value", "finite number, not inf"),
        ("value = 100", "value = true", "Lab1.bf16_tflops.value", "valid number, not True"),
        ("value = 4,", "value = 4.5,", "Lab1.scale_up_domain.value", "valid integer, not 4.5"),
        ('100, source = "s"', "100", "Lab1.bf16_tflops.source", "Field required"),
        ('100, source = "s"', '100, source = " "', "Lab1.bf16_tflops.source", "not ' '"),
        ("hbm_gb", "hbm_gib", "Lab1.hbm_gb", "Field required"),
        ("[Lab1]", "[Lab1]\nspeed = 3", "Lab1.speed", "not permitted, not 3"),
        ("[Lab1]", "[Lab1]\nmatch = '('", "Lab1.match", "regular expression, not '('"),
        ("[Lab1]", "[Lab1", "is not TOML", "line 2"),
        (OWN, "", "must describe", "at least one device"),
        ("[Lab1]", "x = 1\n[Lab1]", "x: ", "not 1"),
    ],
)
def test_a_bad_file_is_one_line_with_file_place_and_rule(
    tmp_path: Path, old: str, new: str, place: str, rule: str
) -> None:
    path = tmp_path / "own.toml"
    assert old in OWN
    path.write_text(OWN.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        load_hardware("Lab1", path)
    message = str(caught.value)
    assert message.startswith(f"{path}: {place}")
    assert rule in message
    assert "\n" not in message


def test_an_unreadable_file(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    for path, rule in ((tmp_path / "none.toml", "No such file"), (binary, "not UTF-8 text")):
        with pytest.raises(InputError, match=f"{re.escape(str(path))}: .*{rule}"):
            known_devices(path)
    with pytest.raises(InputError, match="Is a directory"):
        known_devices(tmp_path)
    binary.write_text("x = " + "[" * 100_000)
    with pytest.raises(InputError, match="nested too deeply"):
        known_devices(binary)


def test_numbers_are_plain_and_no_torch_is_imported() -> None:
    assert all(math.isfinite(load_hardware(n).hbm_tb_s) for n in known_devices())
    code = (
        "import sys; from workbench.hardware import load_hardware; load_hardware('GB300');"
        "print(sorted({'torch', 'plotly', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
