"""Device peaks with a source for every number, from `data/hardware.toml` or a file like it.

A device or a precision that is not in the file raises: no peak is ever guessed.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

from workbench.errors import InputError
from workbench.files import read_text

PEAK_FIELD: Mapping[str, str] = {
    "bf16": "bf16_tflops",
    "fp8": "fp8_tflops",
    "mxfp8": "fp8_tflops",
    "fp4": "fp4_tflops",
    "mxfp4": "fp4_tflops",
    "nvfp4": "fp4_tflops",
}
"""Precision -> the peak it is held against. No MXFP8 peak is published: FP8 stands in for it."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One GPU. Peaks are dense; None means that no such number is known.

    name                  key in the file, e.g. `GB300`; `title` is the name for people
    bf16_tflops, fp8_tflops, fp4_tflops      peak TFLOP/s (1e12 per second)
    hbm_gb, hbm_tb_s      memory in GB (1e9 B) and its bandwidth in TB/s (1e12 B/s)
    scale_up_gb_s         GB/s (1e9 B/s) in one direction to all peers together
    scale_up_domain       GPUs with peer access to each other (72 for NVL72, 8 for HGX)
    block_scaled          whether its matrix units take MX operands (data and E8M0 scales of 32);
                          None where nobody says so
    sm_count              SMs, or compute units on AMD
    nic_gbit_s            Gbit/s per GPU beyond the scale-up domain
    measured_bf16_tflops, measured_fp8_tflops      best matrix product reached, TFLOP/s
    measured_copy_tb_s    device copy reached, TB/s, bytes read + written
    sources, notes        field name -> where its number comes from; -> what else is said of it
    """

    name: str
    title: str
    bf16_tflops: float
    fp8_tflops: float | None = None
    fp4_tflops: float | None = None
    hbm_gb: float
    hbm_tb_s: float
    scale_up_gb_s: float
    scale_up_domain: int
    block_scaled: bool | None = None
    sm_count: int | None = None
    nic_gbit_s: float | None = None
    measured_bf16_tflops: float | None = None
    measured_fp8_tflops: float | None = None
    measured_copy_tb_s: float | None = None
    sources: Mapping[str, str]
    notes: Mapping[str, str]

    def peak_tflops(self, precision: str) -> float:
        """Dense peak in TFLOP/s for a precision of PEAK_FIELD.

        It is the peak of the data type, not a claim that the device scales blocks in hardware.
        Raises InputError for an unknown precision and for one the device has no peak for.
        """
        known = [p for p, field in PEAK_FIELD.items() if getattr(self, field) is not None]
        if precision not in known:
            raise InputError(
                f"precision={precision} must be one with a known peak on {self.name}: "
                + ", ".join(known)
            )
        return float(getattr(self, PEAK_FIELD[precision]))

    def peak_or_nan(self, precision: str) -> float:
        """The same, NaN where the device has none."""
        peak = getattr(self, PEAK_FIELD[precision])
        return float("nan") if peak is None else float(peak)


class _Quantity(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    value: Annotated[FiniteFloat, Field(gt=0)]
    source: Annotated[str, Field(pattern=r"\S")]
    note: str = ""


class _Count(_Quantity):
    value: Annotated[int, Field(gt=0)]


class _Flag(_Quantity):
    value: bool


class _Device(BaseModel):
    """The file's side of Hardware; `match` defaults to its own name as a word, MIG slices apart."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str = ""
    match: re.Pattern[str] | None = None
    bf16_tflops: _Quantity
    fp8_tflops: _Quantity | None = None
    fp4_tflops: _Quantity | None = None
    hbm_gb: _Quantity
    hbm_tb_s: _Quantity
    scale_up_gb_s: _Quantity
    scale_up_domain: _Count
    block_scaled: _Flag | None = None
    sm_count: _Count | None = None
    nic_gbit_s: _Quantity | None = None
    measured_bf16_tflops: _Quantity | None = None
    measured_fp8_tflops: _Quantity | None = None
    measured_copy_tb_s: _Quantity | None = None


_FILE = TypeAdapter(dict[str, _Device])


def _read(path: str | Path | None) -> tuple[str, dict[str, _Device]]:
    """Name of the file for messages, and its devices by key. Raises InputError, one line."""
    place = "hardware.toml" if path is None else str(path)
    source = files("workbench") / "data" / "hardware.toml" if path is None else Path(path)
    try:
        devices = _parse(read_text(str(source)))
    except InputError:
        raise
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        given = "" if first["type"] == "missing" else f", not {first['input']!r}"
        raise InputError(f"{place}: {where}: {first['msg']}{given}") from error
    except RecursionError:
        raise InputError(f"{place}: is not TOML that can be read: nested too deeply") from None
    except ValueError as error:  # not UTF-8, or not TOML: tomllib says the line and column
        raise InputError(f"{place}: is not TOML: {error}") from error
    if not devices:
        raise InputError(f"{place}: must describe at least one device")
    return place, devices


@lru_cache(maxsize=8)
def _parse(text: str) -> dict[str, _Device]:
    return _FILE.validate_python(tomllib.loads(text))


def known_devices(path: str | Path | None = None) -> tuple[str, ...]:
    """Names of the devices in the file at `path`, or in the packaged one."""
    return tuple(_read(path)[1])


def load_hardware(name: str, path: str | Path | None = None) -> Hardware:
    """The device called `name` (in any case) in the file at `path`, or in the packaged one.

    A file of one's own replaces the packaged one. Raises InputError, one line, for a file that
    cannot be read or breaks a rule, and for an unknown device, with the known ones listed.
    """
    place, devices = _read(path)
    key = next((known for known in devices if known.casefold() == str(name).casefold()), None)
    if key is None:
        raise InputError(f"hardware={name} must be one of {', '.join(devices)} ({place})")
    device = devices[key]
    numbers = {field: value for field, value in device if isinstance(value, _Quantity)}
    values: dict[str, Any] = {field: number.value for field, number in numbers.items()}
    return Hardware(
        name=key,
        title=device.title or key,
        **values,
        sources={field: number.source for field, number in numbers.items()},
        notes={field: number.note for field, number in numbers.items() if number.note},
    )


def match_device(reported: str, path: str | Path | None = None) -> str:
    """Name of the device that a driver reports as `reported`, e.g. `NVIDIA GB300` -> `GB300`.

    The longest name is tried first, so GB300 comes before B300. Raises InputError for a device
    that the file does not have, with what to do: a PCIe H100, one of another memory size or a MIG
    slice is not the SXM part.
    """
    place, devices = _read(path)
    for name in sorted(devices, key=len, reverse=True):
        pattern = devices[name].match or re.compile(rf"\b{re.escape(name)}\b(?!.*\bMIG\b)")
        if re.search(pattern, str(reported)):
            return name
    raise InputError(
        f"device={str(reported)[:100]} must be one of {', '.join(devices)} ({place}): for another "
        "part, memory size or slice give a hardware_file that has its peaks and match its name"
    )
